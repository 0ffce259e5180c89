"""Protocols: everything that makes evaluation numbers comparable, with a fingerprint.

In: the configuration, the used prompts, a decoding. Out: a :class:`Protocol`.

Two numbers are comparable if their protocols have the same fingerprint. It covers the prompts
by *content* (text, token ids, rubrics, ground truth), not by the data stage that wrote them: a
data stage with other demonstrations but the same held-out prompts gives the same protocol.
The data stage's own digest is stored beside it as provenance.

The combination of judge and citation term is part of the protocol of the metric ``reward`` only
(:meth:`Protocol.with_reward`): arms that differ in a weight of the reward must remain comparable
on everything else. Likewise the weights of an agent's checks are part of the protocol of ``reward``
and ``partial`` only.

An agent's protocol has ``environment`` instead of judge and rubrics (:func:`make_protocol`): the
environment's own description (its version, the user with model and settings, exclusions), and the
limits of an episode. Addresses and keys are not part of it.

The name of a protocol file (:mod:`refiner_core.contract.protocols`) is for people, and not part of
the fingerprint either.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from refiner_core.contract.config import (
    EnvironmentConfig,
    JudgeConfig,
    PenaltiesConfig,
    RecipeConfig,
    RewardConfig,
)
from refiner_core.contract.fingerprint import canonical_json, digest
from refiner_core.contract.records import picked
from refiner_core.contract.types import PromptRow, SamplingParams
from refiner_core.environments.protocol import Environment
from refiner_core.judges import judge_prompts_digest
from refiner_core.rubrics import load_rubric_set, rubric_set_digest

#: Raised whenever new numbers of one protocol are not comparable with older ones: for answers,
#: whose citation reward counts a claim once since version 2; for agents with tools.
PROTOCOL_VERSION, PROTOCOL_VERSION_OF_AGENTS = 2, 1
Decoding = Literal["greedy", "sampled"]

#: Fields of `reward` that affect rubric scores; the others affect `reward`.
_RUBRIC_FIELDS = ("rubric_source", "static_rubrics", "instance_rubrics_only", "rubric_aggregation")


@dataclass(frozen=True)
class Protocol:
    """One way of measuring. Every field except ``data`` and ``file`` enters the fingerprint."""

    data: str
    """Digest of the data stage that wrote the prompts; provenance only."""
    split: str
    prompts: str
    """Digest of the content of the prompts used, in order."""
    num_prompts: int
    decoding: Decoding
    sampling: Mapping[str, Any]
    """Temperature, top_p, lengths, stop strings, the seed if anything is sampled, and the engine
    if it is not transformers."""
    samples_per_prompt: int
    judge: Mapping[str, Any]
    rubrics: Mapping[str, Any]
    reward: Mapping[str, Any] | None = None
    version: int = PROTOCOL_VERSION
    file: str = ""
    """Name of the protocol file; empty for the recipe's own."""
    environment: Mapping[str, Any] | None = None
    """For an agent with tools: its environment, user and limits."""

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits of SHA-256."""
        values = {**self.as_json(), "data": None}
        values.pop("file", None)
        return digest(values)[:12]

    @property
    def name(self) -> str:
        """Readable name, e.g. ``held-out/greedy/lexical-1@v1-ab12cd34``; a protocol file's name
        comes first."""
        where, judge = self.environment, self.judge
        by = [f"{where['name']}@{where['version']}"] if where is not None else []
        by += [f"{judge['model']}@{judge['prompt']}"] if judge else []
        return f"{self.file or self.split}/{self.decoding}/{'+'.join(by)}-{self.fingerprint[:8]}"

    def with_reward(self, config: RecipeConfig) -> Protocol:
        """The protocol of the metric ``reward`` (for an agent also of ``partial``), which depends
        on the combination of terms."""
        if self.environment is not None:
            weights = picked(config.environment.shaping, "weights", "weights_by_domain")
            return dataclasses.replace(self, reward={k: list(v) for k, v in weights.items()})
        values = dataclasses.asdict(config.reward)
        values = {name: value for name, value in values.items() if name not in _RUBRIC_FIELDS}
        if config.reward.penalties == PenaltiesConfig():
            del values["penalties"]  # as in protocols from before there were any
        return dataclasses.replace(self, reward=values)

    def as_json(self) -> dict[str, Any]:
        """Plain values, stored beside the numbers."""
        values = dataclasses.asdict(self)
        if not self.file:
            del values["file"]
        if self.environment is None:
            del values["environment"]
        return values


def sampling_params(config: RecipeConfig, decoding: Decoding) -> SamplingParams:
    """Sampling of a decoding; lengths and stop strings are those of training."""
    sampled = decoding == "sampled"
    return SamplingParams(
        temperature=config.evaluate.temperature if sampled else 0.0,
        top_p=config.evaluate.top_p if sampled else 1.0,
        top_k=config.evaluate.top_k if sampled else 0,
        max_new_tokens=config.grpo.response_length,
        stop_strings=config.grpo.stop_strings,
    )


def make_protocol(
    config: RecipeConfig,
    prompts: Sequence[PromptRow],
    decoding: Decoding,
    data_digest: str,
    file: str = "",
    environment: Environment | None = None,
) -> Protocol:
    """The protocol under which ``prompts`` are measured with ``decoding``; with an ``environment``,
    an agent on tasks.

    ``grpo.response_length`` limits one turn of an agent and ``grpo.max_token_length`` a whole
    episode, as in training. A turn that is no tool call is a failure here for any
    ``environment.unparsable``, which is therefore not part of it.
    """
    params, sampled = sampling_params(config, decoding), decoding == "sampled"
    seed, asked = config.evaluate.seed, config.environment
    sampling = dataclasses.asdict(params)
    if environment is None:
        sampling |= {"stop_strings": list(params.stop_strings), "seed": seed if sampled else None}
    else:  # a turn ends with its tool call; users and tools always use the seed
        context = config.grpo.max_token_length
        sampling |= {"stop_strings": [], "context_tokens": context, "seed": seed}
    if config.evaluate.generation_backend != "transformers":  # other samples from the same seeds
        sampling["engine"] = config.evaluate.generation_backend
    judged = environment is None or asked.nl_assertions == "judge"
    return Protocol(
        data=data_digest,
        split="held-out",
        prompts=prompts_digest(prompts),
        num_prompts=len(prompts),
        decoding=decoding,
        sampling=sampling,
        samples_per_prompt=config.evaluate.num_samples if sampled else 1,
        judge=_judge(config.judge) if judged else {},
        rubrics=_rubrics(config.reward) if environment is None else {},
        version=PROTOCOL_VERSION if environment is None else PROTOCOL_VERSION_OF_AGENTS,
        file=file,
        environment=None if environment is None else _environment(asked, environment),
    )


def _rubrics(reward: RewardConfig) -> dict[str, Any]:
    static = "static" in reward.rubric_source and not reward.instance_rubrics_only
    return {
        "source": reward.rubric_source,
        "static": load_rubric_set(reward.static_rubrics).name if static else None,
        "static_digest": rubric_set_digest(reward.static_rubrics) if static else None,
        "instance_rubrics_only": reward.instance_rubrics_only,
        "aggregation": reward.rubric_aggregation,
    }


def _environment(asked: EnvironmentConfig, environment: Environment) -> dict[str, Any]:
    return {
        **environment.describe(),
        "name": Path(environment.name).name,  # a custom file without its folders
        "version": environment.version,
        **picked(asked, "max_turns", "repairs", "max_argument_bytes", "nl_assertions"),
        **_file_of_ones_own(asked.name),
    }


def _file_of_ones_own(name: str) -> dict[str, str]:
    """Digest of a custom environment's file, in case its version was not raised after an edit. Its
    tasks are among the prompts."""
    file = Path(name.rpartition(":")[0]).expanduser()
    if ".py:" not in name or not file.is_file():
        return {}
    return {"file_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def _judge(judge: JudgeConfig) -> dict[str, Any]:
    """All settings that affect a judge's scores."""
    # Fields of served judges only, if they differ from the former fixed values.
    before = {"form": "per_rubric", "structured_output": "none", "extra_body": ""}
    served = picked(judge, *before) if judge.kind == "openai" else {}
    return {
        **picked(judge, "kind", "model", "revision"),
        "prompt": Path(judge.prompt).name,
        "prompt_digest": judge_prompts_digest(judge.prompt, judge.form),
        **picked(judge, "temperature", "max_tokens"),
        **{name: value for name, value in served.items() if value != before[name]},
    }


def prompts_digest(prompts: Sequence[PromptRow]) -> str:
    """SHA-256 over the content of prompts, in order."""
    whole = hashlib.sha256()
    for row in prompts:
        whole.update(canonical_json(dataclasses.asdict(row)).encode() + b"\n")
    return whole.hexdigest()
