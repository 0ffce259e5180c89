"""What a card says of an agent with tools: its task, format, environment, reward, how to use it.

In: :class:`CardFacts` of a recipe with ``environment.name``. Out: texts and lines, in the place of
those about evidence, rubrics and citations.
"""

from __future__ import annotations

from refiner_core.cards.facts import CardFacts, public_name
from refiner_core.cards.printed import Line, as_line, counted, joined, number
from refiner_core.cards.settings import shown
from refiner_core.contract.config import UserConfig

TASK = (
    "given the rules and tools of a domain, serve a user over several turns, each of them one tool "
    "call"
)
_EXAMPLE = (
    '<tool_call>{"name": "respond", "arguments": {"content": "May I have the id?"}}</tool_call>'
)
_CODE = """\
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


def is_agent(facts: CardFacts) -> bool:
    """Whether the model is an agent of an environment."""
    return bool(facts.config.environment.name)


def agent_format() -> str:
    """A turn, as an example."""
    return _EXAMPLE


def agent_usage(name: str, revision: str, tokens: int) -> str:
    """Python that loads the model and samples one turn."""
    return _CODE.format(name=name, revision=revision, tokens=tokens)


def agent_data_lines(facts: CardFacts, kinds: list[tuple[str, str]]) -> list[Line]:
    """Tasks and demonstrations, by domain; ``kinds`` as of the refiner's rows."""
    report, lines = facts.reports.get("data", {}), list[Line]()
    labels = {"rl": "Tasks", "sft": "Demonstrations"}
    for which, _ in kinds:
        counts, path = report.get(which) or {}, f"reports.data.{which}"
        if not counts.get("read"):
            continue
        text = as_line(f"**{labels[which]}:** {_source(facts, which)}; ")
        text = text + number(counts.get("kept"), f"{path}.kept") + " of "
        text = text + number(counts.get("read"), f"{path}.read") + " kept"
        domains = counts.get("domains") or {}
        if domains:
            listed = [
                number(count, f"{path}.domains.{name}") + f" {name}"
                for name, count in sorted(domains.items())
            ]
            text = text + " (" + joined(listed) + ")"
        if counts.get("flawed"):
            text = (
                text
                + "; "
                + counted(counts["flawed"], f"{path}.flawed", "of them has", "of them have")
            )
            text = text + " a mistake"
        lines.append(text + ".")
    split = report.get("split") or {}
    if split:
        text = "**Held out:** " + number(
            split.get("held_out_questions"), "reports.data.split.held_out_questions"
        )
        text = text + " of " + number(split.get("questions"), "reports.data.split.questions")
        test = facts.config.environment.test_split
        text = text + f" tasks, the environment's `{test}` split; none of them is trained on"
        unnamed = (report.get("sft") or {}).get("unnamed_task")
        if unnamed and any(which == "sft" for which, _ in kinds):
            text = text + ", as far as demonstrations name their tasks: "
            text = text + counted(
                unnamed,
                "reports.data.sft.unnamed_task",
                "demonstration names none",
                "demonstrations name none",
            )
        lines.append(text + ".")
    return lines


def _source(facts: CardFacts, which: str) -> str:
    environment, path = facts.config.environment, facts.config.data.sft_path
    if which == "rl":
        return f"of the environment `{public_name(environment.name)}`"
    if environment.demonstrations:
        return f"of the expert of `{public_name(environment.name)}`"
    return f"`{public_name(str(path))}`"


def environment_lines(facts: CardFacts) -> list[str]:
    """The environment and its user, as they were in training."""
    environment = facts.config.environment
    domains = ", ".join(f"`{name}`" for name in environment.domains) or "all domains"
    lines = [
        f"**Environment:** `{public_name(environment.name)}`, {domains}; at most "
        f"{environment.max_turns} turns, "
        + ("one further attempt" if environment.repairs else "no further attempt")
        + " at a turn that is no tool call.",
        f"**User in training:** {user_words(environment.user)}.",
    ]
    if environment.nl_assertions == "exclude":
        lines[0] += " Assertions in plain language, where tasks have any, are not part of rewards."
    return lines


def user_words(user: UserConfig) -> str:
    """Who the user was."""
    if not user.model:
        return "the environment's own script"
    return f"`{public_name(user.model)}`, temperature {shown(user.temperature)}"


def agent_reward_lines(facts: CardFacts) -> list[str]:
    """Reward, credit and curriculum of GRPO in an environment."""
    environment, grpo = facts.config.environment, facts.config.grpo
    shaping = environment.shaping
    by_domain = ", ".join(shaping.alpha_by_domain)
    weights = ", ".join((*shaping.weights, *shaping.weights_by_domain))
    failing = {
        "failure": "An episode that ends with a turn that is no tool call has reward 0.",
        "exclude": "Episodes that end with a turn that is no tool call are left out of training, "
        "which favours tasks that are easy to talk about (survivorship bias).",
    }[environment.unparsable]
    lines = [
        f"**Reward = environment + {shown(shaping.alpha)} · partial.** The environment's reward is "
        "1 for a success; partial is the weighted share of checks that passed, over the kinds that "
        f"a task has ({weights})"
        + (f", its weight times {by_domain} by domain. " if by_domain else ". ")
        + failing,
        {
            "trajectory": "**Credit:** all tokens of an episode have the advantage of the whole.",
            "turn_rewards": "**Credit:** a turn has the sum of the rewards, normalised over all "
            "turns of its group, from it on.",
        }[grpo.credit],
    ]
    curriculum = grpo.curriculum
    if curriculum.enabled:
        lines.append(
            f"**Curriculum:** after {curriculum.min_attempts} attempts at a task its advantages "
            f"are weighted {shown(curriculum.high_weight)} above a success rate of "
            f"{shown(curriculum.high)} and {shown(curriculum.low_weight)} below "
            f"{shown(curriculum.low)}."
        )
    return lines
