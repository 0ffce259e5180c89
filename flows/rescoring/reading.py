"""Which stored rollouts are meant, and with what settings they were rewarded.

In: a workspace, runs, and which part of them. Out: :class:`Policy` values, each with its rollouts
and the configuration that they were rewarded under. Reads only; a run that is still at work, or
has died, has what it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from infra.store.checkpoints import reclaimed_text
from infra.store.traces import list_rollouts, read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError, UnsupportedError
from refiner_core.contract.fields import suggest
from refiner_core.contract.marks import ABSENT, walk
from refiner_core.contract.protocols import protocol_name
from refiner_core.contract.records import RunRecord, StageSpec, from_json
from refiner_core.contract.types import PromptRow
from refiner_core.data.prepared import load_prompts
from refiner_core.evaluation.metrics import load_samples
from refiner_core.rescoring.rollouts import (
    StoredRollout,
    from_evaluation,
    from_training,
    some_groups,
)

Source = Literal["rollouts", "evaluation"]
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_LAST = re.compile(r"last:0*([1-9]\d*)")


@dataclass(frozen=True)
class Part:
    """Which part of the runs is read.

    Attributes
    ----------
    steps
        ``all``, ``last:5``, or steps and ranges with commas between them: ``10,40-50``.
    sample
        So many groups at most, drawn at random but always the same ones.
    models, decodings
        Of evaluations; empty for all. ``sft@PROTOCOL`` is a model under a protocol file, and read
        only where it is named.
    """

    source: Source = "rollouts"
    steps: str = "all"
    sample: int | None = None
    models: tuple[str, ...] = ()
    decodings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Policy:
    """What sampled some rollouts, and how they were rewarded then.

    Attributes
    ----------
    config
        Of the call that claimed the attempt; ``reward`` and ``judge`` are the run's own.
    sources
        Digests of the rubric set and the judge's prompts at that time.
    files
        What was read.
    """

    name: str
    run: str
    run_name: str
    stage_id: str
    model: str
    attempt: int
    config: RecipeConfig
    sources: Mapping[str, str]
    rollouts: tuple[StoredRollout, ...]
    data_stage: str
    files: tuple[str, ...] = field(default=())

    @property
    def steps(self) -> list[int]:
        """The steps that the rollouts are from; none of an evaluation."""
        return sorted({r.step for r in self.rollouts if r.step is not None})


def read_policies(workspace: Workspace, runs: Sequence[RunRecord], part: Part) -> list[Policy]:
    """What the runs have stored; stages that runs share are read once.

    Raises
    ------
    ConfigurationError
        A run has no such stage or no such step; nothing is left.
    DataError
        Prompts are gone, or are not those of the rollouts.
    UnsupportedError
        A run is of an agent, which no judge and no rubrics have scored.
    """
    names = _short_names([run.run for run in runs])
    policies: dict[tuple[str, str], Policy] = {}
    for run in runs:
        _require_answers(run)
        of_run = _trained(workspace, run, part) if part.source == "rollouts" else ()
        if part.source == "evaluation":
            of_run = _evaluated(workspace, run, part)
        for policy in of_run:
            name = policy.name if len(runs) == 1 else f"{names[run.run]} {policy.name}"
            policies.setdefault(
                (policy.stage_id, policy.name),
                replace(policy, name=name, run_name=names[run.run]),
            )
    return [_sampled(policy, part.sample) for policy in policies.values()]


def _require_answers(run: RunRecord) -> None:
    environment = (run.config.get("environment") or {}).get("name")
    if environment:
        raise UnsupportedError(
            f"Run {run.run} is of an agent in the environment {environment!r}: its rollouts are "
            "episodes, and the environment has rewarded them, not a judge.",
            expected="a run whose answers were judged",
            fix="name another run; `refiner why` and the report show episodes with their checks",
        )


def _sampled(policy: Policy, count: int | None) -> Policy:
    if count is None:
        return policy
    return replace(policy, rollouts=tuple(some_groups(policy.rollouts, count)))


def _short_names(runs: Sequence[str]) -> dict[str, str]:
    """Run ids without their time, where that tells them apart."""
    short = {run: "-".join(run.split("-")[2:]) or run for run in runs}
    return short if len(set(short.values())) == len(short) else {run: run for run in runs}


# ---------------------------------------------------------------- training


def _trained(workspace: Workspace, run: RunRecord, part: Part) -> Iterable[Policy]:
    stage_id = run.stages.get("grpo")
    if stage_id is None:
        raise ConfigurationError(
            f"Run {run.run} has no stage grpo, so it has no rollouts.",
            expected="a run that trains on rewards",
            fix="name another run, or rescore its evaluations with `--from evaluation`",
        )
    number, files = _rollout_files(workspace, stage_id)
    if number is None:
        raise ConfigurationError(
            f"Run {run.run} has no stored rollouts: {stage_id} has "
            f"{_why_none(workspace, stage_id)}.",
            expected="at least one finished step of GRPO whose rollouts are kept",
            fix=f"see `refiner status {run.run} workspace={workspace.root}`; or use "
            "`--from evaluation`",
        )
    chosen = _chosen_steps(part.steps, sorted(files), run.run)
    config, spec, data_id = _attempt(workspace, stage_id, number)
    prompts = _prompts(workspace, data_id, "rl_train.parquet")
    rows = [row for step in chosen for row in read_rollouts(files[step])]
    return [
        Policy(
            name="grpo",
            run=run.run,
            run_name=run.run,
            stage_id=stage_id,
            model="grpo",
            attempt=number,
            config=config,
            sources=spec.sources,
            rollouts=tuple(from_training(rows, prompts)),
            data_stage=data_id,
            files=tuple(str(files[step]) for step in chosen),
        )
    ]


def _rollout_files(workspace: Workspace, stage_id: str) -> tuple[int | None, dict[int, Path]]:
    """The newest attempt that has rollouts, and its files by step. An attempt takes over those of
    the one before up to the checkpoint that it goes on from, so the newest has the whole story;
    one that has not begun yet has none."""
    stage = workspace.layout.stage(stage_id)
    for number in reversed(stage.attempt_numbers()):
        if found := list_rollouts(stage.attempt(number).rollouts):
            return number, {int(p.stem.removeprefix("step-")): p for p in found}
    return None, {}


def _why_none(workspace: Workspace, stage_id: str) -> str:
    if why := reclaimed_text(workspace.layout.stage(stage_id)):
        return f"none left ({why})"
    attempts = workspace.layout.stage(stage_id).attempt_numbers()
    return "not finished a step, or they were deleted" if attempts else "not been started"


def _chosen_steps(wanted: str, known: Sequence[int], run: str) -> list[int]:
    """The steps that ``wanted`` means, in order."""
    if wanted == "all":
        return list(known)
    if last := _LAST.fullmatch(wanted):
        return list(known[-int(last[1]) :])
    chosen: set[int] = set()
    for word in wanted.split(","):
        match = _RANGE.fullmatch(word.strip())
        if match is None:
            raise ConfigurationError(
                f"--steps {wanted} is not understood.",
                expected="all, last:5, or steps and ranges such as 10,40-50",
                fix="write it in one of these ways",
            )
        low, high = int(match[1]), int(match[2] or match[1])
        chosen |= {step for step in known if low <= step <= high}
    if not chosen:
        raise ConfigurationError(
            f"Run {run} has no rollouts of steps {wanted}.",
            expected=f"steps from {known[0]} to {known[-1]} ({len(known)} are stored)",
            fix="choose some of these, or last:5",
        )
    return sorted(chosen)


# ---------------------------------------------------------------- evaluations


def _evaluated(workspace: Workspace, run: RunRecord, part: Part) -> Iterable[Policy]:
    stages = {n: i for n, i in run.stages.items() if i.startswith("evaluate-")}
    models = {name.removeprefix("evaluate-"): stage_id for name, stage_id in stages.items()}
    # Under protocol files the answers are mostly the same ones: they are rescored by name alone.
    wanted = part.models or tuple(model for model in models if not protocol_name(model))
    for model in part.models:
        if model not in models:
            raise ConfigurationError(
                f"Run {run.run} evaluates no model {model!r}.{suggest(model, models)}",
                expected="one of: " + (", ".join(models) or "(it evaluates none)"),
                fix="name one of these with --model",
            )
    found: list[Policy] = []
    for model, stage_id in models.items():
        folder = workspace.output_dir(stage_id)
        if folder is None or model not in wanted:
            continue
        workspace.check_output(stage_id)
        found += _of_evaluation(workspace, run, (model, stage_id), folder, part)
    if not found:
        raise ConfigurationError(
            f"Run {run.run} has no finished evaluation"
            f"{' with that decoding' if part.decodings else ''}.",
            expected="at least one evaluate stage that is done",
            fix="let one finish, or rescore rollouts of training with `--from rollouts`",
        )
    return found


def _of_evaluation(
    workspace: Workspace, run: RunRecord, which: tuple[str, str], folder: Path, part: Part
) -> Iterable[Policy]:
    model, stage_id = which
    result = workspace.read_result(stage_id)
    assert result is not None
    config, spec, data_id = _attempt(workspace, stage_id, result.attempt)
    prompts = _prompts(workspace, data_id, "rl_test.parquet")
    decodings = [d for d in config.evaluate.decoding if not part.decodings or d in part.decodings]
    for decoding in decodings:
        path = folder / f"samples-{decoding}.parquet"
        rollouts = from_evaluation(load_samples(path), prompts, decoding)
        yield Policy(
            name=f"{model} {decoding}",
            run=run.run,
            run_name=run.run,
            stage_id=stage_id,
            model=model,
            attempt=result.attempt,
            config=config,
            sources=spec.sources,
            rollouts=tuple(rollouts),
            data_stage=data_id,
            files=(str(path),),
        )


# ---------------------------------------------------------------- records


def _attempt(
    workspace: Workspace, stage_id: str, number: int
) -> tuple[RecipeConfig, StageSpec, str]:
    """Configuration, specification and data stage of an attempt."""
    paths = workspace.layout.attempt(stage_id, number)
    values = workspace.part(paths, "config")
    spec = workspace.read_control(workspace.layout.stage(stage_id).spec)
    inputs = workspace.part(paths, "inputs")
    if not values or spec is None or "data" not in inputs:
        raise DataError(
            f"{paths.control} does not say with what its rollouts were rewarded",
            expected=f"{paths.intent.name} as refiner has written it",
            fix="restore the folder, or name another run",
        )
    config = from_json(RecipeConfig, with_legacy_values(values))
    return config, from_json(StageSpec, spec), str(inputs["data"])


def with_legacy_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration with what older versions had in effect, for options that did not
    exist when it was recorded."""
    filled: dict[str, Any] = {
        k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()
    }
    for path, info in walk(RecipeConfig):
        section, _, name = path.partition(".")
        known = section in filled and isinstance(filled[section], dict)
        if info.legacy_value is not ABSENT and name and "." not in name and known:
            filled[section].setdefault(name, info.legacy_value)
    return filled


def _prompts(workspace: Workspace, data_id: str, name: str) -> list[PromptRow]:
    folder = workspace.output_dir(data_id)
    if folder is None or not (folder / name).is_file():
        why = reclaimed_text(workspace.layout.stage(data_id))
        raise DataError(
            f"The prompts of the rollouts are gone: {data_id} has no {name}"
            + (f" ({why})" if why else ""),
            expected="the output of the run's data stage, which has questions, evidence, rubrics",
            fix="run the recipe with stages=[data] again in this workspace, or bring the file back",
        )
    return load_prompts(folder / name)
