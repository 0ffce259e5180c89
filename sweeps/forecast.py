"""Forecast of a sweep: seconds, GPU-hours, judge calls, stage by stage; and limits it would exceed.

In: a :class:`~sweeps.values.SweepPlan`, measurements (:class:`History`), the finished stages; the
limits of a sweep file. Out: a :class:`SweepForecast`; a :class:`ExceededLimit` for each limit that
does not hold, with what would fit. Pure. Amounts without measurements or stated assumptions are
None, never made up. Every number names its basis:

    measured: 3 stages like it          same kind, model, devices, and shape of a step
    by canary: 2 steps of grpo-0123     the sweep's own first steps
    by rule of thumb: …                 measured on another shape, scaled by tokens
    assumed: H100, 3.1 h to 8.7 h each  by a plan's forecast; never a reason to refuse a sweep

A shared stage is counted once, with its first trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.services import is_service
from refiner_core.report.printing import counted
from sweeps.values import Limits, SweepPlan

#: Stages that train on demonstrations: their number of steps depends on the data.
FINE_TUNING = tuple(k.name for k in KINDS.values() if k.trains == "demonstrations")
#: Fields that decide the duration of a step or a sample, beside its size: per kind, dotted.
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
        *("evaluate.generation_backend", "evaluate.decoding", "evaluate.num_samples"),
        "grpo.response_length",
        *_JUDGE,
    ),
    "data": ("data.rl_split", "data.sft_split", "data.max_sft_rows", "data.max_rl_rows",
             "data.synthetic_sft_rows", "data.synthetic_rl_rows"),
    "command": ("command.run", "command.version"),
}  # fmt: skip
#: Fields that decide the number of steps of SFT, unless `max_train_steps` does.
_SFT_STEPS = (
    *("max_train_steps", "num_train_epochs", "pack_length"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
)


class StageShape(NamedTuple):
    """Stages of one shape take the same time per step or sample. ``model`` is the digest of the
    recipe's base weights, ``devices`` counts GPUs of all nodes (0: CPUs)."""

    kind: str
    model: str
    devices: int
    values: tuple[Any, ...]


class Work(NamedTuple):
    """Work of a stage: ``units`` (steps, samples, or 1 for an undivided stage; None: unknown), of
    at most ``size`` tokens each (1: unknown), with ``unit`` as their name; ``asked`` rollouts or
    samples for a judge."""

    units: int | None
    size: int
    unit: str
    asked: int | None = 0


@dataclass(frozen=True)
class StageMeasure:
    """One finished stage, or the first steps of one.

    Attributes
    ----------
    shape, work
        Its shape and its work. ``work.units`` is the number actually done.
    data
        Fingerprint of its data, if it has any.
    unit_s
        Seconds per step or sample; None if not recorded.
    start_s
        Other seconds: loading, saving, and the end.
    judge_calls
        Calls of its judge; None if it keeps no count.
    identity
        Its identity, field by field.
    canary
        For first steps: their number and stage.
    """

    shape: StageShape
    work: Work
    data: str = ""
    unit_s: float | None = None
    start_s: float = 0.0
    judge_calls: int | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    canary: str = ""


@dataclass(frozen=True)
class CanaryMeasure:
    """Measurement of one stage by the first real steps of a sweep's canary.

    Attributes
    ----------
    stage
        Id of the measured stage.
    steps
        Number of steps.
    seconds_per_step, save_seconds, start_seconds
        Duration of a step, of a checkpoint's save, and from the job's start to its first step.
    judge_calls_per_step
        None if the judge keeps no count.
    """

    stage: str
    steps: int
    seconds_per_step: float | None
    save_seconds: float | None = None
    start_seconds: float | None = None
    judge_calls_per_step: float | None = None


@dataclass(frozen=True)
class History:
    """Measurements of a workspace.

    Attributes
    ----------
    stages
        Finished stages, newest first.
    prompts
        Fingerprint of a `data` stage -> number of its held-out and of its training prompts.
    """

    stages: tuple[StageMeasure, ...] = ()
    prompts: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def shape_of(kind: str, identity: Mapping[str, Any], model: str, devices: int) -> StageShape:
    """The shape of a stage, from its identity and its resources."""
    names = SHAPE_FIELDS.get(kind, ())
    return StageShape(kind, model, devices, _values(identity, names))


