"""Configuration of the tool-use lane: the environment, its user, and how attempts are sampled.

A recipe whose ``environment.name`` is empty is the refiner's: one prompt, one answer. With a name,
every prompt is a *task* and every rollout an *episode*: turns of the model, answered by tools and a
user. Formulas stand in ``refiner_core/environments/README.md``.

With ``environment.name`` set, three fields of GRPO mean this: ``grpo.response_length`` is the
largest number of sampled tokens of *one turn*, ``grpo.max_token_length`` the context limit of the
whole episode, and ``grpo.stop_strings`` are not used (a turn ends at ``</tool_call>``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from refiner_core.contract.marks import execution, identity, section
from refiner_core.contract.resources import Resources


@dataclass(frozen=True)
class UserConfig:
    """The user whom an agent talks to, where it is a model (environments may bring their own)."""

    model: str = identity(
        "",
        doc="model of the simulated user at an OpenAI-compatible endpoint; empty is the "
        "environment's own scripted user, where it has one",
        legacy_value="",
    )
    base_url: str = execution("", doc="its endpoint, e.g. `http://127.0.0.1:8000/v1`")
    api_key_env: str = execution(
        "OPENAI_API_KEY", doc="environment variable that holds its key; a key stands nowhere else"
    )
    temperature: float = identity(0.7, doc="its sampling temperature", legacy_value=0.7)
    max_tokens: int = identity(512, doc="longest message of the user (tokens)", legacy_value=512)
    timeout_s: float = execution(60.0, doc="how long one request may take, seconds")
    max_retries: int = execution(5, doc="tries after a first one that failed")


@dataclass(frozen=True)
class ShapingConfig:
    """Partial credit: ``reward + alpha x partial``, where partial is the weighted share of checks
    that passed, renormalised over the kinds of checks that a task has."""

    alpha: float = identity(0.25, doc="weight of partial credit in training", legacy_value=0.25)
    alpha_by_domain: tuple[str, ...] = identity(
        (), doc="factors on alpha by domain, `NAME=FACTOR` each; 1 where none", legacy_value=()
    )
    weights: tuple[str, ...] = identity(
        ("action=0.5", "communicate=0.15", "environment=0.35"),
        doc="weights of the kinds of checks, `KIND=WEIGHT` each",
        legacy_value=("action=0.5", "communicate=0.15", "environment=0.35"),
    )
    weights_by_domain: tuple[str, ...] = identity(
        (), doc="weights of a domain of its own, `DOMAIN.KIND=WEIGHT` each", legacy_value=()
    )


@dataclass(frozen=True)
class EnvironmentConfig:
    """What an agent works in; see :mod:`refiner_core.environments`."""

    name: str = identity(
        "",
        doc="`desk` (shipped), `tau2` (where it is installed), or FILE.py:NAME of your own; empty "
        "is the refiner's task without tools",
        legacy_value="",
    )
    domains: tuple[str, ...] = identity(
        (), doc="domains that are used; none is all", legacy_value=()
    )
    train_split: str = identity("train", doc="split of the training tasks", legacy_value="train")
    test_split: str = identity("test", doc="split of the held-out tasks", legacy_value="test")
    tasks: str | None = identity(
        None, doc="file of tasks in the place of the environment's own", legacy_value=None
    )
    max_train_tasks: int | None = identity(
        None, doc="use at most this many training tasks", legacy_value=None
    )
    demonstrations: int = identity(
        0,
        doc="demonstrations that the environment's own expert makes for SFT, where it has one and "
        "data.sft_path names no file",
        legacy_value=0,
    )
    flawed_demonstrations: float = identity(
        0.0,
        doc="share of those demonstrations in which the expert makes a mistake",
        legacy_value=0.0,
    )
    max_turns: int = identity(100, doc="turns of the agent in an episode", legacy_value=100)
    repairs: Literal[0, 1] = identity(
        1,
        doc="further attempts, at temperature 0, at a turn that is no tool call",
        legacy_value=1,
    )
    unparsable: Literal["failure", "exclude"] = identity(
        "failure",
        doc="an episode that ends with a turn that is no tool call: a failure, or left out of "
        "training as the reference does (survivorship bias); in evaluation it is a failure",
        legacy_value="failure",
    )
    max_argument_bytes: int = identity(
        65536, doc="a tool call with longer arguments is refused, bytes", legacy_value=65536
    )
    nl_assertions: Literal["exclude", "judge"] = identity(
        "exclude",
        doc="assertions in plain language: left out of the reward, which is said, or asked of the "
        "recipe's judge",
        legacy_value="exclude",
    )
    schedule: Literal["auto", "ordered", "eager"] = identity(
        "auto",
        doc="when a turn begins: `ordered`, at a step of decoding that the episodes alone decide "
        "(bitwise repeatable); `eager`, as soon as its tools have answered; `auto`: ordered where "
        "the environment is deterministic",
        legacy_value="auto",
    )
    turn_timeout_s: float = execution(
        300.0,
        doc="how long tools and user may take over one turn before that is an error of the "
        "infrastructure, seconds",
    )
    episode_timeout_s: float = execution(
        3600.0, doc="the same of a whole episode, without the model's own turns, seconds"
    )
    workers: int = execution(16, doc="tools and users that are at work at a time")
    max_error_share: float = execution(
        0.5,
        doc="share of a step's (or an evaluation's) episodes that errors of the infrastructure may "
        "end before the stage stops, resumable",
    )
    user: UserConfig = section(UserConfig, doc="the user in training")
    shaping: ShapingConfig = section(ShapingConfig, doc="partial credit")


@dataclass(frozen=True)
class CurriculumConfig:
    """Advantages of tasks that teach little weigh less, by the success seen so far in training."""

    enabled: bool = identity(False, doc="weigh tasks by their success rate", legacy_value=False)
    min_attempts: int = identity(5, doc="attempts at a task before it is weighed", legacy_value=5)
    high: float = identity(0.75, doc="success rate above which a task is easy", legacy_value=0.75)
    low: float = identity(0.25, doc="success rate below which it is hard", legacy_value=0.25)
    high_weight: float = identity(
        0.1, doc="factor on the advantages of easy tasks", legacy_value=0.1
    )
    low_weight: float = identity(
        0.5, doc="factor on the advantages of hard tasks", legacy_value=0.5
    )


@dataclass(frozen=True)
class SampleConfig:
    """Rejection sampling: attempts at each training prompt or task, and which of them are kept."""

    attempts: int = identity(8, ge=1, doc="attempts per prompt or task")
    temperature: float = identity(0.8, ge=0, doc="sampling temperature")
    top_p: float = identity(1.0, gt=0, le=1, doc="nucleus sampling; 1 is off")
    top_k: int = identity(0, ge=0, doc="sample from the likeliest tokens only; 0 is off")
    success: float = identity(
        1.0,
        gt=0,
        le=1,
        doc="least reward of a full success, as a share of the highest possible reward",
    )
    min_partial: float = identity(
        0.6,
        ge=0,
        doc="of a prompt without a full success its best attempt is kept from this score on (the "
        "partial score of an episode, the share of the reward of an answer); above 1: none",
    )
    max_kept: int | None = identity(None, ge=1, doc="keep at most this many attempts of one prompt")
    distinct: Literal["none", "text", "tools"] = identity(
        "tools",
        doc="of a prompt's successes keep one of each: `tools` (sequence of the tools called; of "
        "answers the same as `text`), `text` (what was sampled), or `none`: keep all",
    )
    generation_backend: Literal["transformers", "vllm"] = identity(
        "transformers",
        doc="what samples; servers are those of grpo.rollout_server",
    )
    generation_batch_size: int = identity(
        256,
        ge=1,
        doc="samples decoded together; sums are taken in another order with another number",
    )
    save_freq: int = execution(
        1, ge=1, doc="batches between checkpoints; finished attempts are kept"
    )
    keep: int = execution(2, ge=1, doc="resume checkpoints kept; the newest complete one always is")
    resources: Resources = section(Resources, doc="resources of the sampling job")
