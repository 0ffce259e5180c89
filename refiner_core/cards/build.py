"""A card from facts.

In: :class:`CardFacts`. Out: the text of README.md: YAML front matter for the Hub, then the
sections of ``card.md.jinja`` or of a user's own template. The template only arranges texts of the
other modules. Settings (``beta = 0.001``) are not marked as numbers: they are in ``config`` of the
evidence, by name.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from refiner_core.cards.evidence import facts_from_json, facts_to_json
from refiner_core.cards.facts import UNKNOWN, CardFacts, is_hub_id, unmarked
from refiner_core.cards.results import (
    model_index,
    preferred_step,
    progression_tables,
    result_tables,
)
from refiner_core.cards.sentences import Sentences, grpo_flags, own_settings, training_curve
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import KINDS, card_words

_FIX = "correct the template (`refiner card template` prints the shipped one, to start from)"


def shipped_template() -> str:
    """The template (Jinja) of cards, to copy and change; a recipe sets another one
    by ``publish.card_template=FILE``.

    Raises
    ------
    OSError
        It cannot be read: the installation is damaged.
    """
    return files("refiner_core.cards").joinpath("card.md.jinja").read_text(encoding="utf-8")


def check_template(text: str) -> None:
    """Check, before there is anything to publish, whether a template parses.

    Raises
    ------
    ConfigurationError
        It does not parse; the message names the line.
    """
    try:
        _compiled(text)
    except TemplateSyntaxError as e:
        raise _unfit(e, "a template that Jinja can parse") from e


def render(template: str | None, variables: Mapping[str, Any]) -> str:
    """The card's text; ends with one line feed.

    Raises
    ------
    ConfigurationError
        A user's template does not parse, or uses unknown variables; the message names the line.
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
        names = ", ".join(sorted(variables))
        raise _unfit(e, f"Jinja that uses these variables: {names}") from e


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    return environment.from_string(text)


def _unfit(error: BaseException, expected: str) -> ConfigurationError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    line = frames[-1].lineno if frames else None
    if isinstance(error, TemplateSyntaxError):
        line = error.lineno
    return ConfigurationError(
        f"The card template fails at line {line or '?'}: {error}.", expected=expected, fix=_FIX
    )


_ANSWER_ONLY = "answer_only"
_EVIDENCE = """\
<query>When was the bridge opened?</query>
<tool_output>
<snippet id=S_a1B9xQ2>The bridge was opened in 1932.</snippet>
</tool_output>"""
_ANSWER = "<answer><snippet id=S_a1B9xQ2>The bridge has been open since 1932.</snippet></answer>"
_TURN = '<tool_call>{"name": "respond", "arguments": {"content": "May I have the id?"}}</tool_call>'


def output_format(facts: CardFacts) -> dict[str, Any]:
    """Output format of the model: modes of its training rows, and an example; for an agent, a
    turn."""
    modes = () if facts.is_agent else _modes(facts)
    alone = modes in ((), (_ANSWER_ONLY,))
    answer = _ANSWER if alone else f"The first snippet answers the question.\n{_ANSWER}"
    return {
        "modes": modes,
        "answer_only": alone and not facts.is_agent,
        "evidence": "" if facts.is_agent else _EVIDENCE,
        "answer": _TURN if facts.is_agent else answer,
    }


def _modes(facts: CardFacts) -> tuple[str, ...]:
    """Modes of the kept rows; empty if not counted."""
    if facts.config.data.refiner_mode is not None:
        return (facts.config.data.refiner_mode,)
    which = "rl" if facts.on_prompts else "sft"
    counts = facts.fact(f"reports.data.{which}.modes") or {}
    return tuple(sorted(mode for mode, count in counts.items() if count))


_BUILTIN = "builtin:"
_NOTHING = "Nothing was recorded of the code behind this checkpoint."


