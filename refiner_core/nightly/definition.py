"""Nightly files: from YAML text to :class:`Nightly`, with errors that name the field.

In: YAML. Out: the value, checked for form; callers with a workspace check that its recipe loads and
its checkpoints exist.

    name: regressions            # default: the file's name
    schedule: "0 3 * * *"        # cron, at most one occasion a day
    timezone: Europe/Berlin      # default: UTC
    recipe: tiny
    overrides: [workspace=runs, evaluate.max_prompts=100]
    checkpoints:
      - {name: released, hub: org/name, revision: 0123…}
      - {name: candidate, folder: exports/candidate}
      - {name: sft, stage: sft-0123456789ab}
      - {name: latest, newest: {recipe: tiny}}     # or {run: ID}, {sweep: NAME, arm: ARM}
    canary: {name: canary, folder: exports/canary, digest: 89ab…}
    alerts:
      metrics: [reward]
      when: any                  # or drop, rise
      smallest: 0.02
      channels:
        - command: ./tell.sh
        - url: NIGHTLY_HOOK      # the variable, or the file, that holds the address
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any, Literal, get_args
from zoneinfo import ZoneInfo, available_timezones

import yaml
from cronsim import CronSim, CronSimError

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.files import keys_twice, read_yaml, refuse_unknown
from refiner_core.contract.loading import warn_former
from refiner_core.contract.records import from_json
from refiner_core.contract.sections.steering import NotifyChannel, check_places

#: Version of the rows of a history.
ROW_VERSION = 1
SourceKind = Literal["hub", "folder", "stage", "newest"]
When = Literal["any", "drop", "rise"]


@dataclass(frozen=True)
class CheckpointSource:
    """Origin of a checkpoint.

    Attributes
    ----------
    kind
        ``hub``: ``ref`` is a repository, ``revision`` a commit, branch or tag. ``folder``: a folder
        with weights, or ``builtin:tiny``. ``stage``: the id of a stage that has trained or
        exported. ``newest``: ``ref`` is ``run ID``, ``recipe NAME``, ``sweep NAME`` or
        ``sweep NAME/ARM``.
    digest
        Expected SHA-256 of the weights' folder; empty: any.
    """

    kind: SourceKind
    ref: str
    revision: str = ""
    digest: str = ""

    @property
    def is_commit(self) -> bool:
        """True if ``revision`` names one fixed commit."""
        hexadecimal = all(c in "0123456789abcdef" for c in self.revision)
        return self.kind == "hub" and len(self.revision) == 40 and hexadecimal

    @property
    def text(self) -> str:
        """For people."""
        if self.kind == "hub":
            return f"{self.ref}@{self.revision}"
        return f"newest of {self.ref}" if self.kind == "newest" else self.ref


@dataclass(frozen=True)
class Checkpoint:
    """One model that is evaluated every night; ``name`` appears in tables and paths."""

    name: str
    source: CheckpointSource


@dataclass(frozen=True)
class Alerts:
    """Conditions and channels of alerts.

    Attributes
    ----------
    metrics
        Watched metrics, under every protocol and decoding.
    when
        Relevant direction of a model's change. Drift is reported in both.
    smallest
        Smaller changes are ignored, in units of the metric.
    """

    metrics: tuple[str, ...] = ("reward",)
    when: When = "any"
    smallest: float = 0.0
    alarms: tuple[NotifyChannel, ...] = ()


@dataclass(frozen=True)
class Nightly:
    """A nightly evaluation, as written in its file.

    Attributes
    ----------
    schedule, timezone
        A cron line of five fields, and its time zone (IANA).
    recipe, overrides
        Data, judge and evaluation settings; its model and its training are not used.
    canary
        The frozen checkpoint. It is evaluated anew every night.
    origin, folder
        Path of the file; the folder of its relative paths.
    """

    name: str
    schedule: str
    timezone: str
    recipe: str
    overrides: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    canary: Checkpoint
    alerts: Alerts = Alerts()
    origin: str = ""
    folder: str = "."

    @property
    def everybody(self) -> tuple[Checkpoint, ...]:
        """The canary first: if time is short, it matters most."""
        return (self.canary, *self.checkpoints)


@dataclass(frozen=True)
class NightRow:
    """One checkpoint under one protocol in one night.

    Attributes
    ----------
    night
        Date (ISO) in the schedule's time zone.
    protocol, protocol_name, protocol_set, decoding
        Fingerprint; readable name; name of the protocol file (empty: the recipe's own).
    digest, source
        Of the weights, and their source in words.
    stage, samples
        Id of the evaluation, and its file of per-sample results, relative to the stage's output.
    fresh
        Whether it was measured for this night; else the numbers of an earlier one still hold,
        because neither the weights nor the protocol have changed.
    late
        Whether the row was written after a later night had started.
    measured_in
        The night whose conditions the numbers were made under; empty if they were made outside
        of this nightly evaluation.
    numbers
        Metric -> ``value``, ``low``, ``high``, ``n``, ``protocol`` (that of ``reward`` includes its
        combination).
    facts
        Possible changes beside the weights, as text by name: ``judge.model``,
        ``judge.revision``, ``judge.served``, ``code``, ``versions.torch``, ``host.name`` …
    """

    version: int
    nightly: str
    night: str
    checkpoint: str
    canary: bool
    protocol: str
    protocol_name: str
    protocol_set: str
    decoding: str
    digest: str
    source: str
    stage: str
    samples: str
    run: str
    fresh: bool
    late: bool
    measured_in: str
    evaluated_at: str
    numbers: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Unique key in its history; also the name of its file."""
        return f"{self.night}--{self.checkpoint}--{self.protocol}"


#: Occasions checked for two in one night.
_LOOKED_AT = 400


class Schedule:
    """The nights of a cron line.

    Parameters
    ----------
    cron, timezone
        Five fields, and an IANA name such as ``Europe/Berlin``.

    Raises
    ------
    ConfigurationError
        One of them cannot be read, or the line has two occasions in one night.
    """

    def __init__(self, cron: str, timezone: str) -> None:
        self.cron, self.timezone = cron, timezone
        self._zone = _zone(timezone)
        self._check()

    def night_at(self, moment: datetime) -> str:
        """The newest night that has started by then."""
        there = self._here(moment) + timedelta(seconds=1)  # one that starts exactly now has started
        return next(CronSim(self.cron, there, reverse=True)).date().isoformat()

    def next_after(self, moment: datetime) -> datetime:
        """Start of the next night."""
        return next(CronSim(self.cron, self._here(moment)))

    def begins(self, night: str) -> datetime:
        """Start of a night.

        Raises
        ------
        ConfigurationError
            It is no date, or the schedule has no night on it.
        """
        with contextlib.suppress(ValueError):
            day = date.fromisoformat(night)
            start = datetime(day.year, day.month, day.day, tzinfo=self._zone)
            begins = self.next_after(start - timedelta(seconds=1))
            if begins.date() == day:
                return begins
        raise ConfigurationError(
            f"There is no night of {night}: the schedule is `{self.cron}` ({self.timezone}).",
            expected="a date (YYYY-MM-DD) of the schedule",
            fix="name another --night, or correct `schedule`",
        )

    def _here(self, moment: datetime) -> datetime:
        """The moment in the zone, as a plain datetime: Prefect's subclass computes differently, and
        leads cronsim one night too far back."""
        return datetime.fromtimestamp(moment.timestamp(), self._zone)

    def _check(self) -> None:
        if len(self.cron.split()) != 5:
            raise self._refusal(f"has {len(self.cron.split())} fields")
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        try:
            found = CronSim(self.cron, moment.astimezone(self._zone))
            occasions = [next(found) for _ in range(_LOOKED_AT)]
        except CronSimError as error:
            raise self._refusal(f"cannot be read ({error})") from error
        except StopIteration as error:
            raise self._refusal("never comes, or ends some day") from error
        for one, other in pairwise(occasions):
            if one.date() == other.date():
                raise self._refusal(
                    f"has two occasions in one night ({one:%H:%M} and {other:%H:%M})"
                )

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"`schedule: {self.cron}` {why}.",
            expected="a cron line of five fields with at most one occasion a day, such as "
            "`0 3 * * *` (three in the morning) or `30 2 * * 1-5`",
            fix="correct `schedule`",
        )


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError) as error:  # ZoneInfoNotFoundError is a KeyError
        raise ConfigurationError(
            f"There is no time zone {name!r}.{suggest(name, available_timezones())}",
            expected="an IANA name such as Europe/Berlin, or UTC",
            fix="correct `timezone`",
        ) from error


