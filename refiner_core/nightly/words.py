"""What an alert says. In: a change and its series. Out: a title and a few sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.nightly.changes import Change
from refiner_core.nightly.compare import Shift
from refiner_core.nightly.series import Series

#: So many names of what else has changed are said.
_MOST_FACTS = 8


def alert_of(nightly: str, series: Series, change: Change, beside: Sequence[str]) -> dict[str, Any]:
    """An alert as JSON: for people (``title``, ``text``) and for scripts.

    Parameters
    ----------
    beside
        Other checkpoints whose numbers were made under the same conditions, for drift.
    """
    key, shift = series.key, change.shift
    low, high = shift.interval
    return {
        "version": 1,
        "nightly": nightly,
        "series": key.text,
        "checkpoint": key.checkpoint,
        "metric": key.metric,
        "decoding": key.decoding,
        "protocol": key.protocol,
        "protocol_name": series.protocol_name,
        "kind": change.kind,
        "cause": change.cause,
        "direction": "rise" if change.direction > 0 else "drop",
        "night": change.night,
        "nights": list(change.nights),
        "since": change.since,
        "difference": shift.difference,
        "low": low,
        "high": high,
        "n": shift.n,
        "noise": shift.noise.spread,
        "canary": None if change.canary is None else change.canary.difference,
        "weights_changed": change.weights,
        "changed": {name: list(pair) for name, pair in change.facts.items()},
        "title": title_of(nightly, series, change),
        "text": " ".join(_sentences(series, change, beside)),
    }


def title_of(nightly: str, series: Series, change: Change) -> str:
    """One line."""
    key = series.key
    what = f"{key.metric} ({key.decoding})"
    if change.kind == "recovery":
        return f"{nightly}: {what} of {key.checkpoint} is back where it was, or past it"
    moved = "rose" if change.direction > 0 else "dropped"
    amount = f"{moved} by {abs(change.shift.difference):.4g}"
    if change.cause == "drift":
        return f"{nightly}: the judge or the machines have drifted: {what} of the canary {amount}"
    if change.cause == "unclear":
        return f"{nightly}: {what} of {key.checkpoint} {amount}; why is not clear"
    return f"{nightly}: {what} of {key.checkpoint} {amount}"


def _sentences(series: Series, change: Change, beside: Sequence[str]) -> list[str]:
    shift = change.shift
    found = [
        f"{_interval(shift)} against the night of {change.since}, on {shift.n} prompts, in "
        f"{len(change.nights)} of the last nights ({', '.join(change.nights)})."
    ]
    if change.cause == "drift":
        found.append("The weights of the canary are what they were: this is no change of a model.")
        if beside:
            found.append(
                f"Numbers that were made since do not compare with older ones: {', '.join(beside)}."
            )
    elif change.cause == "model":
        found.append("The canary has not moved: the model has changed.")
    elif change.canary is None:
        found.append(
            "The canary was not measured in one of these nights, so a change of the model cannot "
            "be told from one of the judge or the machines."
        )
    else:
        found.append(
            f"The canary moved by {change.canary.difference:+.4g} meanwhile, and what is left of "
            "the change is not clearly the model's."
        )
    if change.weights:
        before = {r.night: r.source for r in series.rows}
        old, new = before.get(change.since, ""), before.get(change.night, "")
        found.append(f"Weights: {old} before, {new} now." if old != new else "Other weights.")
    found.append(_facts(change.facts) or _nothing_recorded(change))
    return [s for s in found if s]


def _nothing_recorded(change: Change) -> str:
    if change.cause != "drift":
        return ""
    return (
        "Nothing else that is recorded has changed (judge, code, versions, host): the judge's "
        "server may serve something else under the same name."
    )


def _facts(facts: Mapping[str, tuple[str, str]]) -> str:
    if not facts:
        return ""
    said = [
        f"{name}: {old or '(none)'} -> {new or '(none)'}"
        for name, (old, new) in list(facts.items())[:_MOST_FACTS]
    ]
    more = len(facts) - len(said)
    return "Also changed: " + "; ".join(said) + (f"; and {more} more." if more else ".")


def _interval(shift: Shift) -> str:
    low, high = shift.interval
    return f"{shift.difference:+.4g} (95 %: {low:+.4g} to {high:+.4g})"
