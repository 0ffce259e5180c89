"""A sweep planned with what lies on this machine: its recipe, its rows, its weights.

In: a sweep's name or file, and overrides for every trial. Out: a :class:`~sweeps.values.SweepPlan`.
Reads files, writes nothing, needs neither network nor torch. The recipe is merged once, and what
several trials are made from is hashed once.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flows.checking.model_checks import asked_of_model, check_model_files
from flows.checking.sources import each_read_once, resolve_sources
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.interpolations import what_follows
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.overrides import whole_paths
from sweeps.checks import varied_fields
from sweeps.definition import load_sweep
from sweeps.planning import plan_sweep
from sweeps.reading import KEYS
from sweeps.values import SweepFile, SweepPlan


def make_sweep_plan(name_or_path: str, overrides: Sequence[str] = ()) -> SweepPlan:
    """All trials of a sweep (a shipped name, or a YAML file).

    Parameters
    ----------
    name_or_path
        As above.
    overrides
        ``key=value`` for every trial, after those of the file: ``workspace=…``, ``dispatch.…``.

    Returns
    -------
    SweepPlan
        Arms and trials, each with its plan.

    Raises
    ------
    ConfigurationError, DataError
        The sweep or its recipe cannot be carried out as it stands.
    """
    return plan_of(load_sweep(name_or_path), overrides)


def plan_of(sweep: SweepFile, overrides: Sequence[str] = ()) -> SweepPlan:
    """Like :func:`make_sweep_plan`, of a sweep that was read already."""
    _refuse_keys_of_the_file(sweep, overrides)
    texts = tuple(whole_paths(text, Path.cwd()) for text in overrides)
    sweep = replace(sweep, overrides=_last_of_each((*sweep.overrides, *texts)))
    with each_read_once(), _all_stays():
        try:
            base = check_config(load_recipe(sweep.recipe, sweep.overrides))
        except ConfigurationError as error:
            error.what = f"The recipe of sweep {sweep.name}: {error.what}"
            error.args = (error.paragraph(),)
            raise
        follow = what_follows(sweep.recipe, sweep.overrides, [*varied_fields(sweep), "seed"])
        plan = plan_sweep(sweep, base, _remembered(resolve_sources), follow)
        for config in {asked_of_model(t.plan.config): t.plan.config for t in plan.trials}.values():
            check_model_files(config)
        return plan


def _refuse_keys_of_the_file(sweep: SweepFile, overrides: Sequence[str]) -> None:
    """What a sweep is stands in its file, and in no overrides: those are of the recipe."""
    for text in overrides:
        key = text.partition("=")[0].partition(".")[0].strip()
        if key in KEYS and not hasattr(RecipeConfig, key):
            raise ConfigurationError(
                f"`{key}` is a key of the sweep's file, not a field of its recipe: {text}.",
                expected="overrides of recipe fields, for every trial",
                fix=f"write `{key}` into {sweep.origin or 'the file'}"
                + (" (a copy, where it is a shipped one)" if sweep.origin else ""),
            )


@contextlib.contextmanager
def _all_stays() -> Iterator[None]:
    """Look for no garbage meanwhile: nearly all that is made stays, and to look through it again
    and again takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _last_of_each(overrides: Sequence[str]) -> tuple[str, ...]:
    """Of overrides of one field the last, which is the one that counts."""
    return tuple({text.partition("=")[0]: text for text in overrides}.values())


def _remembered(
    resolve: Callable[[RecipeConfig], Mapping[str, str]],
) -> Callable[[RecipeConfig], Mapping[str, str]]:
    """``resolve``, asked once for all configurations that are alike in what it reads."""
    known: dict[object, Mapping[str, str]] = {}

    def sources(config: RecipeConfig) -> Mapping[str, str]:
        # All but how a model is trained, which says nothing about what it is made from.
        read = (config.model, config.data, config.reward, config.judge)
        key = (*read, config.publish, config.evaluate)
        if key not in known:
            known[key] = resolve(config)
        return known[key]

    return sources