_FIELDS = (
    *("name", "description", "schedule", "timezone", "recipe", "overrides", "checkpoints"),
    *("canary", "alerts", "catch_up"),
)
_KINDS = ("hub", "folder", "stage", "newest")
_NAME = re.compile(r"(?!.*--)[A-Za-z0-9][A-Za-z0-9._+=-]{0,63}")
#: Settings that the night itself decides.
_OURS = (
    *("model.name_or_path", "model.revision", "stages", "only", "evaluate.models"),
    "evaluate.occasion",
)
#: Required keys.
_NEEDED = ("schedule", "recipe", "checkpoints", "canary")


def parse_nightly(text: str, *, stem: str, origin: str, folder: str) -> Nightly:
    """The nightly evaluation described by ``text``.

    Parameters
    ----------
    stem
        Name of the file without its suffix; the default of ``name``.
    origin, folder
        Path of the file, for messages, and the folder of its relative paths.

    Raises
    ------
    ConfigurationError
        The message names the field, its value and the expected form.
    """
    given = _mapping(read_yaml(text, origin), origin, _FIELDS)
    for line, key in keys_twice(yaml.compose(text, yaml.SafeLoader)):
        raise ConfigurationError(
            f"{origin} has `{key}` (line {line}) twice.",
            expected="each key once: else one value would hide the other",
            fix="remove one of the two",
        )
    if given.pop("catch_up", None) is not None:
        warn_former("catch_up", "a night that has passed is not evaluated any more")
    values = {key: value for key, value in given.items() if value is not None}
    if missing := [key for key in _NEEDED if not values.get(key)]:
        raise ConfigurationError(
            f"{origin} has no `{missing[0]}`.",
            expected="a schedule, a recipe, checkpoints to evaluate and a canary: one frozen "
            "checkpoint, without which a change of the judge or of machines looks like one of a "
            "model",
            fix="add it, as `refiner nightly check tiny-nightly`'s file has it",
        )
    checkpoints = values["checkpoints"]
    if isinstance(checkpoints, list):
        values["checkpoints"] = [
            _checkpoint(entry, f"checkpoints[{i}]") for i, entry in enumerate(checkpoints)
        ]
    values["canary"] = _checkpoint(values["canary"], "canary", "canary")
    values["alerts"] = _alerts(values.get("alerts", {}))
    of_file = {"origin": origin, "folder": folder}
    try:
        nightly = from_json(
            Nightly, {"name": stem, "timezone": "UTC", "overrides": [], **values, **of_file}
        )
    except TypeError as error:
        said = str(error).removeprefix("Nightly.").replace("alarms.what", "channels")
        raise ConfigurationError(
            f"{origin}: {said}.",
            expected="each field as the file of `tiny-nightly` has it",
            fix="correct it",
        ) from error
    _check(nightly)
    Schedule(nightly.schedule, nightly.timezone)
    return nightly


