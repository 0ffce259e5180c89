"""Stored rollouts, and the settings of their rewards.

In: a workspace, runs, and a selection. Out: :class:`SampledPolicy` values, each with its rollouts
and the configuration of their rewards. Reads only; a run that is running or has died has the
rollouts so far.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flows.stored import HELD_OUT, TRAINED_ON, newest_rollouts, prompts_of
from infra.store.checkpoints import reclaimed_text
from infra.store.traces import read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError, UnsupportedError, no_such
from refiner_core.contract.protocols import protocol_name
from refiner_core.contract.records import RunRecord, StageSpec, from_json
from refiner_core.contract.types import PromptRow
from refiner_core.data.prepared import load_prompts
from refiner_core.evaluation.metrics import load_samples
from refiner_core.rescoring.rollouts import StoredRollout, some_groups, stored_rollouts

Source = Literal["rollouts", "evaluation"]
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_LAST = re.compile(r"last:0*([1-9]\d*)")


@dataclass(frozen=True)
class RolloutSelection:
    """Selection of rollouts or samples.

    Attributes
    ----------
    steps
        ``all``, ``last:5``, or steps and ranges with commas between them: ``10,40-50``.
    sample
        Maximum number of groups, drawn at random but reproducibly.
    models, decodings
        For evaluations; empty for all. ``sft@PROTOCOL`` is a model under a protocol file, and is
        read only by name.
    """

    source: Source = "rollouts"
    steps: str = "all"
    sample: int | None = None
    models: tuple[str, ...] = ()
    decodings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampledPolicy:
    """Policy that sampled some rollouts, and the settings of their rewards.

    Attributes
    ----------
    config
        Configuration of the call that claimed the attempt; ``reward`` and ``judge`` are its own.
    sources
        Digests of the rubric set and the judge's prompts at that time.
    files
        Files that were read.
    """

    name: str
    run: str
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
        """Steps of the rollouts; none for an evaluation."""
        return sorted({r.step for r in self.rollouts if r.step is not None})


def read_policies(
    workspace: Workspace, runs: Sequence[RunRecord], part: RolloutSelection
) -> list[SampledPolicy]:
    """Policies of the runs; shared stages are read once.

    Raises
    ------
    ConfigurationError
        A run has no such stage or step, or nothing remains.
    DataError
        Prompts are gone, or differ from those of the rollouts.
    UnsupportedError
        A run trains an agent, whose rewards come from no judge or rubrics.
    """
    read = _trained if part.source == "rollouts" else _evaluated
    policies: dict[tuple[str, str], SampledPolicy] = {}
    for run in runs:
        _require_answers(run)
        for policy in read(workspace, run, part):
            name = policy.name if len(runs) == 1 else f"{run.run} {policy.name}"
            rollouts = policy.rollouts
            if part.sample is not None:
                rollouts = tuple(some_groups(rollouts, part.sample))
            named = replace(policy, name=name, rollouts=rollouts)
            policies.setdefault((policy.stage_id, policy.name), named)
    return list(policies.values())


def _require_answers(run: RunRecord) -> None:
    environment = (run.config.get("environment") or {}).get("name")
    if environment:
        raise UnsupportedError(
            f"Run {run.run} is of an agent in the environment {environment!r}: its rollouts are "
            "episodes, and the environment has rewarded them, not a judge.",
            expected="a run whose answers were judged",
            fix="name another run; `refiner why` and the report show episodes with their checks",
        )


# ---------------------------------------------------------------- training


def _trained(
    workspace: Workspace, run: RunRecord, part: RolloutSelection
) -> Iterator[SampledPolicy]:
    stage_id = run.stages.get("grpo")
    if stage_id is None:
        raise ConfigurationError(
            f"Run {run.run} has no stage grpo, so it has no rollouts.",
            expected="a run that trains on rewards",
            fix="name another run, or rescore its evaluations with `--from evaluation`",
        )
    number, files = newest_rollouts(workspace, stage_id)
    if not files:
        raise ConfigurationError(
            f"Run {run.run} has no stored rollouts: {stage_id} has "
            f"{_why_none(workspace, stage_id)}.",
            expected="at least one finished step of GRPO whose rollouts are kept",
            fix=f"see `refiner status {run.run} workspace={workspace.root}`; or use "
            "`--from evaluation`",
        )
    chosen = _chosen_steps(part.steps, sorted(files), run.run)
    policy, prompts = _policy(workspace, run, "grpo", stage_id, number, TRAINED_ON)
    rows = [row for step in chosen for row in read_rollouts(files[step])]
    yield replace(
        policy,
        rollouts=tuple(stored_rollouts(rows, prompts)),
        files=tuple(str(files[step]) for step in chosen),
    )


def _why_none(workspace: Workspace, stage_id: str) -> str:
    if why := reclaimed_text(workspace.layout.stage(stage_id)):
        return f"none left ({why})"
    attempts = workspace.layout.stage(stage_id).attempt_numbers()
    return "not finished a step, or they were deleted" if attempts else "not been started"


def _chosen_steps(wanted: str, known: Sequence[int], run: str) -> list[int]:
    """The steps of ``wanted``, in order."""
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


def _evaluated(
    workspace: Workspace, run: RunRecord, part: RolloutSelection
) -> Iterator[SampledPolicy]:
    stages = {n: i for n, i in run.stages.items() if i.startswith("evaluate-")}
    models = {name.removeprefix("evaluate-"): stage_id for name, stage_id in stages.items()}
    # Protocol files mostly have the same answers: they are rescored only by name.
    wanted = part.models or tuple(model for model in models if not protocol_name(model))
    for model in part.models:
        if model not in models:
            what = f"Run {run.run} evaluates no model"
            raise no_such(what, model, models, "name one of these with --model")
    some = False
    for model, stage_id in models.items():
        result, folder = workspace.read_result(stage_id), workspace.output_dir(stage_id)
        if result is None or folder is None or model not in wanted:
            continue
        workspace.check_output(stage_id)
        policy, prompts = _policy(workspace, run, model, stage_id, result.attempt, HELD_OUT)
        for decoding in policy.config.evaluate.decoding:
            if part.decodings and decoding not in part.decodings:
                continue
            some = True
            path = folder / f"samples-{decoding}.parquet"
            rollouts = tuple(stored_rollouts(load_samples(path), prompts, decoding))
            name = f"{model} {decoding}"
            yield replace(policy, name=name, rollouts=rollouts, files=(str(path),))
    if not some:
        raise ConfigurationError(
            f"Run {run.run} has no finished evaluation"
            f"{' with that decoding' if part.decodings else ''}.",
            expected="at least one evaluate stage that is done",
            fix="let one finish, or rescore rollouts of training with `--from rollouts`",
        )


# ---------------------------------------------------------------- records


def _policy(
    workspace: Workspace, run: RunRecord, model: str, stage_id: str, number: int, file: str
) -> tuple[SampledPolicy, list[PromptRow]]:
    """Policy of an attempt, without rollouts; and the prompts that it has read."""
    paths = workspace.layout.attempt(stage_id, number)
    values = workspace.part(paths, "config")
    spec = workspace.read_control(workspace.layout.stage(stage_id).spec)
    data_id, path = prompts_of(workspace, paths, file)
    if not values or spec is None or not data_id:
        raise DataError(
            f"{paths.control} has no settings of the rewards of its rollouts",
            expected=f"{paths.intent.name} as refiner has written it",
            fix="restore the folder, or name another run",
        )
    if path is None:
        why = reclaimed_text(workspace.layout.stage(data_id))
        raise DataError(
            f"The prompts of the rollouts are gone: {data_id} has no {file}"
            + (f" ({why})" if why else ""),
            expected="the output of the run's data stage, which has questions, evidence, rubrics",
            fix="run the recipe with stages=[data] again in this workspace, or restore the file",
        )
    policy = SampledPolicy(
        name=model,
        run=run.run,
        stage_id=stage_id,
        model=model,
        attempt=number,
        config=from_json(RecipeConfig, values),
        sources=from_json(StageSpec, spec).sources,
        rollouts=(),
        data_stage=data_id,
    )
    return policy, load_prompts(path)
