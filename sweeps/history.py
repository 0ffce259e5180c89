"""History of stages and the work in one: what a forecast is made of.

In: the identity of planned and of finished stages. Out: their :class:`Work` (how many steps or
samples, of what size) and :class:`Shape` (whatever else decides how long one takes), so that a
finished stage can speak for one that is still to run. Values and pure functions; who reads a
workspace is `flows.sweeping.forecasting`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from refiner_core.contract.kinds import KINDS

#: Stages that train on demonstrations, whose number of steps the data decide.
FINE_TUNING = tuple(k.name for k in KINDS.values() if k.trains == "demonstrations")
#: What decides how long a step or a sample takes, beside its size: per kind, dotted fields.
_JUDGE = ("judge.kind", "judge.model", "judge.form", "reward.rubric_source",
          "reward.static_rubrics", "reward.apply_paper_citation_reward")  # fmt: skip
_MODEL = ("model.dtype", "model.attn_implementation", "model.cpu_threads")
SHAPE_FIELDS: dict[str, tuple[str, ...]] = {
    **{
        stage: (
            *_MODEL,
            *(f"{stage}.optimizer", f"{stage}.pack_length"),
            *(f"{stage}.per_device_train_batch_size", f"{stage}.gradient_accumulation_steps"),
        )
        for stage in FINE_TUNING
    },
    "sample": (
        *_MODEL,
        *("sample.generation_backend", "sample.generation_batch_size", "grpo.response_length"),
        *("environment.name", "environment.max_turns"),
        *_JUDGE,
    ),
    "grpo": (
        *_MODEL,
        *("grpo.num_unique_prompts_rollout", "grpo.num_samples_per_prompt_rollout"),
        *("grpo.response_length", "grpo.max_token_length", "grpo.pack_length", "grpo.num_epochs"),
        *("grpo.num_mini_batches", "grpo.generation_backend", "grpo.generation_batch_size"),
        *("grpo.async_steps", "grpo.active_sampling"),
        *_JUDGE,
    ),
    "evaluate": (
        *_MODEL,
        *("evaluate.decoding", "evaluate.num_samples", "grpo.response_length"),
        *_JUDGE,
    ),
    "data": ("data.rl_split", "data.sft_split", "data.max_sft_rows", "data.max_rl_rows",
             "data.synthetic_sft_rows", "data.synthetic_rl_rows"),
    "command": ("command.run", "command.version"),
}  # fmt: skip
#: What stages did that were measured before there were these fields.
_BEFORE = {"grpo.async_steps": 0, "grpo.active_sampling": False}
#: What decides how many steps SFT takes, where not `max_train_steps` alone.
_SFT_STEPS = (
    *("max_train_steps", "num_train_epochs", "pack_length"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
)


class Shape(NamedTuple):
    """Stages of one shape take as long for a step or sample. ``model`` is the digest of the weights
    that the recipe starts from, ``devices`` counts GPUs of all nodes (0: CPUs)."""

    kind: str
    model: str
    devices: int
    values: tuple[Any, ...]


class Work(NamedTuple):
    """Work of a stage: ``units`` (steps, samples, or 1 where a stage is not divided; None:
    nobody can say yet), of ``size`` tokens each at most (1: not known), in ``unit`` for people;
    ``asked`` rollouts or samples that a judge sees; ``saves`` of checkpoints."""

    units: int | None
    size: int
    unit: str
    asked: int | None = 0
    saves: int = 0


@dataclass(frozen=True)
class Measured:
    """One finished stage, or the first steps of one.

    Attributes
    ----------
    shape, work
        Which, and what it did. ``work.units`` is what was really done.
    data
        Fingerprint of its data, where it has any.
    unit_s, save_s
        Seconds of a step or sample, and of a save; None where nobody noted them.
    start_s
        Seconds that were neither: loading, and what comes at the end.
    judge_calls
        Calls that its judge was asked with; None where it keeps no count.
    judge, steps_key
        What decides how often a judge is asked, and its number of steps.
    canary
        Of first steps: how many of which stage.
    """

    shape: Shape
    work: Work
    data: str = ""
    unit_s: float | None = None
    save_s: float | None = None
    start_s: float = 0.0
    judge_calls: int | None = None
    judge: tuple[Any, ...] = ()
    steps_key: tuple[Any, ...] = ()
    canary: str = ""


@dataclass(frozen=True)
class CanaryMeasure:
    """Measure of one stage by the first real steps of a sweep's first trial.

    Attributes
    ----------
    stage
        Id of the stage whose steps they were.
    steps
        How many.
    seconds_per_step, save_seconds, start_seconds
        Of a step, of a checkpoint's save, and from the job's start to its first step.
    tokens_per_second, peak_memory_bytes
        Shown to people; None where nobody measured them.
    judge_calls_per_step
        None where the judge keeps no count.
    """

    stage: str
    steps: int
    seconds_per_step: float | None
    save_seconds: float | None = None
    start_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    judge_calls_per_step: float | None = None


@dataclass(frozen=True)
class History:
    """Knowledge of a workspace.

    Attributes
    ----------
    stages
        Finished stages, newest first.
    prompts
        Fingerprint of a `data` stage -> number of its held-out and of its training prompts.
    """

    stages: tuple[Measured, ...] = ()
    prompts: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def shape_of(kind: str, identity: Mapping[str, Any], model: str, devices: int) -> Shape:
    """The shape of a stage, from its identity and its resources."""
    names = SHAPE_FIELDS.get(kind, ())
    values = tuple(_plain(identity.get(name, _BEFORE.get(name))) for name in names)
    return Shape(kind, model, devices, values)


def judge_of(identity: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values that decide how much a judge is asked about one rollout or sample."""
    return tuple(_plain(identity.get(name)) for name in _JUDGE)


