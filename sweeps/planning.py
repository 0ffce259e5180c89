"""Plans a sweep: from its file to arms and trials, each with the plan of its run.

In: a :class:`~sweeps.values.SweepFile`, the recipe with the common overrides, and a source of
digests. Out: a :class:`~sweeps.values.SweepPlan`, or a refusal that names the error before anything
is launched. Pure, and linear in the number of trials: the caller merges the recipe once; arms share
equal sections of the configuration, and plans share equal stages, as the same objects.

Arms are grid x groups x named arms, without excluded ones. A name depends on the arm's own levels
and on the varied fields, never on other levels or the order of the file's keys: adding levels, arms
or seeds to a sweep keeps the existing names.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.fields import replace_fields, suggest
from refiner_core.contract.loading import override_text
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import ArmRecord
from sweeps.checks import check_fields, check_trials
from sweeps.definition import MOST, join, value_text
from sweeps.values import SweepFile, SweepPlan, Trial

#: Factor whose levels are the named arms, in `exclude`, `baseline` and an arm's levels.
ARM = "arm"
#: The only arm of a sweep that varies nothing but the seed.
ONLY = "recipe"


class _Level(NamedTuple):
    """One level of one dimension: its part of the name, labels and values by field."""

    part: str
    labels: Mapping[str, str]
    changes: Mapping[str, Any]


def make_arms(sweep: SweepFile) -> tuple[ArmRecord, ...]:
    """All arms, in the order of the levels in the file.

    Raises
    ------
    ConfigurationError
        There are none, or too many, or a rule of `exclude` names an unknown level.
    """
    dimensions = _dimensions(sweep)
    count = math.prod(len(levels) for levels in dimensions)
    if count * len(sweep.seeds) > MOST:
        sizes = " x ".join([*(str(len(v)) for v in dimensions), f"{len(sweep.seeds)} seeds"])
        raise ConfigurationError(
            f"Sweep {sweep.name} has {count * len(sweep.seeds):,} trials ({sizes}).",
            expected=f"at most {MOST:,}",
            fix="drop factors, levels or seeds, or let fields change together in `zip`",
        )
    arms = []
    for levels in itertools.product(*dimensions):
        labels = {field: label for level in levels for field, label in level.labels.items()}
        changes = {field: value for level in levels for field, value in level.changes.items()}
        arms.append(ArmRecord(join([level.part for level in levels]) or ONLY, labels, changes))
    excluded = {id(a) for rule in sweep.exclude for a in _matching(sweep, arms, rule, "exclude")}
    arms = [arm for arm in arms if id(arm) not in excluded]
    if not arms:
        raise ConfigurationError(
            f"`exclude` of sweep {sweep.name} leaves none of its {count} arms.",
            expected="rules that leave at least one",
            fix="remove a rule",
        )
    _unique(sweep, arms)
    return tuple(arms)


def find_baseline(sweep: SweepFile, arms: tuple[ArmRecord, ...]) -> str:
    """Name of the arm that the others are compared with.

    Raises
    ------
    ConfigurationError
        The file's baseline matches no arm, or more than one.
    """
    names, wanted = [arm.name for arm in arms], sweep.baseline
    if not wanted:
        return names[0]
    if isinstance(wanted, str):
        found, said, near = [n for n in names if n == wanted], repr(wanted), suggest(wanted, names)
    else:
        found = [a.name for a in _matching(sweep, arms, wanted, "baseline")]
        said, near = ", ".join(f"{f}: {t}" for f, t in wanted.items()), ""
    if len(found) != 1:
        met = f"{len(found)} arms are ({_some(found)})" if found else "no arm is"
        raise ConfigurationError(
            f"`baseline` of sweep {sweep.name} is {said}, which {met}.{near}",
            expected=f"one of: {_some(names)}",
            fix="name one of these, or {field: label} that only that arm has",
        )
    return found[0]


def _dimensions(sweep: SweepFile) -> list[list[_Level]]:
    """Dimensions to combine, independent of the order of the file's keys."""
    short = _short_names(sweep)
    dimensions = [[_Level(n, {ARM: n}, values) for n, values in sweep.arms.items()]]
    for field, levels in sorted(sweep.factors.items()):
        prefix = "" if field in sweep.labelled else f"{short[field]}="
        pairs = levels.items()
        dimensions.append([_Level(f"{prefix}{n}", {field: n}, {field: v}) for n, v in pairs])
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
        texts = {field: value_text(value) for field, value in changes.items()}
        part = "+".join(f"{short[field]}={text}" for field, text in texts.items())
        if labels:
            part, texts = labels[position], dict.fromkeys(group, labels[position])
        levels.append(_Level(part, texts, changes))
    return levels


def _short_names(sweep: SweepFile) -> dict[str, str]:
    """Field -> its last word, or its full path if another field ends in the same word."""
    fields = [*sweep.factors, *(field for group in sweep.zipped for field in group)]
    ends = Counter(field.rpartition(".")[2] for field in fields)
    return {f: end if ends[end := f.rpartition(".")[2]] == 1 else f for f in fields}


