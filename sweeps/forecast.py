"""Forecast of a sweep: seconds, GPU-hours, judge calls, stage by stage; which limits it would pass.

In: a :class:`~sweeps.values.SweepPlan`, what was measured (:class:`History`), which
stages are done; the limits of a sweep file. Out: a :class:`SweepForecast`; a :class:`Passed` for
each limit that cannot hold, with what would fit. Pure. What nothing was measured of is None and
says so: no number is made up. Every number names its basis:

    measured: 3 stages like it          same kind, model, devices, and shape of a step
    by canary: 2 steps of grpo-0123     the sweep's own first steps
    by rule of thumb: …                 measured on another shape, scaled by tokens

A stage that trials share is counted once, with the first of them. From begin to end only so many
run at a time: a job that several trials need runs once, and a trial begins when one before it has
ended, in their order.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
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
    identity
        What it was, field by field.
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
    identity: Mapping[str, Any] = field(default_factory=dict)
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


def _judge_of(identity: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values that decide how much a judge is asked about one rollout or sample."""
    return tuple(_plain(identity.get(name)) for name in _JUDGE)


def _steps_key(kind: str, identity: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values that decide the number of steps, beside the data."""
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


#: One stage: its id, seconds, and the ids that it waits for.
_Job = tuple[str, float, Sequence[str]]


def wall_seconds(
    trials_jobs: Iterable[Iterable[_Job]], *, trials: int | None = None, jobs: int | None = None
) -> float:
    """Seconds until all is done.

    Parameters
    ----------
    trials_jobs
        In the order in which they begin; of each trial what others wait for comes first. Ids that
        are in no trial are done already.
    trials, jobs
        So many at a time; None is no limit.
    """
    ends: dict[str, float] = {}
    slots, free = [0.0] * (trials or 0), [0.0] * (jobs or 0)
    for mine in trials_jobs:
        begun = over = heapq.heappop(slots) if slots else 0.0
        for name, seconds, after in mine:
            if name not in ends:
                begins = max([begun, *(ends[other] for other in after if other in ends)])
                if free:  # of what is free by then the last, so that no gap is left
                    begins = max(begins, free.pop(max(0, bisect_right(free, begins) - 1)))
                ends[name] = begins + seconds
                if jobs:
                    insort(free, ends[name])
            over = max(over, ends[name])
        if trials:
            heapq.heappush(slots, over)
    return max(ends.values(), default=0.0)


_HOUR_S = 3600.0
#: Of so many stages that are alike, the newest, the middle one counts.
_ENOUGH = 9


@dataclass(frozen=True)
class StageForecast:
    """One stage that is still to run.

    ``seconds`` of work on its own job, ``gpu_hours`` and ``judge_calls``: None where nobody can
    say. ``basis`` and ``calls_basis`` say what the numbers rest on.
    """

    stage: str
    name: str
    kind: str
    trial: str
    shape: Shape
    work: Work
    seconds: float | None
    judge_calls: int | None
    basis: str
    calls_basis: str = ""

    @property
    def gpu_hours(self) -> float | None:
        """None where nobody can say."""
        if not self.shape.devices:
            return 0.0
        return None if self.seconds is None else self.seconds * self.shape.devices / _HOUR_S


#: Share of a trial beside those before it, of the stages that no earlier one needs: ``trial``,
#: ``arm``, ``seed``, number of ``stages``, ``unknown`` ones without a number, and the sums.
_Share = Mapping[str, Any]


@dataclass(frozen=True)
class SweepForecast:
    """Forecast of a sweep. Sums are over what is known; ``unknown`` names the rest.

    Attributes
    ----------
    stages
        Still to run, each once.
    trials
        In the order in which they begin.
    wall_seconds
        From begin to end, as many at a time as may run; without time in a queue. None where the
        seconds of some stage are unknown.
    parallel
        How many jobs run at a time by that: words for people.
    disk_bytes, disk_basis
        What must be free, put in by who can look at a disk; None: nobody has looked.
    canary
        What the first steps have shown, once they have.
    """

    stages: tuple[StageForecast, ...]
    trials: tuple[_Share, ...]
    seconds: float
    gpu_hours: float
    judge_calls: int
    wall_seconds: float | None
    parallel: str
    unknown: tuple[str, ...] = ()
    unknown_calls: tuple[str, ...] = ()
    disk_bytes: int | None = None
    disk_basis: str = ""
    canary: tuple[CanaryMeasure, ...] = ()


def forecast_sweep(
    plan: SweepPlan,
    history: History,
    done: AbstractSet[str],
    canary: Sequence[CanaryMeasure] = (),
) -> SweepForecast:
    """Forecast of what is left to do of a sweep.

    Parameters
    ----------
    done
        Ids of finished stages.
    canary
        What the sweep's own first steps have shown; goes before history.
    """
    judge = _Estimator(history, plan, canary)
    stages: dict[str, StageForecast] = {}
    for trial in plan.trials:
        for stage in trial.plan.stages:
            if stage.id not in stages and stage.id not in done:
                stages[stage.id] = judge.forecast(stage, trial.plan, trial.name)
    if all(map(is_service, stages)):
        stages = {}  # nobody is left to ask them
    return _summed(plan, tuple(stages.values()), tuple(canary))


# ---------------------------------------------------------------- one stage


class _Estimator:
    """Looks up what was measured; stages of one shape are looked up once."""

    def __init__(self, history: History, plan: SweepPlan, canary: Sequence[CanaryMeasure]) -> None:
        self.history = history
        self.by_kind: dict[str, list[Measured]] = {}
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
        """One stage as one of a trial needs it."""
        shape, work = _shape(stage), self._work(stage, plan)
        calls, calls_basis = self._judge_calls(stage, work)
        if is_service(stage.id):
            seconds, basis = None, "a server: as long as somebody asks it"
        else:
            seconds, basis = self._known_seconds(shape, work)
        return StageForecast(
            *(stage.id, stage.name, stage.kind, trial, shape, work),
            *(seconds, calls, basis, calls_basis),
        )

    def _by_canary(self, first: CanaryMeasure, stage: PlannedStage, plan: Plan) -> Measured:
        """What the first steps of a stage say of all of it."""
        work, calls = self._work(stage, plan), first.judge_calls_per_step
        return Measured(
            *(_shape(stage), work, "", first.seconds_per_step),
            save_s=first.save_seconds,
            start_s=first.start_seconds or 0.0,
            judge_calls=None if calls is None else round(calls * (work.units or 0)),
            identity=stage.identity,
            canary=f"{first.steps} steps of {stage.name}",
        )

    def _work(self, stage: PlannedStage, plan: Plan) -> Work:
        section = getattr(plan.config, stage.kind, None)
        save_freq = int(getattr(section, "save_freq", 0))
        prompts = prompts_of(plan, stage, self.history)
        work = work_of(stage.kind, stage.identity, prompts=prompts, save_freq=save_freq)
        if stage.kind in FINE_TUNING:
            known = self.by_kind.get(stage.kind, ())
            wanted = _steps_key(stage.kind, stage.identity), stage.input_fingerprints.get("data")
            like = (m for m in known if (_steps_key(stage.kind, m.identity), m.data) == wanted)
            if (found := next(like, None)) is not None and found.work.units is not None:
                saves = _saves(found.work.units, save_freq)
                work = work._replace(units=found.work.units, saves=saves)
        return work

    def _seconds(self, shape: Shape, work: Work) -> tuple[float | None, str]:
        alike, differs = self._known_alike(shape)
        if not alike:
            return None, f"unknown: no {shape.kind} stage of this model has been measured"
        if work.units is None:
            return None, f"unknown: the number of {work.unit}s is not known before its data are"
        guesses = [s for m in alike if (s := _by(m, work)) is not None]
        if not guesses:
            return None, f"unknown: of {len(alike)} earlier {shape.kind} stages no time was noted"
        basis = f"measured: {(count := counted(len(guesses), 'stage'))} like it"
        if alike[0].canary:
            basis = f"by canary: {alike[0].canary}"
            basis += f", which differs in {differs}" if differs else ""
        elif differs:
            basis = f"by rule of thumb: {count} with another {differs}"
        return median(guesses), basis

    def _like(self, shape: Shape) -> tuple[list[Measured], str]:
        """Stages of that shape; else those that differ in as little as possible, and in what. Other
        weights or another number of devices can say nothing about a step; a canary goes first."""
        of_kind = self.by_kind.get(shape.kind, ())
        names = SHAPE_FIELDS.get(shape.kind, ())
        found = [m for m in of_kind if m.shape[:3] == shape[:3]]
        near: dict[tuple[str, ...], list[Measured]] = {}
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
            return None, "unknown: the number of prompts is not known before the data are"
        rate = self._known_rate(stage.kind, _judge_of(stage.identity))
        if rate is None:
            return None, f"unknown: no {stage.kind} stage has asked this judge yet"
        return round(rate * work.asked), f"measured: {rate:.1f} calls a sample"

    def _rate(self, kind: str, judge: tuple[object, ...]) -> float | None:
        """Calls of a judge for each rollout or sample."""
        rates = [
            m.judge_calls / m.work.asked
            for m in self.by_kind.get(kind, ())
            if _judge_of(m.identity) == judge and m.judge_calls is not None and m.work.asked
        ]
        return median(rates[:_ENOUGH]) if rates else None


def _shape(stage: PlannedStage) -> Shape:
    devices = stage.resources.gpus * max(1, stage.resources.nodes)
    return shape_of(stage.kind, stage.identity, stage.sources.get("model", ""), devices)


def prompts_of(plan: Plan, stage: PlannedStage, history: History) -> int | None:
    """Prompts of an evaluation, or that attempts are sampled at: as counted where its data are
    made, else about as configured for rows that are made on the spot; None where nobody knows."""
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


def _by(measured: Measured, work: Work) -> float | None:
    """Seconds of ``work`` at the rates of a finished stage, scaled by the size of a unit."""
    if work.units is None or measured.unit_s is None:
        return None
    ratio = work.size / measured.work.size if measured.work.size else 1.0
    saves = work.saves * (measured.save_s or 0.0)
    return measured.start_s + work.units * measured.unit_s * ratio + saves


# ---------------------------------------------------------------- sums


def _summed(
    plan: SweepPlan, stages: tuple[StageForecast, ...], canary: tuple[CanaryMeasure, ...]
) -> SweepForecast:
    wall, parallel = _wall(plan, stages)
    if wall is not None:
        basis = "a server: as long as the sweep lasts, at most"
        stages = tuple(
            replace(s, seconds=wall, basis=basis) if is_service(s.stage) else s for s in stages
        )
    own: dict[str, list[StageForecast]] = {trial.name: [] for trial in plan.trials}
    for stage in stages:
        own[stage.trial].append(stage)
    shares = tuple(
        {
            **{"trial": t.name, "arm": t.arm, "seed": t.seed, "stages": len(own[t.name])},
            **_sums(own[t.name]),
            "unknown": sum(s.seconds is None for s in own[t.name]),
        }
        for t in plan.trials
    )
    return SweepForecast(
        *(stages, shares),
        **_sums(stages),
        wall_seconds=wall,
        parallel=parallel,
        unknown=tuple(s.stage for s in stages if s.seconds is None),
        unknown_calls=tuple(s.stage for s in stages if s.judge_calls is None),
        canary=canary,
    )


def _sums(stages: Sequence[StageForecast]) -> dict[str, Any]:
    """Seconds, GPU-hours and judge calls, as far as they are known."""
    names = ("seconds", "gpu_hours", "judge_calls")
    return {name: sum(getattr(s, name) or 0 for s in stages) for name in names}


def _wall(plan: SweepPlan, stages: Sequence[StageForecast]) -> tuple[float | None, str]:
    """Seconds from begin to end, and how many at a time that supposes."""
    dispatch = plan.config.dispatch
    jobs = dispatch.max_parallel if dispatch.executor == "local" else None
    trials = plan.sweep.limits.concurrency
    words = [f"{trials} trials at a time"] if trials else []
    words += [f"{jobs} jobs at a time"] if jobs else ["all jobs at a time, no waiting in a queue"]
    known = {s.stage: s.seconds or 0.0 for s in stages if not is_service(s.stage)}
    if any(s.seconds is None for s in stages if s.stage in known):
        return None, ", ".join(words)
    todo = (
        [
            (s.id, known[s.id], [own.by_name[n].id for n in s.inputs.values()])
            for s in own.stages
            if s.id in known
        ]
        for own in (trial.plan for trial in plan.trials)
    )
    return wall_seconds(todo, trials=trials, jobs=jobs), ", ".join(words)


GIB = 2**30


@dataclass(frozen=True)
class Passed:
    """A limit that the sweep would pass.

    Attributes
    ----------
    field, unit
        ``gpu_hours``, ``judge_calls`` or ``disk_gb`` of ``limits:``, and its unit for people.
    allowed, needed
        In that unit; ``needed`` includes what has been used already.
    at_least
        Some stages have no number, so more may be needed.
    fits
        How many trials fit, in their order; None where that is not how it is counted (disk).
    what_fits
        The same in words.
    """

    field: str
    unit: str
    allowed: float
    needed: float
    at_least: bool
    fits: int | None
    what_fits: str

    @property
    def text(self) -> str:
        """``needs 310 GPU-hours, limit 200; what fits: the first 12 of 20 trials``."""
        least = "at least " if self.at_least else ""
        text = f"needs {least}{amount(self.needed)} {self.unit}, limit {amount(self.allowed)}"
        return f"{text}; what fits: {self.what_fits}" if self.what_fits else text


def passed_limits(
    forecast: SweepForecast, limits: Limits, used: Mapping[str, float] = {}
) -> tuple[Passed, ...]:
    """The limits that what is left to do would pass, with what the sweep's stages have ``used`` of
    them already, in earlier versions of it."""
    found = []
    for name, unit in (("gpu_hours", "GPU-hours"), ("judge_calls", "judge calls")):
        limit, before = getattr(limits, name), used.get(name) or 0
        needed = before + getattr(forecast, name)
        if limit is not None and needed > limit:
            unknown = any(getattr(s, name) is None for s in forecast.stages)
            costs = accumulate(t[name] for t in forecast.trials)
            fits = sum(cost <= limit - before for cost in costs)
            words = f"the first {fits} of {len(forecast.trials)} trials" if fits else "not one"
            found.append(Passed(name, unit, float(limit), float(needed), unknown, fits, words))
    if limits.disk_gb is not None and forecast.disk_bytes is not None:
        gib = forecast.disk_bytes / GIB
        if gib > limits.disk_gb:
            found.append(Passed("disk_gb", "GiB", limits.disk_gb, gib, False, None, ""))
    return tuple(found)


def refuse_what_cannot_fit(passed: Sequence[Passed]) -> None:
    """Refuse a sweep that would pass a limit (see :func:`passed_limits`).

    Raises
    ------
    ConfigurationError
        Names each limit, what is needed, and what would fit.
    """
    if not passed:
        return
    raise ConfigurationError(
        "The sweep " + "; it ".join(p.text for p in passed),
        expected="a sweep that fits into its limits",
        fix="raise these limits, or leave out seeds or arms (for disk: lower limits.concurrency or "
        "`keep` of the stages), and run the same command again",
    )


def amount(value: float) -> str:
    """A number of three digits."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
