"""From a sweep's file to all of its trials, each with the plan of its run.

In: a :class:`~sweeps.values.SweepFile`, the recipe with what holds for every trial, and who knows
the digests of sources. Out: a :class:`~sweeps.values.SweepPlan`, or a refusal that names what is
wrong before anything is launched. Pure, and linear in the number of trials: the recipe is merged
once by the caller, sections of the configuration that arms share are the same objects, and so are
the stages that plans share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import override_text
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import PlanMemo
from sweeps.arms import find_baseline, make_arms
from sweeps.checks import check_fields, check_trials
from sweeps.values import Arm, SweepFile, SweepPlan, Trial

#: Digest by source name, as :func:`refiner_core.contract.plan.make_plan` takes them.
Sources = Callable[[RecipeConfig], Mapping[str, str]]
#: Fields that follow from changed ones, because the recipe says so (``${seed}``).
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
        Asked once for each arm, and once more for each seed where ``follow`` is given.
    follow
        Where the recipe has interpolations: what else changes when fields do.

    Raises
    ------
    ConfigurationError, DataError
        The sweep cannot answer anything as it stands; names the field, arm or seed.
    """
    check_fields(sweep, base)
    arms = make_arms(sweep)
    baseline = find_baseline(sweep, arms)
    planner = Planner(sweep, base, sources, follow)
    by_arm = {arm.name: [planner.plan(arm, seed) for seed in sweep.seeds] for arm in arms}
    trials = tuple(
        Trial(arm.name, seed, planner.texts(arm, seed), by_arm[arm.name][position])
        for position, seed in enumerate(sweep.seeds)
        for arm in arms
    )
    plan = SweepPlan(sweep, arms, baseline, trials)
    return replace(plan, warnings=check_trials(plan, by_arm, planner.plan_as))


class Planner:
    """Makes plans that share what they have in common."""

    def __init__(
        self, sweep: SweepFile, base: RecipeConfig, sources: Sources, follow: Follow | None
    ) -> None:
        self.sweep, self.base, self.follow = sweep, base, follow
        self.sources, self.memo = sources, PlanMemo()
        self._sections: dict[tuple[Any, ...], Any] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self._arm: tuple[Arm | None, RecipeConfig, Mapping[str, str]] = (None, base, {})

    def plan(self, arm: Arm, seed: int) -> Plan:
        """The plan of one trial."""
        if self.follow is not None:
            config = self._config(arm, {**arm.changes, "seed": seed})
            return make_plan(config, self.sources(config), self.memo)
        if self._arm[0] is not arm:
            config = self._config(arm, arm.changes)
            self._arm = (arm, config, self.sources(config))
        _, config, sources = self._arm
        return make_plan(replace(config, seed=seed), sources, self.memo)

    def plan_as(self, config: RecipeConfig) -> Plan:
        """The plan of a configuration that is no trial's, to compare with."""
        return make_plan(config, self.sources(config), self.memo)

    def texts(self, arm: Arm, seed: int) -> tuple[str, ...]:
        """What one types behind ``refiner run RECIPE`` to get the same run."""
        changed = [self._text(field, value) for field, value in arm.changes.items()]
        return (*self.sweep.overrides, *changed, f"seed={seed}")

    def _text(self, field: str, value: Any) -> str:
        key = (field, repr(value))
        if key not in self._texts:
            self._texts[key] = override_text(field, value)
        return self._texts[key]

    def _config(self, arm: Arm, changes: Mapping[str, Any]) -> RecipeConfig:
        """The recipe as an arm has it, checked; equal sections are one object."""
        if self.follow is not None:
            changes = {**self.follow(changes), **changes}
        groups: dict[str, dict[str, Any]] = {}
        for field, value in changes.items():
            groups.setdefault(field.partition(".")[0], {})[field] = value
        sections = {name: self._section(name, fields) for name, fields in groups.items()}
        try:
            return check_config(replace(self.base, **sections))
        except RefinerError as error:
            error.what = f"Arm {arm.name} of sweep {self.sweep.name}: {error.what}"
            error.args = (error.paragraph(),)
            raise

    def _section(self, name: str, fields: Mapping[str, Any]) -> Any:
        key = (name, *((field, repr(value)) for field, value in sorted(fields.items())))
        if key not in self._sections:
            self._sections[key] = getattr(replace_fields(self.base, fields), name)
        return self._sections[key]
