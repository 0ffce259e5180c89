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
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from refiner_core.contract.alarms import is_place
from refiner_core.contract.checks.former import warn_former
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.yaml_words import yaml_reason
from refiner_core.nightly.schedule import Schedule
from refiner_core.nightly.values import Alarm, Alerts, Checkpoint, Nightly, Source, When

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
    values = _mapping(_yaml(text, origin), origin, "the file")
    _only(values, _FIELDS, origin)
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


def _yaml(text: str, origin: str) -> Any:
    import yaml

    try:
        if twice := _keys_twice(yaml.compose(text, yaml.SafeLoader)):
            raise ConfigurationError(
                f"{origin} has {', '.join(twice)} twice.",
                expected="each key once: else one value would hide the other",
                fix="remove one of the two",
            )
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = "it is nested too deeply" if deep else yaml_reason(error)
        raise ConfigurationError(
            f"{origin} is not YAML: {why}.",
            expected="`key: value` lines",
            fix="correct the nesting" if deep else "correct the place named above",
        ) from error


def _keys_twice(node: Any) -> list[str]:
    """Keys that a mapping of the document has twice, with their lines."""
    if node is None or node.id == "scalar":
        return []
    pairs = node.value if node.id == "mapping" else [(None, item) for item in node.value]
    seen, found = set(), []
    for key, value in pairs:
        if key is not None and key.id == "scalar":
            if key.value in seen:
                found.append(f"`{key.value}` (line {key.start_mark.line + 1})")
            seen.add(key.value)
        found += _keys_twice(value)
    return found


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
    source = canary.source
    if source.kind == "newest":
        raise _unfrozen(f"the newest of {source.ref}, which moves")
    if source.kind == "hub" and not source.is_commit:
        raise _unfrozen(f"revision {source.revision or '(none)'} of {source.ref}, which may move")
    return canary


def _unfrozen(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"The canary is {what}.",
        expected="a checkpoint that stays as it is: a Hub repository at a commit (40 hex digits), "
        "or a folder or stage with the `digest` of its content",
        fix="pin `canary`",
    )


def _checkpoints(value: Any) -> tuple[Checkpoint, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigurationError(
            "`checkpoints` names nothing to evaluate.",
            expected="a list such as `- {name: latest, newest: {recipe: tiny}}`",
            fix="add a checkpoint",
        )
    return tuple(_checkpoint(entry, f"checkpoints[{i}]") for i, entry in enumerate(value))


def _checkpoint(value: Any, where: str, name: str | None = None) -> Checkpoint:
    values = _mapping(value, where, "an entry")
    _only(values, ("name", "revision", "digest", *_KINDS), where)
    kinds = [kind for kind in _KINDS if values.get(kind) is not None]
    if len(kinds) != 1:
        raise ConfigurationError(
            f"`{where}` names {' and '.join(kinds) or 'no model'}.",
            expected=f"exactly one of {', '.join(_KINDS)}",
            fix=f"correct `{where}`",
        )
    kind = kinds[0]
    for field, kind_of_field in (("revision", ("hub",)), ("digest", ("folder", "stage"))):
        if values.get(field) is not None and kind not in kind_of_field:
            raise ConfigurationError(
                f"`{where}` has a {field}, and is a {kind}.",
                expected=f"`{field}` beside {' or '.join(kind_of_field)}",
                fix=f"drop `{field}`",
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
    values = _mapping(value, f"{where}.newest", "a mapping")
    _only(values, ("run", "recipe", "sweep", "arm"), f"{where}.newest")
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
    values = _mapping(value, "alerts", "a mapping")
    _only(values, ("metrics", "when", "smallest", "channels"), "alerts")
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
    values = _mapping(value, "alerts.channels", "an entry")
    _only(values, ("command", "url", "webhook", "prefect"), "alerts.channels")
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


def _mapping(value: Any, where: str, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"`{where}` is {value!r:.60}.",
            expected=f"{what} of `key: value`",
            fix=f"correct `{where}`",
        )
    return {str(k): v for k, v in value.items()}


def _only(values: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            raise ConfigurationError(
                f"There is no field {key!r} in {where}.{suggest(key, known)}",
                expected="one of: " + ", ".join(known),
                fix="correct the key",
            )


def _wrong(where: str, value: Any, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"`{where}` is {value!r:.80}.", expected=expected, fix=f"correct `{where}`"
    )
