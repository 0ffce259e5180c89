"""Templates of cards: the shipped one, and those of users.

In: the text of a Jinja template and its variables (named in the head of ``card.md.jinja``). Out:
the text of a card. A user's template is rendered in a sandbox: it sees the variables and nothing
else of this process, and cannot change them.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from refiner_core.contract.errors import ConfigurationError

_FIX = "correct the template (`refiner card template` prints the shipped one, to start from)"


def shipped_template() -> str:
    """The text of the template that cards are made from where no other is named."""
    return files("refiner_core.cards").joinpath("card.md.jinja").read_text(encoding="utf-8")


def check_template(text: str) -> None:
    """Find out before there is anything to publish whether a template can be read at all.

    Raises
    ------
    ConfigurationError
        It does not parse; names the line.
    """
    try:
        _compiled(text)
    except TemplateSyntaxError as e:
        raise ConfigurationError(
            f"The card template fails at line {_line(e)}: {e}.",
            expected="a template that Jinja can parse",
            fix=_FIX,
        ) from e


def render(template: str | None, variables: Mapping[str, Any]) -> str:
    """The card's text; ends with one line feed.

    Raises
    ------
    ConfigurationError
        A user's template does not parse, or asks for what is not there; names the line.
    """
    text = shipped_template() if template is None else template
    try:
        return _compiled(text).render(variables).rstrip() + "\n"
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as e:
        if template is None:
            raise
        raise ConfigurationError(
            f"The card template fails at line {_line(e)}: {e}.",
            expected=f"Jinja that uses these variables: {', '.join(sorted(variables))}",
            fix=_FIX,
        ) from e


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    return environment.from_string(text)


def _line(error: BaseException) -> int | str:
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    return frames[-1].lineno or "?" if frames else "?"