def _check(nightly: Nightly) -> None:
    """Refuse values of the right type that make no sense."""
    alerts, source = nightly.alerts, nightly.canary.source
    names = [c.name for c in nightly.everybody]
    a_name = "a name of letters, digits and ._+=- (no double dash)"
    ours = [o for o in nightly.overrides if o.partition("=")[0].strip() in _OURS]
    directions = ", ".join(get_args(When))
    for where, right, found, expected in (
        ("name", _NAME.fullmatch(nightly.name), nightly.name, a_name),
        *(("checkpoints: name", _NAME.fullmatch(name), name, a_name) for name in names),
        ("alerts.when", alerts.when in get_args(When), alerts.when, f"one of {directions}"),
        ("alerts.smallest", alerts.smallest >= 0, alerts.smallest, "a number from 0 up"),
        ("alerts.metrics", alerts.metrics, [], "metrics, such as [reward, oracle]"),
        ("overrides", not ours, ours, "data, judge and evaluation settings: the evaluated "
         "models are named by `checkpoints`"),
    ):  # fmt: skip
        if not right:
            raise _wrong(where, repr(found), expected)
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ConfigurationError(
            f"Two checkpoints are called {', '.join(twice)}.",
            expected="a unique name for each, the canary included",
            fix="rename one; its history starts over under the new name",
        )
    if source.kind == "newest" or (source.kind == "hub" and not source.is_commit):
        raise ConfigurationError(
            f"The canary is {source.text}, which may move.",
            expected="a checkpoint that cannot change: a Hub repository at a commit (40 hex "
            "digits), or a folder or stage with the `digest` of its content",
            fix="pin `canary`",
        )