def build_card(facts: CardFacts) -> str:
    """The README.md of a published checkpoint; the same facts give the same bytes.

    Raises
    ------
    ConfigurationError
        The user's template is invalid; see :func:`refiner_core.cards.build.render`.
    """
    known = facts_to_json(facts)
    variables = card_variables(facts_from_json(known)) | {"facts": known}
    return render(facts.template, _plain(variables))


def marked_card(facts: CardFacts, template: str | None = None) -> str:
    """The card with its numbers marked (:func:`refiner_core.cards.facts.numbers_in`). Same errors
    as :func:`build_card`."""
    known = facts_to_json(facts)
    return render(template, card_variables(facts_from_json(known)) | {"facts": known})


def _plain(value: Any) -> Any:
    """Texts without marks, for templates that inspect them."""
    if isinstance(value, str):
        return unmarked(value)
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def card_variables(facts: CardFacts) -> dict[str, Any]:
    """Variables of a template; the head of ``card.md.jinja`` describes each of them."""
    grpo, words = facts.stage == "grpo", Sentences(facts)
    earlier, shape = words.earlier(), output_format(facts)
    return {
        "front_matter": yaml.safe_dump(
            front_matter(facts), sort_keys=False, allow_unicode=True, width=1000
        ),
        "name": facts.name,
        "repo_id": facts.repo_id,
        "short_name": card_words(facts.stage).short,
        "step": facts.step,
        "steps": facts.config.grpo.num_training_steps if grpo else None,
        "final": facts.final,
        "external": facts.stage == "command",
        "description": facts.description,
        "summary": words.text("summary"),
        "agent": facts.is_agent,
        "task": words.text("task"),
        "base_model": words.text("base_model"),
        "algorithm": card_words(facts.stage).algorithm,
        "setup": words.lines("setup"),
        "before": [line for stage in earlier for line in stage["lines"]],
        "earlier": earlier,
        "cost": words.lines("cost"),
        "format": shape,
        "usage": words.text("usage", shape),
        "tables": result_tables(facts, words.protocol),
        "progression": progression_tables(facts),
        "preferred": preferred_step(facts),
        "curve": training_curve(facts),
        "command": facts.command,
        "reproduction": words.lines("reproduction"),
        "flags": grpo_flags(facts) if grpo else [],
        "settings": own_settings(facts, _sections(facts)),
        "notes": words.lines("notes"),
        "provenance": words.lines("provenance") or [_NOTHING],
    }


def _sections(facts: CardFacts) -> tuple[str, ...]:
    """Sections of the configuration that shaped this model."""
    sections = card_words(facts.stage).sections
    if facts.is_agent:
        judged = facts.config.environment.nl_assertions == "judge"
        sections = tuple(s for s in sections if judged or s not in ("reward", "judge"))
        sections = (*sections, "environment", *(["grpo"] if facts.stage == "grpo" else []))
    if not facts.on_prompts:
        return sections
    made = [k.name for k in KINDS.values() if k.trains == "demonstrations" or k.name == "sample"]
    before = [s for s in made if s in facts.reports and s not in sections and facts.stage != s]
    return (*sections, *before)


def front_matter(facts: CardFacts) -> dict[str, Any]:
    """The card's metadata, in the usual order."""
    data = facts.config.data
    sets = card_words(facts.stage).data_sets
    used = [(getattr(data, f"{s}_path"), getattr(data, f"{s}_revision")) for s in sets]
    datasets = list(dict.fromkeys(path for path, rev in used if rev and is_hub_id(path)))
    subject = ["tool-use", "agents"] if facts.is_agent else ["citations"]
    tags = [*card_words(facts.stage).tags, "refiner", *subject]
    if "qwen3" in facts.base.lower():
        tags.append("qwen3")
    matter: dict[str, Any] = {
        "license": facts.license,
        "base_model": facts.base.replace(_BUILTIN, "builtin-"),
        "base_model_relation": "finetune",
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": tags,
    }
    if facts.base == UNKNOWN:
        del matter["base_model"], matter["base_model_relation"]
    if datasets:
        matter["datasets"] = datasets
    index = model_index(facts)
    if index:
        matter["model-index"] = index
    return matter
