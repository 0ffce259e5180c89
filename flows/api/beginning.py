"""The beginning: a folder with a recipe of one's own, and what a field of a recipe is.

In: answers, names of fields. Out: plans, facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flows.starting.fields import InRecipe
from refiner_core.contract.field_facts import (
    FieldFacts,
    facts_of,
    field_paths,
    fields_about,
    fields_called,
)
from refiner_core.contract.plan import Plan

if TYPE_CHECKING:
    from flows.starting.questions import Asked, Question


class Begun(NamedTuple):
    """A folder that was made: its plan, and its files by name."""

    folder: Path
    plan: Plan
    files: dict[str, str]


class ExplainedFields(NamedTuple):
    """Fields, and their values in a recipe where one was named."""

    fields: list[FieldFacts]
    in_recipe: InRecipe | None


def init_folder(
    folder: str | Path = ".",
    answers: Mapping[str, str] | None = None,
    *,
    ask: Callable[[Question, Asked], str] | None = None,
    take_defaults: bool = True,
) -> Begun:
    """Make a folder with a recipe of one's own, ready to plan. Nothing is overwritten.

    Parameters
    ----------
    folder
        Where; it may be there and empty.
    answers
        By the names of the questions, which are the long flags of `refiner init`.
    ask
        Asked for what no answer says, where defaults are not taken.
    take_defaults
        Take the default of whatever no answer says.

    Returns
    -------
    Begun
        What was made.

    Raises
    ------
    RefinerError
        An answer does not fit, something is there already, or the recipe could not be planned:
        nothing was made.
    """
    from flows.starting.drafting import drafted, file_texts
    from flows.starting.folder import all_answers, make_folder, refuse_what_is_there
    from flows.starting.questions import look_around

    place = Path(folder).expanduser().absolute().resolve()
    refuse_what_is_there(place)
    asked = all_answers(answers or {}, look_around(), place, ask, take_defaults=take_defaults)
    files = file_texts(drafted(asked), asked)
    return Begun(place, make_folder(place, files), files)


def explain_fields(
    field: str = "", recipe: str = "", overrides: Sequence[str] = (), *, search: str = ""
) -> ExplainedFields:
    """What configuration fields are, and where a recipe has their values from.

    Parameters
    ----------
    field
        A path such as ``grpo.beta``, a last part such as ``beta``, or a section such as ``grpo``
        (default: every field).
    recipe, overrides
        Whose values are wanted, too.
    search
        Instead of a field: those that speak of these words.

    Returns
    -------
    ExplainedFields
        Facts of each field; ``in_recipe.value(path)`` and ``in_recipe.source(path)``.

    Raises
    ------
    ConfigurationError
        There is no such field or recipe; names the nearest.
    """
    found = InRecipe.read(recipe, overrides) if recipe else None
    if search:
        paths = fields_about(search)
    else:
        paths = fields_called(field) if field else list(field_paths())
    return ExplainedFields([facts_of(path) for path in paths], found)
