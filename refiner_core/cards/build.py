"""A card from facts.

In: :class:`CardFacts`. Out: the text of README.md: YAML front matter as the Hub reads it, then the
sections of ``card.md.jinja`` or of a user's own template. The template only places what the other
modules have put into words.
"""

from __future__ import annotations

from typing import Any

import yaml

from refiner_core.cards.agents import TASK, is_agent
from refiner_core.cards.cost import cost_lines
from refiner_core.cards.curve import training_curve
from refiner_core.cards.evidence import facts_from_json, facts_to_json
from refiner_core.cards.facts import UNKNOWN, CardFacts, is_hub_id
from refiner_core.cards.notes import known_notes
from refiner_core.cards.reproduction import reproduction_lines
from refiner_core.cards.results import (
    model_index,
    preferred_step,
    progression_tables,
    result_tables,
)
from refiner_core.cards.settings import grpo_flags, own_settings
from refiner_core.cards.setup import before_lines, earlier_stages, setup_lines
from refiner_core.cards.template import render
from refiner_core.cards.usage import output_format, usage_code
from refiner_core.contract.kinds import KINDS, TRAINED, card_words
from refiner_core.contract.planned import stage_changes

_BUILTIN = "builtin:"
_REFINING = (
    "given an agent's reasoning, a question and raw search-tool output, write a concise answer "
    "whose claims cite that output"
)


def build_card(facts: CardFacts) -> str:
    """The README.md of a published checkpoint; the same facts give the same bytes.

    Raises
    ------
    ConfigurationError
        The user's template does not fit; see :func:`refiner_core.cards.template.render`.
    """
    known = facts_to_json(facts)
    return render(facts.template, card_variables(facts_from_json(known)) | {"facts": known})


def card_variables(facts: CardFacts) -> dict[str, Any]:
    """What a template may use; the head of ``card.md.jinja`` says what each of them is."""
    grpo = facts.stage == "grpo"
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
        "summary": _summary(facts),
        "agent": is_agent(facts),
        "task": TASK if is_agent(facts) else _REFINING,
        "base_model": _base_in_words(facts),
        "algorithm": card_words(facts.stage).algorithm,
        "setup": setup_lines(facts),
        "before": before_lines(facts),
        "earlier": earlier_stages(facts),
        "cost": cost_lines(facts),
        "format": output_format(facts),
        "usage": usage_code(facts),
        "tables": result_tables(facts),
        "progression": progression_tables(facts),
        "preferred": preferred_step(facts),
        "curve": training_curve(facts),
        "command": facts.command,
        "reproduction": reproduction_lines(facts),
        "flags": grpo_flags(facts) if grpo else [],
        "settings": own_settings(facts, _sections(facts)),
        "notes": known_notes(facts),
        "provenance": _provenance(facts),
    }


def _sections(facts: CardFacts) -> tuple[str, ...]:
    """Sections of the configuration that shaped this model."""
    sections = card_words(facts.stage).sections
    if is_agent(facts):
        judged = facts.config.environment.nl_assertions == "judge"
        sections = tuple(s for s in sections if judged or s not in ("reward", "judge"))
        sections = (*sections, "environment", *(["grpo"] if facts.stage == "grpo" else []))
    if not KINDS[facts.stage].on_prompts:
        return sections
    made = [k.name for k in KINDS.values() if k.trains == "demonstrations" or k.name == "sample"]
    before = [s for s in made if s in facts.reports and s not in sections and facts.stage != s]
    return (*sections, *before)


def _summary(facts: CardFacts) -> str:
    """One paragraph that says what this is, made from the facts."""
    if facts.stage == "command":
        return (
            f"`{facts.name}` is step {facts.step} of a model that another trainer made; refiner "
            "published it as it is."
        )
    base = f"`{facts.base}`" if facts.base != UNKNOWN else "a model that is not recorded"
    how = _how(facts)
    text = f"`{facts.name}` is {base} {how}"
    return f"{text}; this is {'the last' if facts.final else 'an intermediate'} checkpoint."


def _how(facts: CardFacts) -> str:
    """By what stages the model was made, in words."""
    agent = is_agent(facts)
    cards = {name: card_words(name) for name in TRAINED}
    words = {n: c.made_by_agents if agent else c.made for n, c in cards.items() if c.made}
    if facts.stage not in words:
        return f"trained by the stage `{facts.stage}`"
    made = [stage for stage in words if stage in facts.reports or stage == facts.stage]
    made = made[: made.index(facts.stage) + 1]
    return ", then ".join(words[stage] for stage in made)


def front_matter(facts: CardFacts) -> dict[str, Any]:
    """The card's metadata, in the order in which cards have it."""
    data = facts.config.data
    sets = card_words(facts.stage).data_sets
    used = [(getattr(data, f"{s}_path"), getattr(data, f"{s}_revision")) for s in sets]
    datasets = list(dict.fromkeys(path for path, rev in used if rev and is_hub_id(path)))
    subject = ["tool-use", "agents"] if is_agent(facts) else ["citations"]
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


def _base_in_words(facts: CardFacts) -> str:
    if facts.base == UNKNOWN:
        return "not recorded: another trainer chose it"
    if facts.base.startswith(_BUILTIN):
        return f"`{facts.base}`, a tiny model that is shipped with refiner (for trying things out)"
    if is_hub_id(facts.base):
        revision = facts.config.model.revision if facts.base_model is None else None
        at = f" at `{revision}`" if revision else ""
        return f"[`{facts.base}`](https://huggingface.co/{facts.base}){at}"
    return f"`{facts.base}`, a local model that is not published under this name"


def _provenance(facts: CardFacts) -> list[str]:
    known, lines = facts.provenance, []
    if known.get("commit"):
        dirty = " with uncommitted changes" if known.get("dirty") else ""
        if known.get("dirty", False) is None:
            dirty = " (whether with uncommitted changes, git did not say)"
        lines.append(f"Code: commit `{known['commit']}`{dirty}.")
    packages = known.get("packages") or {}
    if packages:
        listed = ", ".join(f"{name} {packages[name]}" for name in sorted(packages))
        lines.append(f"Packages: {listed}.")
    digests = [
        f"{which} rows `{counts['digest']}`"
        for which in ("rl", "sft")
        if (counts := facts.reports.get("data", {}).get(which)) and counts.get("digest")
    ]
    if digests:
        lines.append(f"Data: {', '.join(digests)}.")
    for stage, version in facts.versions.items():
        found = stage_changes(stage, version)
        lines.append(
            f"Stage `{stage}` by version {version} of its rules{': ' if found else ''}{found}."
        )
    for stage, address in sorted(facts.tracking.items()):
        lines.append(f"Training log of `{stage}`: [{address.rpartition('/')[2]}]({address}).")
    return lines or ["Nothing was recorded of the code behind this checkpoint."]
