"""Records of stages, runs and sweeps in a workspace. `infra` reads and writes them.

A stage's record is a spec (its definition), its attempts (each with its job and outcome) and, once
it is done, a result (outputs, report, provenance). A sweep is identified by its name; each launch
with another definition (an arm or seed was added) makes another *version*, and older ones stay. A
trial is a run whose ``provenance["sweep"]`` names its sweep and trial. Everything converts to and
from plain JSON; unknown keys of a newer version are ignored, not an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from refiner_core.contract.marks import is_section, unchecked

#: Version of the record files. Raised when an older reader would misread them.
RECORD_VERSION = 1

FailureClass = Literal[
    "none",  # it succeeded
    "interrupted",  # asked to stop by its own call: Ctrl-C, SIGTERM
    "cancelled",  # by a person: `refiner cancel`, scancel
    "preempted",
    "time_limit",
    "node_failure",
    "launch_failure",  # the scheduler accepted the job and could not start it
    "system_outage",  # no answer from the scheduler or the file system
    "killed",  # the process is gone without an outcome: kill -9, reboot
    "out_of_memory",  # of the host
    "gpu_out_of_memory",
    "gpu_error",  # CUDA, NCCL, ECC: the device or its driver
    "disk_full",  # ENOSPC or EDQUOT
    "hung",
    "judge_outage",
    "judge_unusable",  # it replies, but not with judgements
    "environment_outage",  # its tools or its user failed in too many episodes
    "hub_outage",  # it cannot be reached, fails, or asks to wait for long
    "hub_refused",  # token, permission, name, storage
    "not_finite",  # NaN or Inf
    "unhealthy",  # stopped by a health check of the recipe
    "monitor_pause",  # paused by the monitor of GRPO, for a person to look
    "bad_configuration",
    "bad_data",
    "unsupported",
    "bug",
]
Decision = Literal["finish", "resume", "stop"]


@dataclass(frozen=True)
class AttemptOutcome:
    """End of an attempt: its cause and the decision taken.

    ``step`` is the last finished step. ``signature`` identifies the traceback, so that the same bug
    at the same step is recognised. ``errno`` is the system's error number, if any. ``need_bytes``
    is the size of the failed write when the disk was full: more is needed. ``rank`` is the one of
    several ranks that failed first, or lags; ``node`` is the one of several nodes that failed, by
    its name in Slurm (several with commas), empty if unknown.
    """

    failure: FailureClass
    decision: Decision
    message: str = ""
    exit_code: int = 0
    step: int | None = None
    signature: str = ""
    errno: int | None = None
    need_bytes: int | None = None
    rank: int | None = None
    node: str = ""


@dataclass(frozen=True)
class Attempt:
    """One try at a stage.

    ``comment`` is globally unique and recorded before the job is submitted, so that a crash between
    submitting and recording ``job_id`` neither loses nor doubles the job. ``owner`` identifies
    the orchestrator that claimed the attempt (``host:pid:process start time``). ``restart`` counts
    how often the scheduler had restarted the job when this attempt began; ``node`` is where it ran.
    ``has_room`` is False while its worker cannot write, or waits for space to save, and after it
    has ended so; None if unknown (older attempts).
    """

    number: int
    comment: str
    executor: str
    owner: str
    claimed_at: str
    job_id: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    resumed_from_step: int | None = None
    outcome: AttemptOutcome | None = None
    restart: int = 0
    node: str = ""
    seconds: float | None = None
    has_room: bool | None = None


@dataclass(frozen=True)
class OutputFile:
    """One file of a stage's output, relative to the output folder."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StageResult:
    """Result of a finished stage. Written last: a stage is done once it exists."""

    version: int
    attempt: int
    output_dir: str  # relative to the stage's folder
    files: tuple[OutputFile, ...]
    report: Mapping[str, Any]
    provenance: Mapping[str, Any]
    seconds: float  # of the successful attempt
    finished_at: str


@dataclass(frozen=True)
class StageSpec:
    """Specification of a stage; enough to explain later why two stages differ."""

    version: int
    name: str
    kind: str
    fingerprint: str
    model: str
    stage_version: int
    identity: Mapping[str, Any]
    sources: Mapping[str, str]
    input_fingerprints: Mapping[str, str]

    @property
    def at_step(self) -> dict[str, int]:
        """Roles that read a checkpoint, with its step, instead of the output."""
        return {
            key.removesuffix(".step"): int(step)
            for key, step in self.identity.items()
            if key.removesuffix(".step") in self.input_fingerprints
        }


StageState = Literal["absent", "claimed", "failed", "interrupted", "done"]


@dataclass(frozen=True)
class StageRecord:
    """Record of one stage."""

    spec: StageSpec
    attempts: tuple[Attempt, ...] = ()
    result: StageResult | None = None

    @property
    def state(self) -> StageState:
        """``claimed`` means that an attempt has begun and has no outcome yet; whether it lives is
        known to observers."""
        if self.result is not None:
            return "done"
        if not self.attempts:
            return "absent"
        outcome = self.attempts[-1].outcome
        if outcome is None:
            return "claimed"
        return "failed" if outcome.decision == "stop" else "interrupted"


@dataclass(frozen=True)
class RunRecord:
    """One call of `refiner run`: its recipe, configuration, inputs, and stages."""

    version: int
    run: str
    recipe: str
    overrides: tuple[str, ...]
    command: tuple[str, ...]
    config: Mapping[str, Any]
    stages: Mapping[str, str]  # stage name -> stage id
    code: str  # id of the code snapshot
    started_at: str
    provenance: Mapping[str, Any] = field(default_factory=dict)


