"""A card from facts.

In: :class:`CardFacts`. Out: the text of README.md: YAML front matter as the Hub reads it, then the
sections of ``card.md.jinja`` or of a user's own template; and which number of it shows which fact.
The template only places what the other modules have put into words. Settings (``beta = 0.001``)
are no such numbers: they stand under ``config`` in the evidence by their own names.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml
from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from refiner_core.cards.evidence import facts_from_json, facts_to_json, published_facts
from refiner_core.cards.facts import (
    UNKNOWN,
    CardFacts,
    is_hub_id,
    numbers_in,
    record_of,
    unmarked,
)
from refiner_core.cards.notes import known_notes
from refiner_core.cards.results import (
    index_numbers,
    model_index,
    preferred_step,
    progression_tables,
    result_tables,
)
from refiner_core.cards.settings import grpo_flags, own_settings
from refiner_core.cards.setup import earlier_stages, setup_lines
from refiner_core.cards.training import cost_lines, training_curve
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import KINDS, TRAINED, card_words
from refiner_core.contract.placement import STAGES
from refiner_core.contract.planned import stage_changes

_FIX = "correct the template (`refiner card template` prints the shipped one, to start from)"


def shipped_template() -> str:
    """The template (Jinja) that cards are made with, to copy and change; a recipe takes another one
    by ``publish.card_template=FILE``.

    Raises
    ------
    OSError
        It cannot be read: the installation is damaged.
    """
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
        raise _unfit(e, "a template that Jinja can parse") from e


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
_CODE = '''\
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"
tokenizer = AutoTokenizer.from_pretrained(name{revision})
model = AutoModelForCausalLM.from_pretrained(name{revision}, dtype="auto")

prompt = """{evidence}"""
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": prompt}}],
    add_generation_prompt=True,{thinking}
    return_tensors="pt",
    return_dict=True,
)
output = model.generate(**inputs, max_new_tokens={tokens}, do_sample=False{stop})
answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
print(answer)'''


_TURN = '<tool_call>{"name": "respond", "arguments": {"content": "May I have the id?"}}</tool_call>'
_AGENT_CODE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"
tokenizer = AutoTokenizer.from_pretrained(name{revision})
model = AutoModelForCausalLM.from_pretrained(name{revision}, dtype="auto")

tools = [{{
    "type": "function",
    "function": {{
        "name": "respond",
        "description": "Say something to the user.",
        "parameters": {{
            "type": "object",
            "properties": {{"content": {{"type": "string"}}}},
            "required": ["content"],
        }},
    }},
}}]
messages = [
    {{"role": "system", "content": "Serve the user by the rules."}},
    {{"role": "user", "content": "Hello, I need help with my order."}},
]
inputs = tokenizer.apply_chat_template(
    messages,
    tools=tools,
    add_generation_prompt=True,
    enable_thinking=False,
    return_tensors="pt",
    return_dict=True,
)
output = model.generate(
    **inputs,
    max_new_tokens={tokens},
    do_sample=False,
    stop_strings=["</tool_call>"],
    tokenizer=tokenizer,
)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""


class OutputFormat(NamedTuple):
    """Output of the model: modes in its training rows, and an example."""

    modes: tuple[str, ...]
    answer_only: bool
    evidence: str
    answer: str


def output_format(facts: CardFacts) -> OutputFormat:
    """The format by the modes of the rows that the model was trained on; of an agent, a turn."""
    if facts.is_agent:
        return OutputFormat((), False, "", _TURN)
    modes = _modes(facts)
    alone = modes in ((), (_ANSWER_ONLY,))
    answer = _ANSWER if alone else f"The first snippet answers the question.\n{_ANSWER}"
    return OutputFormat(modes, alone, _EVIDENCE, answer)


def _modes(facts: CardFacts) -> tuple[str, ...]:
    """Modes of the rows that were kept; empty where nobody has counted."""
    if facts.config.data.refiner_mode is not None:
        return (facts.config.data.refiner_mode,)
    which = "rl" if facts.on_prompts else "sft"
    counts = facts.fact(f"reports.data.{which}.modes") or {}
    return tuple(sorted(mode for mode, count in counts.items() if count))


def usage_code(facts: CardFacts) -> str:
    """Python that loads this very step and refines one search result, or takes one turn.

    A folder has no revisions, and transformers would pass over one without a word: there a step is
    loaded from the folder of its own, ``OWNER/NAME@step-50``.
    """
    stops = facts.config.grpo.stop_strings
    name, revision = facts.repo_id, ""
    if facts.revision != "main" and facts.config.publish.target == "folder":
        name = f"{name}@{facts.revision}"
    elif facts.revision != "main":
        revision = f', revision="{facts.revision}"'
    return (_AGENT_CODE if facts.is_agent else _CODE).format(
        name=name,
        revision=revision,
        evidence=_EVIDENCE,
        thinking="\n    enable_thinking=False," if output_format(facts).answer_only else "",
        tokens=facts.config.grpo.response_length,
        stop=f", stop_strings={list(stops)!r}, tokenizer=tokenizer" if stops else "",
    )


def reproduction_lines(facts: CardFacts) -> list[str]:
    """Needs of the command, and signs that it is the same."""
    lines = []
    version = (facts.provenance.get("packages") or {}).get("refiner")
    if version:
        commit = facts.provenance.get("commit")
        at = f" at commit `{commit}`" if commit else ""
        lines.append(f"It takes refiner {version}{at}.")
    if facts.recipe_file is not None:
        lines.append(
            f"`recipe.yaml` lies beside this card (SHA-256 `{facts.recipe_file}`); give the "
            "command in its folder."
        )
    lines += [
        f"It reads `{name}` from the folder that it is given in (SHA-256 `{digest}`)."
        for name, digest in sorted(facts.sources.items())
    ]
    if facts.fingerprint:
        lines.append(
            f"With `--dry-run` it shows the fingerprint of the stage `{facts.stage}`, "
            f"`{facts.fingerprint}`: the same one means the same training."
        )
    if facts.stage in STAGES and not facts.final:
        save = getattr(facts.config, facts.stage).save_freq
        lines.append(
            f"It trains to the end of the run; step {facts.step} is a checkpoint that it saves on "
            f"the way (every {save} steps)."
        )
    return lines


_BUILTIN = "builtin:"
_SERVING = (
    "given the rules and tools of a domain, serve a user over several turns, each of them one tool "
    "call"
)
_REFINING = (
    "given an agent's reasoning, a question and raw search-tool output, write a concise answer "
    "whose claims cite that output"
)


def build_card(facts: CardFacts) -> str:
    """The README.md of a published checkpoint; the same facts give the same bytes.

    Raises
    ------
    ConfigurationError
        The user's template does not fit; see :func:`refiner_core.cards.build.render`.
    """
    known = facts_to_json(facts)
    variables = card_variables(facts_from_json(known)) | {"facts": known}
    return render(facts.template, {name: _plain(value) for name, value in variables.items()})


def marked_card(facts: CardFacts, template: str | None = None) -> str:
    """The card with its numbers marked (:func:`refiner_core.cards.facts.numbers_in`). Errors as
    above."""
    known = facts_to_json(facts)
    return render(template, card_variables(facts_from_json(known)) | {"facts": known})


def _plain(value: Any) -> Any:
    """Texts without marks, for templates that may look at them."""
    if isinstance(value, str):
        return unmarked(value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(_plain, value))
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value


def card_variables(facts: CardFacts) -> dict[str, Any]:
    """Variables of a template; the head of ``card.md.jinja`` says what each of them is."""
    grpo, earlier = facts.stage == "grpo", earlier_stages(facts)
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
        "agent": facts.is_agent,
        "task": _SERVING if facts.is_agent else _REFINING,
        "base_model": _base_in_words(facts),
        "algorithm": card_words(facts.stage).algorithm,
        "setup": setup_lines(facts),
        "before": [line for stage in earlier for line in stage.lines],
        "earlier": earlier,
        "cost": list(cost_lines(facts)),
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
    if facts.is_agent:
        judged = facts.config.environment.nl_assertions == "judge"
        sections = tuple(s for s in sections if judged or s not in ("reward", "judge"))
        sections = (*sections, "environment", *(["grpo"] if facts.stage == "grpo" else []))
    if not facts.on_prompts:
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
    last = "the last" if facts.final else "an intermediate"
    return f"`{facts.name}` is {base} {_how(facts)}; this is {last} checkpoint."


def _how(facts: CardFacts) -> str:
    """By what stages the model was made, in words."""
    agent = facts.is_agent
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
        f"{which} rows `{digest}`"
        for which in ("rl", "sft")
        if (digest := facts.fact(f"reports.data.{which}.digest"))
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


class CardNumber(NamedTuple):
    """A number of a card.

    Attributes
    ----------
    text
        As it is printed, without a unit: ``0.512``, ``2 h 02 min``.
    section
        Title of the section that it stands in, or ``front matter``.
    fact
        Dotted path in the facts of the evidence, such as ``evaluations.3.low``. A number that is
        made from several facts (a sum) has their common front, or the first of them.
    record
        Where that fact was read; None if nobody has said.
    """

    text: str
    section: str
    fact: str
    record: str | None


def card_numbers(facts: CardFacts) -> list[CardNumber]:
    """All numbers of facts in a card of the shipped template, in its order."""
    facts = published_facts(facts)
    found = [(text, "front matter", fact) for text, fact in index_numbers(facts)]
    section = ""
    for line in marked_card(facts).split("\n"):
        text = unmarked(line)
        section = text[3:] if text.startswith("## ") else section
        found += [(text[start:end], section, fact) for start, end, fact in numbers_in(line)]
    return [CardNumber(*number, record_of(facts, number[2])) for number in found]
