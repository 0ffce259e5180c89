"""From the text of a nightly file to :class:`Nightly`, with errors that name the line's field.

In: YAML. Out: the value, checked for form; whether its recipe loads and its checkpoints are there
is for who has a workspace.

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
    catch_up: 3
"""

from __future__ import annotations

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
from refiner_core.contract.files import keys_twice, read_yaml
from refiner_core.contract.loading import warn_former
from refiner_core.contract.sections.addresses import is_place
from refiner_core.contract.sections.steering import Alarm
from refiner_core.contract.shipped import refuse_unknown

#: Version of the rows of a history.
ROW_VERSION = 1
SourceKind = Literal["hub", "folder", "stage", "newest"]
When = Literal["any", "drop", "rise"]


@dataclass(frozen=True)
class Source:
    """Origin of a checkpoint.

    Attributes
    ----------
    kind
        ``hub``: ``ref`` is a repository, ``revision`` a commit, branch or tag. ``folder``: a folder
        with weights, or ``builtin:tiny``. ``stage``: the id of a stage that has trained or
        exported. ``newest``: ``ref`` is ``run ID``, ``recipe NAME``, ``sweep NAME`` or
        ``sweep NAME/ARM``.
    digest
        SHA-256 of the weights' folder that is expected; empty: any.
    """

    kind: SourceKind
    ref: str
    revision: str = ""
    digest: str = ""

    @property
    def frozen(self) -> bool:
        """True if it is the same weights in every night."""
        return bool(self.digest) or self.kind == "stage" or self.is_commit

    @property
    def is_commit(self) -> bool:
        """True if ``revision`` names one commit for good."""
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
    """One model that is evaluated every night; ``name`` is for people, tables and paths."""

    name: str
    source: Source


@dataclass(frozen=True)
class Alerts:
    """Conditions and channels of alerts.

    Attributes
    ----------
    metrics
        These are watched, under every protocol and decoding.
    when
        In which direction a model's change matters. Drift is told in both.
    smallest
        Changes below it are left alone, in units of the metric.
    """

    metrics: tuple[str, ...] = ("reward",)
    when: When = "any"
    smallest: float = 0.0
    alarms: tuple[Alarm, ...] = ()


@dataclass(frozen=True)
class Nightly:
    """A nightly evaluation as it was written.

    Attributes
    ----------
    schedule, timezone
        A cron line of five fields, and the zone that it is meant in (IANA).
    recipe, overrides
        Data, judge and evaluation settings; its model and its training are not used.
    canary
        The frozen checkpoint. It is evaluated afresh every night.
    catch_up
        How many missed nights are looked after at most when one comes late.
    text, origin, folder
        The file, word for word; where it lies; the folder that its paths are relative to.
    """

    name: str
    schedule: str
    timezone: str
    recipe: str
    overrides: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    canary: Checkpoint
    alerts: Alerts = Alerts()
    catch_up: int = 3
    text: str = ""
    origin: str = ""
    folder: str = "."

    @property
    def everybody(self) -> tuple[Checkpoint, ...]:
        """The canary first: should time be short, it has the most to say."""
        return (self.canary, *self.checkpoints)