def steps_key(kind: str, identity: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values that decide the number of steps, beside the data; empty where steps are configured."""
    if kind not in FINE_TUNING:
        return ()
    return tuple(identity.get(f"{kind}.{name}") for name in _SFT_STEPS)


def work_of(
    kind: str, identity: Mapping[str, Any], *, prompts: int | None = None, save_freq: int = 0
) -> Work:
    """Work of a stage of this identity.

    Parameters
    ----------
    prompts
        Held-out prompts for an evaluation, training prompts for sampling; None where nobody knows.
    save_freq
        Steps between checkpoints; 0 where none are saved.
    """
    if kind == "grpo":
        rollouts = int(identity["grpo.num_unique_prompts_rollout"]) * int(
            identity["grpo.num_samples_per_prompt_rollout"]
        )
        steps = int(identity["grpo.num_training_steps"])
        size = rollouts * int(identity["grpo.response_length"])
        return Work(steps, size, "step", steps * rollouts, _saves(steps, save_freq))
    if kind in FINE_TUNING:
        most = identity.get(f"{kind}.max_train_steps")
        packs = int(identity[f"{kind}.per_device_train_batch_size"]) * int(
            identity[f"{kind}.gradient_accumulation_steps"]
        )
        size = int(identity[f"{kind}.pack_length"]) * packs
        limit = None if most is None else int(most)
        return Work(limit, size, "step", 0, _saves(limit or 0, save_freq))
    if kind == "sample":
        attempts = None if prompts is None else prompts * int(identity["sample.attempts"])
        return Work(attempts, int(identity.get("grpo.response_length") or 1), "sample", attempts)
    if kind == "evaluate":
        each = samples_per_prompt(identity)
        samples = None if prompts is None else prompts * each
        return Work(samples, int(identity.get("grpo.response_length") or 1), "sample", samples)
    return Work(1, 1, kind)


def samples_per_prompt(identity: Mapping[str, Any]) -> int:
    """Answers that an evaluation samples to one prompt, under all its decodings."""
    decodings: Sequence[str] = identity.get("evaluate.decoding") or ("greedy",)
    sampled = int(identity.get("evaluate.num_samples") or 1)
    return sum(sampled if name == "sampled" else 1 for name in decodings)


def _saves(steps: int, save_freq: int) -> int:
    return -(-steps // save_freq) if save_freq > 0 else 0


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