def _checkpoint(value: Any, where: str, name: str | None = None) -> dict[str, Any]:
    """An entry in the JSON form of :class:`Checkpoint`."""
    values = _mapping(value, where, ("name", "revision", "digest", *_KINDS))
    kinds = [kind for kind in _KINDS if values.get(kind) is not None]
    if len(kinds) != 1:
        raise _wrong(where, " and ".join(kinds) or "without a model", f"one of {', '.join(_KINDS)}")
    kind = kinds[0]
    for key, kinds_with_it in (("revision", ("hub",)), ("digest", ("folder", "stage"))):
        if values.get(key) is not None and kind not in kinds_with_it:
            raise _wrong(f"{where}.{key}", "there", f"it beside {' or '.join(kinds_with_it)}")
    source = {
        "kind": kind,
        "ref": _newest(values[kind], where) if kind == "newest" else str(values[kind]),
        "revision": str(values.get("revision") or ("main" if kind == "hub" else "")),
        "digest": str(values.get("digest") or ""),
    }
    return {"name": values.get("name", name), "source": source}


def _newest(value: Any, where: str) -> str:
    values = _mapping(value, f"{where}.newest", ("run", "recipe", "sweep", "arm"))
    kinds = [k for k in ("run", "recipe", "sweep") if values.get(k)]
    if len(kinds) != 1 or (values.get("arm") and kinds != ["sweep"]):
        forms = "{run: ID}, {recipe: NAME}, {sweep: NAME} or {sweep: NAME, arm: ARM}"
        raise _wrong(f"{where}.newest", str(values), forms)
    arm = f"/{values['arm']}" if values.get("arm") else ""
    return f"{kinds[0]} {values[kinds[0]]}{arm}"


def _alerts(value: Any) -> dict[str, Any]:
    """The section in the JSON form of :class:`Alerts`."""
    values = _mapping(value, "alerts", ("metrics", "when", "smallest", "channels"))
    channels = values.pop("channels", None) or []
    if not isinstance(channels, list):
        raise _wrong("alerts.channels", repr(channels), "a list such as [{command: ./tell.sh}]")
    alarms = []
    for entry in channels:
        known = ("command", "url", "webhook", "prefect")
        found = _mapping(entry, "alerts.channels", known)
        if len(found) != 1:
            raise _wrong("alerts.channels", str(found), "one of command, url an entry")
        ((channel, what),) = found.items()
        if channel == "prefect":
            warn_former("alerts.channels.prefect", "a night's flow run tells Prefect of its alerts")
            continue
        if channel == "webhook":
            warn_former("alerts.channels.webhook", "it works as `url`, which takes its place", "")
            channel = "url"
        if channel == "url":
            check_places("alerts.channels.url", [str(what)])
        alarms.append({"channel": channel, "what": what})
    return {**values, "alarms": alarms}


def _mapping(value: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    """A mapping without unknown keys."""
    if not isinstance(value, Mapping):
        raise _wrong(where, repr(value), "a mapping of `key: value`")
    values = {str(k): v for k, v in value.items()}
    refuse_unknown(values, known, where)
    return values


def _wrong(where: str, found: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"`{where}` is {found:.80}.", expected=expected, fix=f"correct `{where}`"
    )
