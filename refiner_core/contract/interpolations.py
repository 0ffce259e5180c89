"""What else changes in a recipe when fields do, because it says so: ``repo_id: me/run-${seed}``.

In: a recipe with overrides, and the fields that will be changed, thousands of times. Out: a
function from changes to what follows from them; none where nothing does, as in most recipes, so
that the recipe need be merged only once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from refiner_core.contract.fields import field_value
from refiner_core.contract.loading import leaves, merged
from refiner_core.contract.recipes.recipe_files import find_recipe

Follow = Callable[[Mapping[str, Any]], dict[str, Any]]
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_WORD = re.compile(r"\w+")


def what_follows(recipe: str, overrides: Sequence[str], changed: Iterable[str]) -> Follow | None:
    """The fields that take their values from others, as they are after changes.

    Parameters
    ----------
    changed
        Dotted fields that are going to be changed. None is returned where no interpolation can
        depend on one of them.
    """
    from omegaconf import OmegaConf

    node = merged(find_recipe(recipe), overrides)
    texts = {
        path: str(value)
        for path, value in leaves("", OmegaConf.to_container(node, resolve=False))
        if _INTERPOLATION.search(str(value))
    }
    words = {word for text in texts.values() for word in _WORD.findall(text)}
    if not any(words.intersection(path.split(".")) for path in changed):
        return None

    def follow(changes: Mapping[str, Any]) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for path, value in changes.items():
            *sections, leaf = path.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[leaf] = _escaped(value)
        now = OmegaConf.merge(node, nested)
        return {
            path: field_value(path, _plain(OmegaConf.select(now, path)))
            for path in texts
            if path not in changes
        }

    return follow


def _escaped(value: Any) -> Any:
    """A value that OmegaConf takes for no interpolation."""
    if isinstance(value, tuple | list):
        return [_escaped(v) for v in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
