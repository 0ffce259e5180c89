"""Explanations of fields for `refiner show`: text for people, JSON for scripts.

In: facts of a field, and from a recipe its value and where it was set. Out: lines, or mappings.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refiner_core.contract.field_facts import (
    FieldFacts,
    facts_of,
    field_paths,
    fields_about,
    fields_called,
)
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.loading import FieldSetting, load_recipe, settings
from refiner_core.contract.records import picked, to_json
from refiner_core.report.printing import folded

_LABEL = 10
#: Fields that people change, in the order of a listing; the others of a section follow.
OFTEN = (
    *("data.sft_path", "data.rl_path", "data.rl_revision", "data.max_prompt_token_length"),
    *("sft.learning_rate", "sft.num_train_epochs", "sft.max_train_steps", "sft.pack_length"),
    *("sft.save_freq", "sft.resources.gpus", "grpo.num_training_steps", "grpo.learning_rate"),
    *("grpo.beta", "grpo.num_unique_prompts_rollout", "grpo.num_samples_per_prompt_rollout"),
    *("grpo.temperature", "grpo.response_length", "grpo.max_token_length", "grpo.async_steps"),
    *("grpo.generation_backend", "grpo.deepspeed_stage", "grpo.save_freq", "grpo.resources.gpus"),
    *("reward.rubric_source", "reward.static_rubrics", "reward.paper_citation_weight"),
    *("judge.kind", "judge.model", "judge.base_url", "judge.max_tokens", "judge.concurrency"),
    *("evaluate.models", "evaluate.num_samples", "evaluate.max_prompts", "evaluate.protocols"),
    *("publish.target", "publish.repo_id", "publish.which", "dispatch.executor"),
    *("dispatch.profile", "dispatch.max_parallel", "disk.limit_gb"),
)
_OR_NULL = " or null"


@dataclass(frozen=True)
class RecipeValues:
    """Values of a recipe's fields, and where they were set."""

    recipe: str
    values: Any
    set_by: Mapping[str, list[FieldSetting]]

    @classmethod
    def read(cls, recipe: str, overrides: Sequence[str]) -> RecipeValues:
        """Read a recipe with overrides.

        Raises
        ------
        ConfigurationError
            The recipe cannot be read, or a value has the wrong type.
        """
        config = load_recipe(recipe, overrides)
        return cls(recipe, config, settings(recipe, overrides))

    def value(self, path: str) -> Any:
        """The value in effect."""
        return get_field(self.values, path)

    def source(self, path: str) -> str:
        """Where the value in effect was set, in words."""
        places = self.places(path)
        if places:
            return places[-1].place
        return "the recipe's file name" if path == "recipe" else "default"

    def places(self, path: str) -> list[FieldSetting]:
        """All settings of a field, the effective one last; also parts of a mapping or list."""
        return self.set_by.get(path, [])

    def kinds_of(self, facts: FieldFacts) -> list[str]:
        """Kinds of this recipe's stages with the field in their fingerprints."""
        return [kind for kind in facts.kinds if KINDS[kind].entry in self.values.stages]


def field_json(facts: FieldFacts, found: RecipeValues | None = None) -> dict[str, Any]:
    """A field for scripts."""
    value: dict[str, Any] = {
        "field": facts.path,
        **picked(facts, "type", "choices", "range", "mark", "default", "doc", "notes"),
        "stages": list(facts.kinds),
    }
    if not facts.always_there:
        value["legacy_value"] = to_json(facts.legacy)
    if found is not None:
        value["value"] = to_json(found.value(facts.path))
        value["source"] = found.source(facts.path)
        places = found.places(facts.path)
        value["set_by"] = [picked(one, "place", "text", "included_by") for one in places]
    return value


def field_lines(facts: FieldFacts, found: RecipeValues | None = None) -> list[str]:
    """Complete explanation of one field."""
    said = [("type", _type(facts)), *([("range", facts.range)] if facts.range else [])]
    said += [("default", value_text(facts.default))]
    said += [("mark", f"{facts.mark}: {_meaning(facts, found)}")]
    said += [("", note) for note in facts.notes]
    if not facts.always_there:
        before = f"runs from before it existed had {value_text(facts.legacy)}; with that value "
        said += [("before", f"{before}their fingerprints hold")]
    lines = [facts.path, folded(facts.doc, "  "), ""]
    lines += [folded(text, f"  {label:<{_LABEL}}") for label, text in said]
    if found is not None:
        lines += ["", *(folded(t, f"  {label:<{_LABEL}}") for label, t in _in_recipe(facts, found))]
    return "\n".join(lines).split("\n")


