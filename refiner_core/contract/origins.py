"""Where the values of a recipe's fields come from: default, file and line, override.

In: a recipe with overrides, as a call would give them. Out: for a field, every place that sets it,
in the order in which they count: the last one wins, and what none sets has its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refiner_core.contract.loading import leaves, parse_override
from refiner_core.contract.recipes.recipe_files import find_recipe, recipe_files, shipped_recipes


@dataclass(frozen=True)
class Setting:
    """One place that sets a field.

    Attributes
    ----------
    place
        ``tiny.yaml:17`` of a shipped recipe, the path and line of any other file, or ``override``.
    text
        The value as it is written there, interpolations included.
    included_by
        The files between the recipe that was named and this one, outermost first.
    """

    place: str
    text: str
    included_by: tuple[str, ...] = ()

    @property
    def interpolated(self) -> bool:
        """Whether it takes its value from other fields."""
        return "${" in self.text.replace("\\${", "")


@dataclass(frozen=True)
class _Found:
    line: int
    text: str


def settings(recipe: str, overrides: Sequence[str]) -> dict[str, list[Setting]]:
    """Every place that sets a field, by dotted path.

    Raises
    ------
    ConfigurationError
        A file or an override cannot be read.
    """
    found: dict[str, list[Setting]] = {}
    home = {path.parent.resolve() for path in shipped_recipes().values()}
    for path, chain, _ in recipe_files(find_recipe(recipe)):
        name = path.name if path.parent in home else str(path)
        by = tuple(p.name for p in chain)
        for field, one in _file_fields(path).items():
            found.setdefault(field, []).append(Setting(f"{name}:{one.line}", one.text, by))
    for text in overrides:
        for field in _override_fields(text):
            value = text.partition("=")[2]
            found.setdefault(field, []).append(Setting("override", value))
    return found


def _override_fields(text: str) -> Iterator[str]:
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(parse_override(text), resolve=False)
    yield from (path for path, _ in leaves("", values))


def _file_fields(path: Path) -> Mapping[str, _Found]:
    """Fields that a file sets itself, with their lines."""
    import yaml

    text = path.read_text(encoding="utf-8")
    return dict(_scalars(yaml.compose(text, yaml.SafeLoader), "", text))


def _scalars(node: Any, prefix: str, text: str) -> Iterator[tuple[str, _Found]]:
    """What lies below a mapping node; what it takes over with ``<<`` comes first."""
    import yaml

    for key, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
        if key.value == "<<":
            for taken in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _scalars(taken, prefix, text)
        elif isinstance(value, yaml.MappingNode):
            yield from _scalars(value, f"{prefix}{key.value}.", text)
            # a mapping of a field that is JSON text is the field itself, too
            yield f"{prefix}{key.value}", _found(key, value, text)
        else:
            yield f"{prefix}{key.value}", _found(key, value, text)


def _found(key: Any, value: Any, text: str) -> _Found:
    written = text[value.start_mark.index : value.end_mark.index]
    return _Found(key.start_mark.line + 1, " ".join(written.split()))
