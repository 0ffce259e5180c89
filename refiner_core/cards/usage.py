"""How to use a published model: its output format, and code that runs as it stands.

In: :class:`CardFacts`. Out: an example of evidence and answer in the modes that the model was
trained on, and a Python block for plain ``transformers``.
"""

from __future__ import annotations

from dataclasses import dataclass

from refiner_core.cards.agents import agent_format, agent_usage, is_agent
from refiner_core.cards.facts import CardFacts
from refiner_core.contract.kinds import KINDS

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


@dataclass(frozen=True)
class OutputFormat:
    """What the model writes: modes in its training rows, and an example."""

    modes: tuple[str, ...]
    answer_only: bool
    evidence: str
    answer: str


def output_format(facts: CardFacts) -> OutputFormat:
    """The format by the modes of the rows that the model was trained on; of an agent, a turn."""
    if is_agent(facts):
        return OutputFormat((), False, "", agent_format())
    modes = _modes(facts)
    alone = modes in ((), (_ANSWER_ONLY,))
    answer = _ANSWER if alone else f"The first snippet answers the question.\n{_ANSWER}"
    return OutputFormat(modes, alone, _EVIDENCE, answer)


def _modes(facts: CardFacts) -> tuple[str, ...]:
    """Modes of the rows that were kept; empty where nobody has counted."""
    if facts.config.data.refiner_mode is not None:
        return (facts.config.data.refiner_mode,)
    which = "rl" if KINDS[facts.stage].on_prompts else "sft"
    counts = (facts.reports.get("data", {}).get(which) or {}).get("modes") or {}
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
    if is_agent(facts):
        return agent_usage(name, revision, facts.config.grpo.response_length)
    return _CODE.format(
        name=name,
        revision=revision,
        evidence=_EVIDENCE,
        thinking="\n    enable_thinking=False," if output_format(facts).answer_only else "",
        tokens=facts.config.grpo.response_length,
        stop=f", stop_strings={list(stops)!r}, tokenizer=tokenizer" if stops else "",
    )