def _matching(
    sweep: SweepFile, arms: Sequence[ArmRecord], rule: Mapping[str, Any], key: str
) -> Sequence[ArmRecord]:
    """Arms that match a rule of values or labels."""
    found = arms
    for field, wanted in rule.items():
        known = {a.levels[field]: a.changes.get(field) for a in arms if field in a.levels}
        if not known:
            fields = dict.fromkeys(f for a in arms for f in a.levels)
            raise ConfigurationError(
                f"`{key}` of sweep {sweep.name} names `{field}`, which it does not vary."
                f"{suggest(field, fields)}",
                expected=f"some of: {', '.join(fields)}",
                fix="correct the field, or vary it",
            )
        text = value_text(wanted)
        hits = [label for label, value in known.items() if label == text or _same(value, wanted)]
        if not hits:
            raise ConfigurationError(
                f"`{key}` of sweep {sweep.name} names {wanted!r} for `{field}`, which is none of "
                f"its levels.{suggest(text, known)}",
                expected=f"one of: {_some([*known])}",
                fix="correct the level",
            )
        found = [a for a in found if a.levels.get(field) == hits[0]]
    return found


def _same(value: Any, wanted: Any) -> bool:
    """True if a typed value equals the file's (1 and 1.0, a list and a tuple)."""
    if isinstance(wanted, list):
        wanted = tuple(wanted)
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def _unique(sweep: SweepFile, arms: Iterable[ArmRecord]) -> None:
    counts = Counter(arm.name for arm in arms)
    folded = Counter(name.casefold() for name in counts)
    if twice := [n for n in counts if counts[n] > 1 or folded[n.casefold()] > 1]:
        raise ConfigurationError(
            f"Two arms of sweep {sweep.name} would have the same name: {_some(twice)}.",
            expected="names that differ in more than upper and lower case",
            fix="give levels labels of their own: {label: value}",
        )


def _some(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


#: Digest by source name, as taken by :func:`refiner_core.contract.plan.make_plan`.
Sources = Callable[[RecipeConfig], Mapping[str, str]]
#: Fields that depend on changed ones in the recipe (``${seed}``).
Follow = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def plan_sweep(
    sweep: SweepFile, base: RecipeConfig, sources: Sources, follow: Follow | None = None
) -> SweepPlan:
    """All trials of a sweep.

    Parameters
    ----------
    base
        The recipe with the sweep's ``overrides``, merged and checked for form.
    sources
        Called once for each arm, and once more for each seed if ``follow`` is given.
    follow
        For recipes with interpolations: further changes that follow from changed fields.

    Raises
    ------
    ConfigurationError, DataError
        The sweep cannot answer a question; names the field, arm or seed.
    """
    check_fields(sweep, base)
    arms = make_arms(sweep)
    baseline = find_baseline(sweep, arms)
    planner = _Planner(sweep, base, sources, follow)
    by_arm = {arm.name: [planner.plan(arm, seed) for seed in sweep.seeds] for arm in arms}
    trials = tuple(
        Trial(arm.name, seed, planner.texts(arm, seed), by_arm[arm.name][position])
        for position, seed in enumerate(sweep.seeds)
        for arm in arms
    )
    plan = SweepPlan(sweep, arms, baseline, trials)
    return replace(plan, warnings=check_trials(plan, by_arm))


class _Planner:
    """Makes plans that share equal parts."""

    def __init__(
        self, sweep: SweepFile, base: RecipeConfig, sources: Sources, follow: Follow | None
    ) -> None:
        self.sweep, self.base, self.follow = sweep, base, follow
        self.sources, self.memo = sources, dict[Hashable, PlannedStage]()
        self._sections: dict[tuple[Any, ...], Any] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self._arm: tuple[ArmRecord | None, RecipeConfig, Mapping[str, str]] = (None, base, {})

    def plan(self, arm: ArmRecord, seed: int) -> Plan:
        """The plan of one trial."""
        if self.follow is not None:
            config = self._config(arm, {**arm.changes, "seed": seed})
            return make_plan(config, self.sources(config), self.memo)
        if self._arm[0] is not arm:
            config = self._config(arm, arm.changes)
            self._arm = (arm, config, self.sources(config))
        _, config, sources = self._arm
        return make_plan(replace(config, seed=seed), sources, self.memo)

    def texts(self, arm: ArmRecord, seed: int) -> tuple[str, ...]:
        """Overrides after ``refiner run RECIPE`` that give the same run."""
        changed = [self._text(field, value) for field, value in arm.changes.items()]
        return (*self.sweep.overrides, *changed, f"seed={seed}")

    def _text(self, field: str, value: Any) -> str:
        key = (field, repr(value))
        if key not in self._texts:
            self._texts[key] = override_text(field, value)
        return self._texts[key]

    def _config(self, arm: ArmRecord, changes: Mapping[str, Any]) -> RecipeConfig:
        """An arm's configuration, checked; equal sections are one object."""
        if self.follow is not None:
            changes = {**self.follow(changes), **changes}
        groups: dict[str, dict[str, Any]] = {}
        for field, value in changes.items():
            groups.setdefault(field.partition(".")[0], {})[field] = value
        sections = {name: self._section(name, fields) for name, fields in groups.items()}
        try:
            return check_config(replace(self.base, **sections))
        except RefinerError as error:
            raise error.of(f"Arm {arm.name} of sweep {self.sweep.name}") from None

    def _section(self, name: str, fields: Mapping[str, Any]) -> Any:
        key = (name, *((field, repr(value)) for field, value in sorted(fields.items())))
        if key not in self._sections:
            self._sections[key] = getattr(replace_fields(self.base, fields), name)
        return self._sections[key]