@dataclass(frozen=True)
class Row:
    """One checkpoint under one protocol in one night.

    Attributes
    ----------
    night
        Date (ISO) in the schedule's time zone.
    protocol, protocol_name, protocol_set, decoding
        Fingerprint; name for people; name of the protocol file (empty: the recipe's own).
    digest, source
        Of the weights, and what they were, in words.
    stage, samples
        Id of the evaluation, and its file of per-sample results, relative to the stage's output.
    fresh
        Whether it was measured for this night; else the numbers of an earlier one still hold,
        because neither the weights nor the protocol have changed.
    late
        Whether the row was written when a later night had already begun.
    measured_in
        The night whose conditions the numbers were made under; empty where they were made outside
        of this nightly evaluation.
    numbers
        Metric -> ``value``, ``low``, ``high``, ``n``, ``protocol`` (that of ``reward`` covers how
        it is combined, too).
    facts
        What may have changed beside the weights, as text by name: ``judge.model``,
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
        """Unique in its history; also the name of its file."""
        return f"{self.night}--{self.checkpoint}--{self.protocol}"


#: So many occasions are looked at for two in one night.
_LOOKED_AT = 400
#: Nobody means a line that has no occasion within so many days.
_LONGEST_GAP = timedelta(days=370)


class Schedule:
    """The nights of a cron line.

    Parameters
    ----------
    cron, timezone
        Five fields, and an IANA name such as ``Europe/Berlin``.

    Raises
    ------
    ConfigurationError
        One of them cannot be read, or the line has two occasions in one night, or hardly any.
    """

    def __init__(self, cron: str, timezone: str) -> None:
        self.cron, self.timezone = cron, timezone
        self._zone = _zone(timezone)
        self._check()

    def night_at(self, moment: datetime) -> str:
        """The newest night that has begun by then."""
        return self.nights_up_to(moment, 1)[0]

    def nights_up_to(self, moment: datetime, count: int) -> list[str]:
        """The last ``count`` nights that have begun by then, oldest first."""
        # One that begins exactly now has begun.
        there = self._here(moment) + timedelta(seconds=1)
        found = CronSim(self.cron, there, reverse=True)
        return [next(found).date().isoformat() for _ in range(count)][::-1]

    def next_after(self, moment: datetime) -> datetime:
        """Time at which the next night begins."""
        return next(CronSim(self.cron, self._here(moment)))

    def begins(self, night: str) -> datetime:
        """Time at which a night begins.

        Raises
        ------
        ConfigurationError
            It is no date, or the schedule has no night on it.
        """
        day = _date(night)
        start = datetime(day.year, day.month, day.day, tzinfo=self._zone) - timedelta(seconds=1)
        begins = self.next_after(start)
        if begins.date() != day:
            raise ConfigurationError(
                f"There is no night of {night}: the schedule is `{self.cron}` ({self.timezone}).",
                expected=f"a date on which it has one, such as {begins.date()}",
                fix="name another --night, or correct `schedule`",
            )
        return begins

    def _here(self, moment: datetime) -> datetime:
        """The moment in the zone, as a plain one: Prefect's are of a kind that computes otherwise,
        and takes cronsim a night too far back."""
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
            if other - one > _LONGEST_GAP:
                raise self._refusal("leaves more than a year between two nights")

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


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} is no date.", expected="a night as YYYY-MM-DD", fix="correct --night"
        ) from error


_FIELDS = (
    *("name", "description", "schedule", "timezone", "recipe", "overrides", "checkpoints"),
    *("canary", "alerts", "catch_up"),
)
_KINDS = ("hub", "folder", "stage", "newest")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,63}")
#: What the night decides by itself.
_OURS = ("model.name_or_path", "model.revision", "stages", "only", "evaluate.models")
_MOST_CATCH_UP = 60


def parse_nightly(text: str, *, stem: str, origin: str, folder: str) -> Nightly:
    """The nightly evaluation that ``text`` describes.

    Parameters
    ----------
    stem
        Name of the file without its ending; the default of ``name``.
    origin, folder
        Where it was read, for messages, and what its paths are relative to.

    Raises
    ------
    ConfigurationError
        Names the field, what it is, what was expected.
    """
    values = _mapping(read_yaml(text, origin), origin, "the file", _FIELDS)
    if twice := [
        f"`{key}` (line {line})" for line, key in keys_twice(yaml.compose(text, yaml.SafeLoader))
    ]:
        raise ConfigurationError(
            f"{origin} has {', '.join(twice)} twice.",
            expected="each key once: else one value would hide the other",
            fix="remove one of the two",
        )
    nightly = Nightly(
        name=_name(values.get("name", stem), "name"),
        schedule=_text(values, "schedule", origin),
        timezone=_text(values, "timezone", origin, "UTC"),
        recipe=_text(values, "recipe", origin),
        overrides=_overrides(values.get("overrides") or []),
        checkpoints=_checkpoints(values.get("checkpoints")),
        canary=_canary(values.get("canary"), origin),
        alerts=_alerts(values.get("alerts") or {}),
        catch_up=_catch_up(values.get("catch_up", 3)),
        text=text,
        origin=origin,
        folder=folder,
    )
    _unique(nightly)
    Schedule(nightly.schedule, nightly.timezone)
    return nightly


def _canary(value: Any, origin: str) -> Checkpoint:
    if value is None:
        raise ConfigurationError(
            f"{origin} names no `canary`.",
            expected="one frozen checkpoint: without it nobody can tell a change of the judge or "
            "of machines from a change of a model",
            fix="write `canary: {name: canary, folder: PATH, digest: SHA256}` (`refiner nightly "
            "check` says the digest of a folder)",
        )
    canary = _checkpoint(value, "canary", name="canary")
    source, moving = canary.source, ""
    if source.kind == "newest":
        moving = f"the newest of {source.ref}, which moves"
    elif source.kind == "hub" and not source.is_commit:
        moving = f"revision {source.revision or '(none)'} of {source.ref}, which may move"
    if moving:
        raise ConfigurationError(
            f"The canary is {moving}.",
            expected="a checkpoint that stays as it is: a Hub repository at a commit (40 hex "
            "digits), or a folder or stage with the `digest` of its content",
            fix="pin `canary`",
        )
    return canary


def _checkpoints(value: Any) -> tuple[Checkpoint, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigurationError(
            "`checkpoints` names nothing to evaluate.",
            expected="a list such as `- {name: latest, newest: {recipe: tiny}}`",
            fix="add a checkpoint",
        )
    return tuple(_checkpoint(entry, f"checkpoints[{i}]") for i, entry in enumerate(value))


def _checkpoint(value: Any, where: str, name: str | None = None) -> Checkpoint:
    values = _mapping(value, where, "an entry", ("name", "revision", "digest", *_KINDS))
    kinds = [kind for kind in _KINDS if values.get(kind) is not None]
    if len(kinds) != 1:
        raise ConfigurationError(
            f"`{where}` names {' and '.join(kinds) or 'no model'}.",
            expected=f"exactly one of {', '.join(_KINDS)}",
            fix=f"correct `{where}`",
        )
    kind = kinds[0]
    for key, kind_of_field in (("revision", ("hub",)), ("digest", ("folder", "stage"))):
        if values.get(key) is not None and kind not in kind_of_field:
            raise ConfigurationError(
                f"`{where}` has a {key}, and is a {kind}.",
                expected=f"`{key}` beside {' or '.join(kind_of_field)}",
                fix=f"drop `{key}`",
            )
    ref = _newest(values[kind], where) if kind == "newest" else str(values[kind])
    source = Source(
        kind=kind,  # type: ignore[arg-type]  # one of _KINDS
        ref=ref,
        revision=str(values.get("revision") or ("main" if kind == "hub" else "")),
        digest=str(values.get("digest") or ""),
    )
    return Checkpoint(_name(values.get("name", name), f"{where}.name"), source)


def _newest(value: Any, where: str) -> str:
    known = ("run", "recipe", "sweep", "arm")
    values = _mapping(value, f"{where}.newest", "a mapping", known)
    kinds = [k for k in ("run", "recipe", "sweep") if values.get(k)]
    if len(kinds) != 1 or (values.get("arm") and kinds != ["sweep"]):
        raise ConfigurationError(
            f"`{where}.newest` is {dict(values)}.",
            expected="{run: ID}, {recipe: NAME}, {sweep: NAME} or {sweep: NAME, arm: ARM}",
            fix="name one of them",
        )
    arm = f"/{values['arm']}" if values.get("arm") else ""
    return f"{kinds[0]} {values[kinds[0]]}{arm}"


def _alerts(value: Any) -> Alerts:
    known = ("metrics", "when", "smallest", "channels")
    values = _mapping(value, "alerts", "a mapping", known)
    metrics = values.get("metrics", list(Alerts().metrics))
    if not isinstance(metrics, list) or not all(isinstance(m, str) for m in metrics) or not metrics:
        raise _wrong("alerts.metrics", metrics, "a list of metrics, such as [reward, oracle]")
    when = values.get("when", "any")
    if when not in get_args(When):
        raise _wrong("alerts.when", when, "one of " + ", ".join(get_args(When)))
    smallest = values.get("smallest", 0.0)
    if isinstance(smallest, bool) or not isinstance(smallest, int | float) or not smallest >= 0:
        raise _wrong("alerts.smallest", smallest, "a number that is not negative")
    channels = values.get("channels") or []
    if not isinstance(channels, list):
        raise _wrong("alerts.channels", channels, "a list such as [{command: ./tell.sh}]")
    alarms = tuple(alarm for c in channels if (alarm := _alarm(c)) is not None)
    return Alerts(tuple(metrics), when, float(smallest), alarms)


def _alarm(value: Any) -> Alarm | None:
    """One channel; none where it is a former one without effect."""
    known = ("command", "url", "webhook", "prefect")
    values = _mapping(value, "alerts.channels", "an entry", known)
    if len(values) != 1:
        raise _wrong("alerts.channels", dict(values), "one of command, url an entry")
    ((channel, what),) = values.items()
    if channel == "prefect":
        warn_former("alerts.channels.prefect", "a night's flow run tells Prefect of its alerts")
        return None
    if channel == "webhook":
        warn_former("alerts.channels.webhook", "it works as `url`, which takes its place", "")
    if not isinstance(what, str) or not what.strip():
        raise _wrong(f"alerts.channels.{channel}", what, "text")
    if channel != "command" and not is_place(what):
        raise ConfigurationError(
            f"`alerts.channels.{channel}` is an address, or something else that is no name of a "
            "variable.",
            expected="the name of the environment variable, or the path (from / or ~/) of the "
            "file, that holds the address, which is often a secret",
            fix="write `url: NIGHTLY_HOOK`, and export that variable",
        )
    return Alarm("command" if channel == "command" else "url", what)


def _overrides(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(o, str) for o in value):
        raise _wrong("overrides", value, "a list of `key=value` texts")
    ours = [o for o in value if o.partition("=")[0].strip() in _OURS]
    if ours:
        raise ConfigurationError(
            f"`overrides` has {', '.join(ours)}.",
            expected="data, judge and evaluation settings: which models are evaluated is said by "
            "`checkpoints`",
            fix="drop it from `overrides`, and name the models in `checkpoints`",
        )
    if any(o.partition("=")[0].strip() == "evaluate.occasion" for o in value):
        raise ConfigurationError(
            "`overrides` has evaluate.occasion, by which the canary's nights are told apart.",
            expected="occasions that the nights set themselves",
            fix="drop it from `overrides`",
        )
    return tuple(value)


def _unique(nightly: Nightly) -> None:
    names = [c.name for c in nightly.everybody]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ConfigurationError(
            f"Two checkpoints are called {', '.join(twice)}.",
            expected="a name of its own for each, the canary included",
            fix="rename one; its history begins anew under the new name",
        )


def _catch_up(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_CATCH_UP:
        raise _wrong("catch_up", value, f"a number of nights from 0 to {_MOST_CATCH_UP}")
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or "--" in value:
        raise _wrong(where, value, "a name of letters, digits and ._+=- (no double dash)")
    return value


def _text(values: Mapping[str, Any], key: str, origin: str, default: str = "") -> str:
    value = values.get(key, default)
    if not isinstance(value, str) or not value.strip():
        if key not in values:
            raise ConfigurationError(
                f"{origin} has no `{key}`.",
                expected="it, as text",
                fix=f"add `{key}: …` (the shipped tiny-nightly has all that is needed)",
            )
        raise _wrong(key, value, "text (quote it)")
    return value.strip()


def _mapping(value: Any, where: str, what: str, known: Sequence[str]) -> Mapping[str, Any]:
    """A mapping that has no other keys than those that are known."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"`{where}` is {value!r:.60}.",
            expected=f"{what} of `key: value`",
            fix=f"correct `{where}`",
        )
    values = {str(k): v for k, v in value.items()}
    refuse_unknown(values, known, where)
    return values


def _wrong(where: str, value: Any, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"`{where}` is {value!r:.80}.", expected=expected, fix=f"correct `{where}`"
    )
