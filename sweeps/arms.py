"""From factors to arms: grid x groups x named arms, without what is excluded.

In: a :class:`~sweeps.values.SweepFile`. Out: its arms, each with a name for people, and the name of
the baseline. A name depends on the arm's own levels and on which fields the sweep varies, never on
which other levels there are or in which order the file has its keys: a sweep to which levels, arms
or seeds are added calls what it had as before.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from sweeps.definition import MOST, join, value_text
from sweeps.values import Arm, SweepFile

#: The factor that named arms are levels of, in `exclude`, `baseline` and an arm's levels.
ARM = "arm"
#: The one arm of a sweep that varies nothing but the seed.
ONLY = "recipe"


class _Level(NamedTuple):
    """One place of one dimension: its part of the name, labels and values by field."""

    part: str
    labels: Mapping[str, str]
    changes: Mapping[str, Any]


def make_arms(sweep: SweepFile) -> tuple[Arm, ...]:
    """All arms, in the order of the levels in the file.

    Raises
    ------
    ConfigurationError
        There are none, or far too many, or a rule of `exclude` names a level that is none.
    """
    dimensions = _dimensions(sweep)
    count = math.prod(len(levels) for levels in dimensions)
    if count * len(sweep.seeds) > MOST:
        sizes = " x ".join([*(str(len(v)) for v in dimensions), f"{len(sweep.seeds)} seeds"])
        raise ConfigurationError(
            f"Sweep {sweep.name} stands for {count * len(sweep.seeds):,} trials ({sizes}).",
            expected=f"at most {MOST:,}",
            fix="drop factors, levels or seeds, or let fields change together in `zip`",
        )
    rules = [_rule(sweep, dimensions, rule, "exclude") for rule in sweep.exclude]
    arms = []
    for levels in itertools.product(*dimensions):
        labels = {field: label for level in levels for field, label in level.labels.items()}
        if any(all(labels.get(f) == text for f, text in rule.items()) for rule in rules):
            continue
        changes = {field: value for level in levels for field, value in level.changes.items()}
        arms.append(Arm(join([level.part for level in levels]) or ONLY, labels, changes))
    if not arms:
        raise ConfigurationError(
            f"`exclude` of sweep {sweep.name} leaves none of its {count} arms.",
            expected="rules that leave at least one",
            fix="remove a rule",
        )
    _unique(sweep, arms)
    return tuple(arms)


def find_baseline(sweep: SweepFile, arms: tuple[Arm, ...]) -> str:
    """Name of the arm that the others are held against.

    Raises
    ------
    ConfigurationError
        No arm, or more than one, is the one that the file names.
    """
    names = [arm.name for arm in arms]
    if not sweep.baseline:
        return names[0]
    if isinstance(sweep.baseline, str):
        if sweep.baseline in names:
            return sweep.baseline
        raise ConfigurationError(
            f"Sweep {sweep.name} has no arm {sweep.baseline!r} for its baseline."
            f"{suggest(sweep.baseline, names)}",
            expected=f"one of: {_some(names)}",
            fix="name one of these, or {field: label} that only that arm has",
        )
    rule = _rule(sweep, _dimensions(sweep), sweep.baseline, "baseline")
    found = [a.name for a in arms if all(a.levels.get(f) == t for f, t in rule.items())]
    if len(found) != 1:
        said = ", ".join(f"{f}: {t}" for f, t in rule.items())
        many = f"is met by {len(found)} arms ({_some(found)})" if found else "is met by no arm"
        raise ConfigurationError(
            f"`baseline` of sweep {sweep.name}, {said}, {many}.",
            expected="levels that exactly one arm has",
            fix="name a level of each factor, or the arm's name",
        )
    return found[0]


def _dimensions(sweep: SweepFile) -> list[list[_Level]]:
    """What is combined with what, in an order that the order of keys has no part in."""
    short = _short_names(sweep)
    dimensions = [[_Level(n, {ARM: n}, values) for n, values in sweep.arms.items()]]
    for field, levels in sorted(sweep.factors.items()):
        named = field in sweep.labelled
        dimensions.append(
            [
                _Level(
                    label if named else f"{short[field]}={label}", {field: label}, {field: value}
                )
                for label, value in levels.items()
            ]
        )
    groups = zip(sweep.zipped, sweep.zip_labels or itertools.repeat(()), strict=False)
    for group, labels in sorted(groups, key=lambda g: sorted(g[0])):
        dimensions.append(_group(dict(sorted(group.items())), labels, short))
    return [levels for levels in dimensions if levels]


def _group(
    group: Mapping[str, tuple[Any, ...]], labels: tuple[str, ...], short: Mapping[str, str]
) -> list[_Level]:
    levels = []
    for position, values in enumerate(zip(*group.values(), strict=True)):
        changes = dict(zip(group, values, strict=True))
        if labels:
            label = labels[position]
            levels.append(_Level(label, dict.fromkeys(group, label), changes))
        else:
            texts = {field: value_text(value) for field, value in changes.items()}
            part = "+".join(f"{short[field]}={text}" for field, text in texts.items())
            levels.append(_Level(part, texts, changes))
    return levels


def _short_names(sweep: SweepFile) -> dict[str, str]:
    """Field -> its last word, or all of them where another field ends in the same."""
    fields = [*sweep.factors, *(field for group in sweep.zipped for field in group)]
    ends = Counter(field.rpartition(".")[2] for field in fields)
    return {f: end if ends[end := f.rpartition(".")[2]] == 1 else f for f in fields}


def _rule(
    sweep: SweepFile, dimensions: list[list[_Level]], rule: Mapping[str, Any], key: str
) -> dict[str, str]:
    """A rule of values or labels as one of labels."""
    known: dict[str, list[tuple[str, Any]]] = {}
    for levels in dimensions:
        for level in levels:
            for field, label in level.labels.items():
                value = level.changes.get(field, label)
                known.setdefault(field, []).append((label, value))
    found = {}
    for field, wanted in rule.items():
        if field not in known:
            raise ConfigurationError(
                f"`{key}` of sweep {sweep.name} names `{field}`, which it does not vary."
                f"{suggest(field, known)}",
                expected=f"some of: {', '.join(known)}",
                fix="correct the field, or vary it",
            )
        text = value_text(wanted)
        hits = [label for label, value in known[field] if label == text or _same(value, wanted)]
        if not hits:
            labels = list(dict.fromkeys(label for label, _ in known[field]))
            raise ConfigurationError(
                f"`{key}` of sweep {sweep.name} names {wanted!r} for `{field}`, which is none of "
                f"its levels.{suggest(text, labels)}",
                expected=f"one of: {_some(labels)}",
                fix="correct the level",
            )
        found[field] = hits[0]
    return found


def _same(value: Any, wanted: Any) -> bool:
    """Whether a typed value is the one that a file means (1 for 1.0, a list for a tuple)."""
    if isinstance(wanted, list):
        wanted = tuple(wanted)
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def _unique(sweep: SweepFile, arms: Iterable[Arm]) -> None:
    counts = Counter(arm.name for arm in arms)
    folded = Counter(name.casefold() for name in counts)
    if twice := [n for n in counts if counts[n] > 1 or folded[n.casefold()] > 1]:
        raise ConfigurationError(
            f"Two arms of sweep {sweep.name} would be called alike: {_some(twice)}.",
            expected="names that differ in more than upper and lower case",
            fix="give levels labels of their own: {label: value}",
        )


def _some(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
