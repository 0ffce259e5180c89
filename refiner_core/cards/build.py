"""A card from facts.

In: :class:`CardFacts`. Out: the text of README.md: YAML front matter as the Hub reads it, then the
sections of ``card.md.jinja``. The template only places what the other modules have put into words.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template

from refiner_core.cards.evidence import published_facts
from refiner_core.cards.facts import UNKNOWN, CardFacts, is_hub_id, public_name
from refiner_core.cards.notes import known_notes
from refiner_core.cards.results import model_index, result_tables
from refiner_core.cards.settings import (
    command_lines,
    data_lines,
    grpo_flags,
    grpo_lines,
    own_settings,
    sft_lines,
)

_ALGORITHMS = {
    "sft": "Supervised fine-tuning (SFT)",
    "rft": "Rejection fine-tuning (RFT)",
    "grpo": "Group-relative policy optimisation (GRPO)",
    "command": "that of another trainer",
}
_SHORT_NAMES = {"command": "Externally trained"}
_TAGS = {"sft": ["sft"], "rft": ["rft"], "grpo": ["grpo", "rlhf"]}
_BUILTIN = "builtin:"
_SECTIONS = {
    "grpo": ("model", "reward", "judge", "data"),
    "sft": ("model", "sft", "data", "seed"),
    "command": ("command", "seed"),
}


def build_card(facts: CardFacts) -> str:
    """The README.md of a published checkpoint; the same facts give the same bytes."""
    facts = published_facts(facts)
    grpo = facts.stage == "grpo"
    values: dict[str, Any] = {
        "front_matter": yaml.safe_dump(front_matter(facts), sort_keys=False, allow_unicode=True),
        "name": facts.name,
        "short_name": _SHORT_NAMES.get(facts.stage, facts.stage.upper()),
        "step": facts.step,
        "steps": facts.config.grpo.num_training_steps if grpo else None,
        "final": facts.final,
        "external": facts.stage == "command",
        "base_model": _base_in_words(facts),
        "algorithm": _ALGORITHMS.get(facts.stage, facts.stage),
        "setup": _setup(facts),
        "before": sft_lines(facts)[1:-1] if grpo and "sft" in facts.reports else [],
        "answer_only": facts.config.data.refiner_mode in (None, "answer_only"),
        "tables": result_tables(facts),
        "command": facts.command.strip(),
        "flags": grpo_flags(facts) if grpo else [],
        "settings": own_settings(facts, _SECTIONS.get(facts.stage, _SECTIONS["sft"])),
        "notes": known_notes(facts),
        "provenance": _provenance(facts),
    }
    return _template().render(values).rstrip() + "\n"


def _setup(facts: CardFacts) -> list[str]:
    if facts.stage == "command":
        return command_lines(facts)
    return data_lines(facts) + (grpo_lines(facts) if facts.stage == "grpo" else sft_lines(facts))


@cache
def _template() -> Template:
    text = files("refiner_core.cards").joinpath("card.md.jinja").read_text(encoding="utf-8")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    return environment.from_string(text)


def front_matter(facts: CardFacts) -> dict[str, Any]:
    """The card's metadata, in the order in which cards have it."""
    data = facts.config.data
    pinned = [(data.sft_path, data.sft_revision), (data.rl_path, data.rl_revision)]
    used = {"grpo": pinned, "command": []}.get(facts.stage, pinned[:1])
    datasets = list(dict.fromkeys(path for path, rev in used if rev and is_hub_id(path)))
    tags = [*_TAGS.get(facts.stage, [facts.stage]), "refiner", "citations"]
    if "qwen3" in facts.base.lower():
        tags.append("qwen3")
    matter: dict[str, Any] = {
        "license": facts.license,
        "base_model": facts.base.replace(_BUILTIN, "builtin-"),
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": tags,
    }
    if facts.base == UNKNOWN:
        del matter["base_model"]
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
        lines.append(f"Code: commit `{known['commit']}`{dirty}.")
    packages = known.get("packages") or {}
    if packages:
        listed = ", ".join(f"{name} {packages[name]}" for name in sorted(packages))
        lines.append(f"Packages: {listed}.")
    if known.get("host"):
        lines.append(f"Machine: {public_name(str(known['host']))}.")
    durations = known.get("durations") or {}
    if durations:
        listed = ", ".join(f"{stage} {_duration(s)}" for stage, s in durations.items())
        lines.append(f"Time of the successful attempts: {listed}.")
    return lines or ["Nothing was recorded of the code and machine behind this checkpoint."]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