def _values(identity: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Values of fields; a field that did not exist yet counts as off."""
    found = (identity.get(name) or 0 for name in names)
    return tuple(tuple(value) if isinstance(value, list) else value for value in found)


def _steps_key(kind: str, identity: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values that decide the number of steps, beside the data."""
    return tuple(identity.get(f"{kind}.{name}") for name in _SFT_STEPS)


def work_of(kind: str, identity: Mapping[str, Any], *, prompts: int | None = None) -> Work:
    """Work of a stage with this identity, on so many held-out ``prompts`` for an evaluation, or
    training prompts for sampling; None if unknown."""
    if kind == "grpo":
        rollouts = int(identity["grpo.num_unique_prompts_rollout"]) * int(
            identity["grpo.num_samples_per_prompt_rollout"]
        )
        steps = int(identity["grpo.num_training_steps"])
        size = rollouts * int(identity["grpo.response_length"])
        return Work(steps, size, "step", steps * rollouts)
    if kind in FINE_TUNING:
        most = identity.get(f"{kind}.max_train_steps")
        packs = int(identity[f"{kind}.per_device_train_batch_size"]) * int(
            identity[f"{kind}.gradient_accumulation_steps"]
        )
        size = int(identity[f"{kind}.pack_length"]) * packs
        return Work(None if most is None else int(most), size, "step")
    if kind == "sample":
        attempts = None if prompts is None else prompts * int(identity["sample.attempts"])
        return Work(attempts, int(identity.get("grpo.response_length") or 1), "sample", attempts)
    if kind == "evaluate":
        each = samples_per_prompt(identity)
        samples = None if prompts is None else prompts * each
        return Work(samples, int(identity.get("grpo.response_length") or 1), "sample", samples)
    return Work(1, 1, kind)


def samples_per_prompt(identity: Mapping[str, Any]) -> int:
    """Answers per prompt that an evaluation samples, under all its decodings."""
    decodings: Sequence[str] = identity.get("evaluate.decoding") or ("greedy",)
    sampled = int(identity.get("evaluate.num_samples") or 1)
    return sum(sampled if name == "sampled" else 1 for name in decodings)


_HOUR_S = 3600.0
#: Number of newest similar stages whose median counts.
_ENOUGH = 9


class AssumedCost(NamedTuple):
    """Seconds and judge calls of a stage without measurements, and the basis in words; None if they
    are unknown."""

    seconds: float | None
    judge_calls: int | None
    basis: str


#: The assumed cost of a stage of a plan.
Assume = Callable[[PlannedStage, Plan], AssumedCost]


@dataclass(frozen=True)
class StageForecast:
    """One unfinished stage.

    ``seconds`` of its own job, ``gpu_hours`` and ``judge_calls``: None if unknown. ``basis`` and
    ``calls_basis`` describe the basis of the numbers; ``assumed`` if one of them is not measured.
    """

    stage: str
    name: str
    kind: str
    trial: str
    shape: StageShape
    work: Work
    seconds: float | None
    judge_calls: int | None
    basis: str
    calls_basis: str = ""
    assumed: bool = False

    @property
    def gpu_hours(self) -> float | None:
        """None if unknown."""
        if not self.shape.devices:
            return 0.0
        return None if self.seconds is None else self.seconds * self.shape.devices / _HOUR_S


@dataclass(frozen=True)
class SweepForecast:
    """Forecast of a sweep.

    Attributes
    ----------
    stages
        Unfinished stages, each once.
    trials
        Their names, in the order in which they begin.
    wall_seconds
        Minimum time from begin to end, without queues. None if the seconds of a stage are unknown.
    parallel
        Assumed number of concurrent jobs, in words.
    disk_bytes, disk_basis
        Bytes that must be free, set by a caller with access to the disk; None: not computed.
    canary
        Measurement of the first steps, once there is one.
    """

    stages: tuple[StageForecast, ...]
    trials: tuple[str, ...]
    wall_seconds: float | None
    parallel: str
    disk_bytes: int | None = None
    disk_basis: str = ""
    canary: tuple[CanaryMeasure, ...] = ()

    def total(self, name: str) -> float:
        """Sum of ``seconds``, ``gpu_hours`` or ``judge_calls`` over the known stages."""
        return sum(getattr(s, name) or 0 for s in self.stages)

    def unknown(self, name: str = "seconds") -> list[str]:
        """Ids of the stages with an unknown value."""
        return [s.stage for s in self.stages if getattr(s, name) is None]


def forecast_sweep(
    plan: SweepPlan,
    history: History,
    done: AbstractSet[str],
    canary: Sequence[CanaryMeasure] = (),
    assume: Assume | None = None,
) -> SweepForecast:
    """Forecast of the unfinished part of a sweep.

    Parameters
    ----------
    done
        Ids of finished stages.
    canary
        Measurement of the sweep's own first steps; replaces history.
    assume
        Gives the cost of stages that nothing was measured for.
    """
    estimator = _Estimator(history, plan, canary, assume)
    stages: dict[str, StageForecast] = {}
    for trial in plan.trials:
        for stage in trial.plan.stages:
            if stage.id not in stages and stage.id not in done:
                stages[stage.id] = estimator.forecast(stage, trial.plan, trial.name)
    servers = [i for i in stages if is_service(i)]
    if len(servers) == len(stages):
        stages = {}  # they have no users left
    wall, parallel = _makespan(plan, {i: s.seconds for i, s in stages.items() if i not in servers})
    if wall is not None and stages:
        basis = "a server: as long as the sweep lasts, at most"
        stages |= {i: replace(stages[i], seconds=wall, basis=basis) for i in servers}
    names = tuple(t.name for t in plan.trials)
    return SweepForecast(tuple(stages.values()), names, wall, parallel, canary=tuple(canary))


def _makespan(plan: SweepPlan, known: Mapping[str, float | None]) -> tuple[float | None, str]:
    """The longest chain of stages, or all of them at the allowed concurrency, whichever is more;
    and that concurrency in words."""
    dispatch, trials = plan.config.dispatch, plan.sweep.limits.concurrency
    jobs = dispatch.max_parallel if dispatch.executor == "local" else None
    words = [f"{trials} trials at a time"] if trials else []
    words += [f"{jobs} jobs at a time"] if jobs else ["all jobs at a time, no waiting in a queue"]
    seconds = {i: s for i, s in known.items() if s is not None}
    if len(seconds) < len(known):
        return None, ", ".join(words)
    ends: dict[str, float] = {}
    for own in (trial.plan for trial in plan.trials):
        for stage in own.stages:
            if stage.id in seconds and stage.id not in ends:
                after = [ends.get(own.by_name[n].id, 0.0) for n in stage.inputs.values()]
                ends[stage.id] = max(after, default=0.0) + seconds[stage.id]
    at_once = min(filter(None, (trials, jobs)), default=len(seconds) or 1)
    return max([sum(seconds.values()) / at_once, *ends.values()]), ", ".join(words)


# ---------------------------------------------------------------- one stage


class _Estimator:
    """Looks up measurements; stages of one shape are looked up once."""

    def __init__(
        self,
        history: History,
        plan: SweepPlan,
        canary: Sequence[CanaryMeasure],
        assume: Assume | None = None,
    ) -> None:
        self.history, self.assume = history, assume
        self.by_kind: dict[str, list[StageMeasure]] = {}
        for measured in history.stages:
            self.by_kind.setdefault(measured.shape.kind, []).append(measured)
        for first in canary:
            mine = ((s, t.plan) for t in plan.trials for s in t.plan.stages if s.id == first.stage)
            if first.seconds_per_step is not None:
                found = self._by_canary(first, *next(mine))
                self.by_kind.setdefault(found.shape.kind, []).insert(0, found)
        self._known_alike = cache(self._like)
        self._known_seconds = cache(self._seconds)
        self._known_rate = cache(self._rate)

    def forecast(self, stage: PlannedStage, plan: Plan, trial: str) -> StageForecast:
        """Forecast of a stage for one of its trials."""
        shape, work = _shape(stage), self._work(stage, plan)
        calls, calls_basis = self._judge_calls(stage, work)
        if is_service(stage.id):
            seconds, basis = None, "a server: as long as it is in use"
        else:
            seconds, basis = self._known_seconds(shape, work)
        found = StageForecast(
            *(stage.id, stage.name, stage.kind, trial, shape, work),
            *(seconds, calls, basis, calls_basis),
        )
        unmeasured = None in (seconds, calls) and not is_service(stage.id)
        if self.assume is None or not unmeasured:
            return found
        return _assumed(found, self.assume(stage, plan))

    def _by_canary(self, first: CanaryMeasure, stage: PlannedStage, plan: Plan) -> StageMeasure:
        """Extrapolation from the first steps of a stage."""
        work, calls = self._work(stage, plan), first.judge_calls_per_step
        every = int(getattr(getattr(plan.config, stage.kind, None), "save_freq", 0))
        save_s = (first.save_seconds or 0.0) / every if every else 0.0
        return StageMeasure(
            *(_shape(stage), work),
            unit_s=None if first.seconds_per_step is None else first.seconds_per_step + save_s,
            start_s=first.start_seconds or 0.0,
            judge_calls=None if calls is None else round(calls * (work.units or 0)),
            identity=stage.identity,
            canary=f"{first.steps} steps of {stage.name}",
        )

    def _work(self, stage: PlannedStage, plan: Plan) -> Work:
        prompts = prompts_of(plan, stage, self.history)
        work = work_of(stage.kind, stage.identity, prompts=prompts)
        if stage.kind in FINE_TUNING:
            known = self.by_kind.get(stage.kind, ())
            wanted = _steps_key(stage.kind, stage.identity), stage.input_fingerprints.get("data")
            like = (m for m in known if (_steps_key(stage.kind, m.identity), m.data) == wanted)
            if (found := next(like, None)) is not None and found.work.units is not None:
                work = work._replace(units=found.work.units)
        return work

    def _seconds(self, shape: StageShape, work: Work) -> tuple[float | None, str]:
        alike, differs = self._known_alike(shape)
        if not alike:
            return None, f"unknown: no {shape.kind} stage of this model has been measured"
        if work.units is None:
            return None, f"unknown: the number of {work.unit}s is unknown before its data are made"
        guesses = [s for m in alike if (s := _by(m, work)) is not None]
        if not guesses:
            return None, f"unknown: {len(alike)} earlier {shape.kind} stages have no recorded time"
        basis = f"measured: {(count := counted(len(guesses), 'stage'))} like it"
        if alike[0].canary:
            basis = f"by canary: {alike[0].canary}"
            basis += f", which differs in {differs}" if differs else ""
        elif differs:
            basis = f"by rule of thumb: {count} with another {differs}"
        return median(guesses), basis

    def _like(self, shape: StageShape) -> tuple[list[StageMeasure], str]:
        """Stages of that shape; else those with the fewest differences, and these. Other weights or
        device counts cannot predict a step; a canary comes first."""
        of_kind = self.by_kind.get(shape.kind, ())
        names = SHAPE_FIELDS.get(shape.kind, ())
        found = [m for m in of_kind if m.shape[:3] == shape[:3]]
        near: dict[tuple[str, ...], list[StageMeasure]] = {}
        for other in [m for m in found if m.canary] or found:
            pairs = zip(names, shape.values, other.shape.values, strict=True)
            differs = tuple(name for name, a, b in pairs if a != b)
            near.setdefault(differs, []).append(other)
        nearest = min(near, key=len, default=())
        return near.get(nearest, [])[:_ENOUGH], ", ".join(nearest)

    def _judge_calls(self, stage: PlannedStage, work: Work) -> tuple[int | None, str]:
        if work.asked == 0 or stage.identity.get("judge.kind", "lexical") == "lexical":
            return 0, ""
        if work.asked is None:
            return None, "unknown: the number of prompts is unknown before the data are made"
        rate = self._known_rate(stage.kind, _values(stage.identity, _JUDGE))
        if rate is None:
            return None, f"unknown: no {stage.kind} stage has asked this judge yet"
        return round(rate * work.asked), f"measured: {rate:.1f} calls a sample"

    def _rate(self, kind: str, judge: tuple[object, ...]) -> float | None:
        """Judge calls per rollout or sample."""
        rates = [
            m.judge_calls / m.work.asked
            for m in self.by_kind.get(kind, ())
            if _values(m.identity, _JUDGE) == judge and m.judge_calls is not None and m.work.asked
        ]
        return median(rates[:_ENOUGH]) if rates else None


def _assumed(found: StageForecast, cost: AssumedCost) -> StageForecast:
    """The forecast with assumed numbers in place of unknown ones."""
    if found.seconds is None and cost.seconds is not None:
        found = replace(found, seconds=cost.seconds, basis=cost.basis, assumed=True)
    if found.judge_calls is None and cost.judge_calls is not None:
        calls = cost.judge_calls
        found = replace(found, judge_calls=calls, calls_basis=cost.basis, assumed=True)
    return found


def _shape(stage: PlannedStage) -> StageShape:
    devices = stage.resources.gpus * max(1, stage.resources.nodes)
    return shape_of(stage.kind, stage.identity, stage.sources.get("model", ""), devices)


def prompts_of(plan: Plan, stage: PlannedStage, history: History) -> int | None:
    """Prompts of an evaluation or of sampling: as counted in finished data, else approximately as
    configured for built-in rows; None if unknown."""
    if stage.kind not in ("evaluate", "sample"):
        return None
    data = plan.by_name.get(stage.inputs.get("data", ""))
    known = history.prompts.get(stage.input_fingerprints.get("data", ""))
    if known is None and data is not None:
        known = _configured_prompts(data)
    if known is None or stage.kind == "sample":
        return known and known[1]
    most = stage.identity.get("evaluate.max_prompts")
    return known[0] if most is None else min(known[0], int(most))


def _configured_prompts(data: PlannedStage) -> tuple[int, int] | None:
    values = data.identity
    if not data.sources.get("data.rl", "").startswith("synthetic:"):
        return None
    rows = int(values["data.synthetic_rl_rows"])
    rows = min(rows, int(values.get("data.max_rl_rows") or rows))
    share = 1.0 if values.get("data.all_held_out") else float(values["data.held_out_fraction"])
    return round(rows * share), rows - round(rows * share)


def _by(measured: StageMeasure, work: Work) -> float | None:
    """Seconds of ``work`` at the rates of a finished stage, scaled by the size of a unit."""
    if work.units is None or measured.unit_s is None:
        return None
    ratio = work.size / measured.work.size if measured.work.size else 1.0
    return measured.start_s + work.units * measured.unit_s * ratio


@dataclass(frozen=True)
class ExceededLimit:
    """A limit that the sweep would exceed.

    Attributes
    ----------
    field, unit
        ``gpu_hours`` or ``judge_calls`` of ``limits:``, and its unit for people.
    allowed, needed
        In that unit; ``needed`` includes past use.
    at_least
        True if some stages have no number, so more may be needed.
    what_fits
        ``the first 12 of 20 trials``.
    """

    field: str
    unit: str
    allowed: float
    needed: float
    at_least: bool
    what_fits: str

    @property
    def text(self) -> str:
        """``needs 310 GPU-hours, limit 200; what fits: the first 12 of 20 trials``."""
        least = "at least " if self.at_least else ""
        needs = f"needs {least}{amount(self.needed)} {self.unit}, limit {amount(self.allowed)}"
        return f"{needs}; what fits: {self.what_fits}"


def passed_limits(
    forecast: SweepForecast, limits: Limits, used: Mapping[str, float] = {}
) -> Iterator[ExceededLimit]:
    """Limits that the unfinished part would exceed, given what the sweep's stages have ``used``,
    including earlier versions. Stages with assumed numbers do not count."""
    measured = replace(forecast, stages=tuple(s for s in forecast.stages if not s.assumed))
    least = len(measured.stages) < len(forecast.stages)
    for name, unit in (("gpu_hours", "GPU-hours"), ("judge_calls", "judge calls")):
        limit, before = getattr(limits, name), used.get(name) or 0
        needed = before + measured.total(name)
        if limit is not None and needed > limit:
            costs = dict.fromkeys(forecast.trials, 0.0)
            for stage in measured.stages:
                costs[stage.trial] += getattr(stage, name) or 0
            fits = sum(cost <= limit - before for cost in accumulate(costs.values()))
            words = f"the first {fits} of {len(costs)} trials" if fits else "not one"
            yield ExceededLimit(
                name, unit, limit, needed, least or bool(measured.unknown(name)), words
            )


def refuse_what_cannot_fit(passed: Sequence[ExceededLimit]) -> None:
    """Refuse a sweep that would exceed a limit (see :func:`passed_limits`).

    Raises
    ------
    ConfigurationError
        Names each limit, the needed amount, and what would fit.
    """
    if not passed:
        return
    raise ConfigurationError(
        "The sweep " + "; it ".join(p.text for p in passed),
        expected="a sweep that fits into its limits",
        fix="raise these limits, or leave out seeds or arms, and run the same command again",
    )


def amount(value: float) -> str:
    """A number with three digits."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