T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Records (and anything made of dataclasses, mappings, sequences) as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return value


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Nested JSON values, with a function applied to all that are neither mappings nor lists."""
    if isinstance(value, Mapping):
        return {str(k): mapped(v, leaf) for k, v in value.items()}
    return [mapped(v, leaf) for v in value] if isinstance(value, list | tuple) else leaf(value)


def picked(value: Any, *names: str) -> dict[str, Any]:
    """The named attributes, as plain JSON values."""
    return {name: to_json(getattr(value, name)) for name in names}


def from_json(kind: type[T], data: Any) -> T:
    """The record of type ``kind`` from plain JSON; unknown keys are ignored.

    Raises
    ------
    TypeError
        A required key is missing, or a value is of another type.
    """
    return typing.cast(T, _builder(typing.cast(Any, kind))(data, kind.__name__))


#: Python types of JSON values by declared type. Where a float is due, 1 is as good as 1.0.
_PLAIN: Mapping[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
    Mapping: (Mapping,),
    dict: (Mapping,),
    types.NoneType: (types.NoneType,),
}


@functools.cache
def _builder(kind: Any) -> Callable[[Any, str], Any]:
    """The function that builds a value of a type from JSON; each type is analysed once."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        builders = [_builder(one) for one in args if one is not types.NoneType]
        return functools.partial(_build_first, builders, types.NoneType in args)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {f.name: _builder(hints[f.name]) for f in dataclasses.fields(kind)}
        return functools.partial(_build_fields, kind, fields)
    if origin is tuple:
        builders = [_builder(one) for one in args if one is not ...]
        return functools.partial(_build_tuple, builders, ... in args)
    # a newer version may know more words of a literal
    plain = type(args[0]) if origin is typing.Literal else origin or kind
    return functools.partial(_checked, plain, _PLAIN.get(plain))


def _build_first(
    builders: list[Callable[[Any, str], Any]], optional: bool, data: Any, name: str
) -> Any:
    if optional and data is None:
        return None
    for build in builders[:-1]:
        with contextlib.suppress(TypeError):
            return build(data, name)
    return builders[-1](data, name)


def _build_fields(
    kind: Any, fields: Mapping[str, Callable[[Any, str], Any]], data: Any, name: str
) -> Any:
    _checked(dict, (Mapping,), data, name)
    values = {k: fields[k](v, f"{name}.{k}") for k, v in data.items() if k in fields}
    return unchecked(kind, values) if is_section(kind) else kind(**values)


def _build_tuple(
    builders: list[Callable[[Any, str], Any]], repeats: bool, data: Any, name: str
) -> Any:
    _checked(tuple, (list, tuple), data, name)
    kinds = builders * len(data) if repeats else builders
    if len(kinds) != len(data):
        raise TypeError(f"{name} has {len(data)} parts instead of {len(kinds)}")
    return tuple(build(v, name) for build, v in zip(kinds, data, strict=True))


def _checked(kind: type, accepted: tuple[type, ...] | None, data: Any, name: str) -> Any:
    is_flag = isinstance(data, bool) and kind is not bool
    if accepted is not None and (is_flag or not isinstance(data, accepted)):
        raise TypeError(f"{name} is {data!r:.80}, which is not a {kind.__name__}")
    return data


SWEEP_VERSION = 1


@dataclass(frozen=True)
class ArmRecord:
    """One setting of all factors.

    ``name`` is for people, commands and paths (letters, digits, ``.=+_-``); ``levels`` maps factors
    to labels; ``changes`` maps dotted fields to values.
    """

    name: str
    levels: Mapping[str, str]
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class TrialRecord:
    """One arm with one seed, and its stages (name -> id)."""

    arm: str
    seed: int
    overrides: tuple[str, ...]
    stages: Mapping[str, str]

    @property
    def name(self) -> str:
        """Unique in its sweep: ``citation-0.2/seed1``."""
        return f"{self.arm}/seed{self.seed}"


@dataclass(frozen=True)
class SweepRecord:
    """One version of a sweep, as it was launched.

    Attributes
    ----------
    number
        Number within its sweep, from 1.
    recipe, folder, text
        The recipe, the folder of relative paths, the verbatim text of the sweep file.
    limits, question
        As in the file (:class:`sweeps.values.Limits`, :class:`sweeps.values.Question`).
    forecast
        The forecast made before it began, as JSON.
    code
        Id of the code snapshot that its jobs import.
    """

    version: int
    number: int
    name: str
    recipe: str
    folder: str
    text: str
    arms: tuple[ArmRecord, ...]
    baseline: str
    seeds: tuple[int, ...]
    trials: tuple[TrialRecord, ...]
    limits: Mapping[str, Any]
    question: Mapping[str, Any]
    forecast: Mapping[str, Any]
    code: str
    started_at: str
    provenance: Mapping[str, Any] = field(default_factory=dict)


def trial_of(provenance: Mapping[str, Any]) -> tuple[str, str, int] | None:
    """Sweep, arm and seed of a run's provenance; None for a run of its own."""
    found = provenance.get("sweep")
    if not isinstance(found, Mapping):
        return None
    return str(found["name"]), str(found["arm"]), int(found["seed"])


def all_malformed(report: Mapping[str, Any]) -> str:
    """Remark on a report without a single well-formed answer; else empty. The untrained base model
    is not remarked on."""
    rollouts, counts = report.get("episodes"), report.get("counts") or {}
    if rollouts and counts.get("samples/malformed") == rollouts:
        return f"all of its {rollouts} rollouts were malformed: there was nothing to learn from"
    valid = [e for e in report.get("evaluations") or () if e.get("metric") == "format_valid"]
    if not valid or any(e.get("stage") == "base" or e.get("numerator") != 0 for e in valid):
        return ""
    counted = ", ".join(f"0 of {e.get('denominator')} {e.get('decoding')}" for e in valid)
    return f"not one answer was well formed (format_valid: {counted})"