def _in_recipe(facts: FieldFacts, found: RecipeValues) -> list[tuple[str, str]]:
    value, places = found.value(facts.path), found.places(facts.path)
    said = [("value", f"{value_text(value)} in {found.recipe}")]
    if not places:
        said += [("source", found.source(facts.path))]
    for number, place in enumerate(reversed(places)):
        by = f", included by {' → '.join(place.included_by)}" * bool(place.included_by)
        follows = " (takes its value from other fields)" * place.interpolated
        text = textwrap.shorten(place.text, 70, placeholder=" …")
        before = "instead of " * (number > 0)
        line = f"{before}{place.place}: {text}{follows}{by}"
        said += [("" if number else "source", line)]
    if places and value != facts.default:
        said += [("", f"instead of the default, {value_text(facts.default)}")]
    return said


def _type(facts: FieldFacts) -> str:
    if not facts.choices or facts.choices == (True, False):
        return facts.type
    choices = ", ".join(map(str, facts.choices))
    return (
        f"{facts.type.removesuffix(_OR_NULL)}: {choices}{_OR_NULL * facts.type.endswith(_OR_NULL)}"
    )


def _meaning(facts: FieldFacts, found: RecipeValues | None) -> str:
    if facts.mark == "execution":
        return "where or how it runs; another value runs no finished stage again"
    if not facts.kinds:
        return "it enters no fingerprint; another value runs no finished stage again"
    kinds = facts.kinds if found is None else found.kinds_of(facts)
    if not kinds:
        return f"of {_listed(facts.kinds)} only, which are not stages of this recipe"
    return (
        f"with another value {_listed(kinds)} would run again, and what is made from "
        f"{'its' if len(kinds) == 1 else 'their'} outputs"
    )


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def field_rows(fields: Sequence[FieldFacts], found: RecipeValues | None) -> list[tuple[str, ...]]:
    """A line for each field: name, mark, default or value (and its source), explanation."""
    rows: list[tuple[str, ...]] = []
    for facts in fields:
        text = value_text(facts.default if found is None else found.value(facts.path))
        short = text if len(text) <= 24 else f"{text[:23]}…"
        source = () if found is None else (found.source(facts.path),)
        rows.append((facts.path, facts.mark, short, *source, facts.doc))
    return rows


def value_text(value: Any) -> str:
    """A value as written in a recipe."""
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(value_text, value)) + "]"
    if isinstance(value, str):
        return value if value and value.isprintable() else json.dumps(value)
    return json.dumps(value)


class ExplainedFields(NamedTuple):
    """Fields, and their values in a recipe if one was given."""

    fields: list[FieldFacts]
    in_recipe: RecipeValues | None


def explain_fields(
    field: str = "", recipe: str = "", overrides: Sequence[str] = (), *, search: str = ""
) -> ExplainedFields:
    """Explain configuration fields, and the origin of their values in a recipe.

    Parameters
    ----------
    field
        A path such as ``grpo.beta``, a last part such as ``beta``, or a section such as ``grpo``
        (default: every field).
    recipe, overrides
        Also explain the values of this recipe.
    search
        Instead of a field: search the fields for these words.

    Returns
    -------
    ExplainedFields
        Facts of each field; ``in_recipe.value(path)`` and ``in_recipe.source(path)``.

    Raises
    ------
    ConfigurationError
        There is no such field or recipe; the message names the nearest.
    """
    found = RecipeValues.read(recipe, overrides) if recipe else None
    if search:
        paths = fields_about(search)
    else:
        paths = fields_called(field) if field else list(field_paths())
    if field:
        paths = sorted(paths, key=lambda path: OFTEN.index(path) if path in OFTEN else len(OFTEN))
    return ExplainedFields([facts_of(path) for path in paths], found)
