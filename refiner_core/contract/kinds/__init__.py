"""Kinds of stages.

In: the modules of this package; ``KINDS`` of each has some
:class:`~refiner_core.contract.kinds.kind.Kind`.
Out: :data:`KINDS`, by name, in the order of work. All code queries a kind's attributes, and has no
lists of kinds. A new kind is a module here (or a value in one), its section in
:class:`~refiner_core.contract.config.RecipeConfig`, and its function in ``flows/stages``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection

from refiner_core.contract.kinds.kind import CardWords as CardWords
from refiner_core.contract.kinds.kind import Kind as Kind


def _found() -> dict[str, Kind]:
    modules = (
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    )
    kinds = [kind for module in modules for kind in getattr(module, "KINDS", ())]
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.order)}


KINDS: dict[str, Kind] = _found()
#: Kinds that make a model, which has their name.
TRAINED = tuple(k.name for k in KINDS.values() if k.trains)
#: Those of them that train in refiner itself.
TRAINED_HERE = tuple(k.name for k in KINDS.values() if k.trains in ("demonstrations", "rewards"))
#: Models that a run may measure, in the order of training.
MODELS = ("base", *TRAINED)
#: Baselines of every evaluation (of an agent the second one). They have a file of their own.
BASELINES = ("random_copier", "do_nothing")


def model_order(model: str) -> tuple[int, int, str]:
    """Sort key of a model: in the order of training, steps before the last checkpoint."""
    family, _, step = model.partition("-step")
    order = ("base", *BASELINES, *TRAINED)
    place = order.index(family) if family in order else len(order)
    return place, int(step) if step.isdigit() else 1 << 62, model


def card_words(name: str) -> CardWords:
    """Card wording for a model of this kind; derived from the name if the kind has none."""
    own = KINDS[name].card if name in KINDS else None
    if own is not None:
        return own
    return CardWords(name, name.upper(), (name,), sections=("model", name, "data", "seed"))


def section_name(kind: str) -> str:
    """Section of a recipe with a kind's resources; the kind may be unknown."""
    return KINDS[kind].section if kind in KINDS else kind


def kinds_of(stages: Collection[str]) -> list[Kind]:
    """Kinds implied by entries of a recipe's ``stages``, in order."""
    return [kind for kind in KINDS.values() if kind.entry in stages]
