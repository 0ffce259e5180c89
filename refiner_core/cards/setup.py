"""The training set-up in words.

In: :class:`CardFacts`. Out: the lines of the section "Training set-up": which rows, what reward and
judge, which optimiser, how long, and what was done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from refiner_core.cards.facts import (
    CardFacts,
    Line,
    as_line,
    counted,
    finite,
    is_hub_id,
    joined,
    number,
    public_name,
)
from refiner_core.cards.settings import shown
from refiner_core.contract.config import DataConfig, RewardConfig, UserConfig
from refiner_core.contract.kinds import KINDS, TRAINED_HERE
from refiner_core.contract.placement import sft_section

_PATH = "reports.sample"
_SAME = {
    "none": "all of them",
    "text": "of those that say the same, one",
    "tools": "of those that call the same tools in the same order, one",
}
_LOST = (
    ("unscored", "without a score because the judge failed"),
    ("error", "ended by errors of the infrastructure"),
)


def sampling_lines(facts: CardFacts) -> list[Line]:
    """How attempts were sampled and kept; none where no report says."""
    report = facts.reports.get("sample", {})
    if not report.get("attempts"):
        return []
    return [_attempts(facts, report), _rule(facts, report), _kept(report), *_by_domain(report)]


def _attempts(facts: CardFacts, report: Mapping[str, Any]) -> Line:
    rule, counts = facts.config.sample, report["attempts"]
    backend = rule.generation_backend
    lane = "episode" if report.get("lane") == "episodes" else "answer"
    text = "**Attempts:** " + counted(counts["total"], f"{_PATH}.attempts.total", lane)
    text = text + " at " + counted(report["prompts"]["total"], f"{_PATH}.prompts.total", "prompt")
    text = text + f" ({rule.attempts} each), sampled by the model that training started from with "
    text = text + f"`temperature = {shown(rule.temperature)}`, `top_p = {shown(rule.top_p)}`"
    if rule.top_k:
        text = text + f", `top_k = {rule.top_k}`"
    text = text + f", {backend}"
    lost = report.get("not_kept") or {}
    parts = [
        number(lost[why], f"{_PATH}.not_kept.{why}") + f" {words}"
        for why, words in _LOST
        if lost.get(why)
    ]
    return text + ("; of these " + joined(parts, " and ") if parts else "") + "."


def _rule(facts: CardFacts, report: Mapping[str, Any]) -> Line:
    rule, episodes = facts.config.sample, report.get("lane") == "episodes"
    score = "reward" if episodes else "share of the highest reward that the prompt can give"
    same = _SAME["text" if rule.distinct == "tools" and not episodes else rule.distinct]
    most = f", at most {rule.max_kept} a prompt" if rule.max_kept is not None else ""
    text = f"**Kept by rule:** full successes ({score} at least {shown(rule.success)}; {same}"
    text += f"{most}); of a prompt without one "
    if rule.min_partial > 1:
        return as_line(text + "nothing.")
    partial = "a partial score" if episodes else "a share"
    return as_line(text + f"the best attempt from {partial} of {shown(rule.min_partial)} on.")


def _kept(report: Mapping[str, Any]) -> Line:
    kept, prompts = report["kept"], report["prompts"]
    text = "**Kept:** " + counted(kept["demonstrations"], f"{_PATH}.kept.demonstrations", "attempt")
    text = text + ": " + number(kept["full_success"], f"{_PATH}.kept.full_success") + " of "
    text = text + counted(
        report["attempts"]["full"], f"{_PATH}.attempts.full", "full success", "full successes"
    )
    text = text + " at " + counted(prompts["full"], f"{_PATH}.prompts.full", "prompt")
    text = (
        text
        + ", and "
        + counted(kept["best_partial"], f"{_PATH}.kept.best_partial", "best attempt")
    )
    text = text + " without full success; nothing at "
    return text + counted(prompts["none"], f"{_PATH}.prompts.none", "prompt") + "."


def _by_domain(report: Mapping[str, Any]) -> list[Line]:
    domains = report.get("by_domain") or {}
    if len(domains) < 2:
        return []
    return [
        "**Kept by domain:** " + joined(_domain(*item) for item in sorted(domains.items())) + "."
    ]


def _domain(name: str, counts: Mapping[str, Any]) -> Line:
    kept, prompts, path = counts["kept"], counts["prompts"], f"{_PATH}.by_domain.{name}"
    text = f"{name} " + number(kept["demonstrations"], f"{path}.kept.demonstrations") + " of "
    text = text + number(counts["attempts"]["total"], f"{path}.attempts.total") + " ("
    text = text + number(prompts["full"], f"{path}.prompts.full") + " of "
    return text + counted(prompts["total"], f"{path}.prompts.total", "prompt") + " solved)"


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
        text = as_line(f"**{labels[which]}:** {_agent_source(facts, which)}; ")
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


def _agent_source(facts: CardFacts, which: str) -> str:
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


_AGGREGATION = {
    "weighted_mean": "their mean, weighted by |weight|",
    "signed_mean": "the sum of weight × raw score over the sum of |weight|",
    "positive_sum": "the sum of weight × raw score over the sum of positive weights (at least 1)",
}
_SOURCE = {
    "instance": "the row's own rubrics",
    "static": "the static rubric set {static}",
    "instance+static": "the row's own rubrics and the static set {static}",
}
_AGGREGATE_LOSS = {
    "token": "mean over all tokens of a step",
    "sequence": "mean per sample, then over samples",
    "constant": "constant denominator",
}

#: What a run counted, in words.
_COUNTS = (
    ("groups/kept", ("group of samples trained on", "groups of samples trained on")),
    (
        "groups/dropped_zero_std",
        ("group dropped for equal rewards", "groups dropped because their rewards were equal"),
    ),
    (
        "groups/dropped_too_few_scored",
        ("group dropped for want of scores", "groups dropped for want of two scored samples"),
    ),
    (
        "samples/malformed",
        ("malformed sample (rewarded as such)", "malformed samples (rewarded as such)"),
    ),
    (
        "samples/truncated_masked",
        ("sample masked as cut by length", "samples masked as cut by length"),
    ),
    ("samples/unscored", ("sample without a score", "samples without a score")),
    ("optimizer_steps", ("optimiser step",)),
)


def setup_lines(facts: CardFacts) -> list[Line]:
    """The set-up of the model's own stage."""
    if facts.stage == "command":
        return command_lines(facts)
    if facts.stage == "grpo":
        return data_lines(facts) + grpo_lines(facts)
    return data_lines(facts) + _fine_tuned(facts, facts.stage)


class Earlier(NamedTuple):
    """A stage that training started from: a sentence, and the stage in words."""

    sentence: str
    lines: list[Line]


def earlier_stages(facts: CardFacts) -> list[Earlier]:
    """The stages of the same run that this one started from, the last first."""
    if facts.stage not in TRAINED_HERE:
        return []
    earlier = TRAINED_HERE[: TRAINED_HERE.index(facts.stage)]
    before = [s for s in earlier if s in facts.reports]
    found: list[Earlier] = []
    for stage in reversed(before):
        lines = [
            line
            for line in _fine_tuned(facts, stage)
            if not line.text.startswith(("**Loss", "**Seed"))
        ]
        who = "That one" if found else "Training"
        found.append(
            Earlier(f"{who} started from the {stage.upper()} stage of the same run:", lines)
        )
    return found


def before_lines(facts: CardFacts) -> list[Line]:
    """The lines of :func:`earlier_stages`, one stage after the other."""
    return [line for stage in earlier_stages(facts) for line in stage.lines]


def _fine_tuned(facts: CardFacts, stage: str) -> list[Line]:
    """SFT, or rejection sampling and SFT on what was kept."""
    if KINDS[stage].learns_from != "sample":
        return sft_lines(facts)
    scored: list[str] = []
    if facts.stage == stage:  # a GRPO stage that came after says it already
        scored = environment_lines(facts) if is_agent(facts) else _reward_lines(facts)
    return [*map(as_line, scored), *sampling_lines(facts), *sft_lines(facts, stage)]


def data_lines(facts: CardFacts) -> list[Line]:
    """Which rows went in, with counts where the data stage reported them."""
    report, data = facts.reports.get("data", {}), facts.config.data
    lines = []
    on_prompts = KINDS[facts.stage].on_prompts
    kinds = [("rl", "Prompts")] if on_prompts else []
    if not on_prompts or "sft" in facts.reports:
        kinds.append(("sft", "Demonstrations"))
    if is_agent(facts):
        return agent_data_lines(facts, kinds)
    for which, label in kinds:
        path = getattr(data, f"{which}_path")
        if path is None:
            continue
        text = as_line(f"**{label}:** {_source(data, which, path)}")
        counts = report.get(which) or {}
        if counts:
            text = text + "; " + number(counts.get("kept"), f"reports.data.{which}.kept") + " of "
            text = text + number(counts.get("read"), f"reports.data.{which}.read") + " rows kept"
        lines.append(text + ".")
    split = report.get("split") or {}
    if split:
        text = "**Held out:** " + _of_split(split, "held_out_questions") + " of "
        text = text + _of_split(split, "questions") + " questions, with all their rows; none of "
        lines.append(text + f"them is in the training data (split seed {data.split_seed}).")
    return lines


def _of_split(split: Mapping[str, Any], key: str) -> Line:
    return number(split.get(key), f"reports.data.split.{key}")


def _source(data: DataConfig, which: str, path: str) -> str:
    revision, split = getattr(data, f"{which}_revision"), getattr(data, f"{which}_split")
    if is_hub_id(path) and revision:  # without a revision it was a local path
        return f"[`{path}`](https://huggingface.co/datasets/{path}) at `{revision}` ({split} split)"
    return f"`{public_name(path)}`"


def grpo_lines(facts: CardFacts) -> list[Line]:
    """Reward, judge, KL, optimiser, rollouts and lengths of a GRPO run, and what was done."""
    return [*map(as_line, _grpo_settings(facts)), *_grpo_done(facts)]


def _grpo_done(facts: CardFacts) -> list[Line]:
    report, path = facts.reports.get("grpo", {}), "reports.grpo"
    parts = [
        counted(report[key], f"{path}.{key}", *words)
        for key, words in (
            ("steps", ("step",)),
            ("prompts", ("prompt to draw from", "prompts to draw from")),
            ("episodes", ("rollout",)),
            ("tokens", ("sampled token",)),
        )
        if report.get(key) is not None
    ]
    counts = report.get("counts") or {}
    parts += [
        counted(counts[key], f"{path}.counts.{key}", *words)
        for key, words in _COUNTS
        if counts.get(key)
    ]
    return ["**Done:** " + joined(parts) + "."] if parts else []


def _grpo_settings(facts: CardFacts) -> list[str]:
    c, grpo = facts.config, facts.config.grpo
    zero = "plain torch" if grpo.deepspeed_stage is None else f"ZeRO-{grpo.deepspeed_stage}"
    warm_up = f", warm-up {shown(grpo.warmup_ratio)}" if grpo.warmup_ratio else ""
    agent = [*environment_lines(facts), *agent_reward_lines(facts)] if is_agent(facts) else []
    return [
        *(agent or _reward_lines(facts)),
        f"**KL:** `{grpo.kl_estimator}` estimator, `beta = {shown(grpo.beta)}`.",
        f"**Optimizer:** AdamW (offload {'on' if grpo.offload_optimizer else 'off'}), "
        f"`lr = {shown(grpo.learning_rate)}` {grpo.lr_scheduler_type}{warm_up}, "
        f"`weight_decay = {shown(grpo.weight_decay)}`, "
        f"`max_grad_norm = {shown(grpo.max_grad_norm)}`, "
        f"`per_device_train_batch_size = {grpo.per_device_train_batch_size}`, {zero}, "
        f"`{c.model.attn_implementation}` attention, {c.model.dtype}.",
        f"**Rollouts:** {grpo.num_unique_prompts_rollout} unique prompts × "
        f"{grpo.num_samples_per_prompt_rollout} samples per prompt, "
        f"`temperature = {shown(grpo.temperature)}`, `top_p = {shown(grpo.top_p)}`, sampled by "
        f"{grpo.generation_backend}.",
        f"**Loss:** clip {shown(grpo.clip_lower)} / {shown(grpo.clip_higher)}, "
        f"{_AGGREGATE_LOSS[grpo.loss_aggregation]}, `{grpo.advantage_normalization_type}` "
        "advantages.",
        f"**Context:** `max_prompt_token_length = {c.data.max_prompt_token_length}`, "
        f"`response_length = {grpo.response_length}`, "
        f"`max_token_length = {grpo.max_token_length}`, `pack_length = {grpo.pack_length}`.",
        f"**Seed:** {c.seed}.",
    ]


def _reward_lines(facts: CardFacts) -> list[str]:
    reward, judge = facts.config.reward, facts.config.judge
    weight = reward.paper_citation_weight if reward.apply_paper_citation_reward else 0.0
    citation, w = reward.apply_paper_citation_reward, shown(weight)
    judged = rubric_source(reward) != "none"
    if not judged:
        formula = "citation" if citation else "0"
    elif reward.combination == "convex":
        formula = f"[(1 − {w}) · judge + {w} · citation]"
    else:
        formula = f"[judge + {w} · citation]"
    parts = " + ".join(
        name for name, on in (("rubric judge", judged), ("citation quality", citation)) if on
    )
    lines = [f"**Reward = {parts or 'no judged part'}.** {_rubric_words(facts)}"]
    lines[0] += f" Total = {shown(reward.verification_reward)} · {formula}."
    if judged and reward.gate_judge_score_with_format_bonus:
        lines[0] += " The judge's part is multiplied by the format bonus."
    if reward.non_stop_penalty:
        lines[0] += (
            " A completion that does not stop scores "
            f"{shown(reward.non_stop_penalty_value)} instead."
        )
    lines.append(_judge_words(facts))
    if citation:
        lines.append(
            f"**Citation reward:** enabled, weight {w} (0.6 · mean F1 of the judge's recall and "
            "precision per claim + 0.4 · share of cited ids that stand in the evidence)."
        )
    else:
        lines.append("**Citation reward:** disabled.")
    if judge.kind == "lexical":
        lines.append("The judge reads words, not meaning: scores say little about real quality.")
    return lines


def rubric_source(reward: RewardConfig) -> str:
    """The rubric source in effect."""
    if not reward.instance_rubrics_only:
        return reward.rubric_source
    return "instance" if "instance" in reward.rubric_source else "none"


def _rubric_words(facts: CardFacts) -> str:
    reward = facts.config.reward
    source = rubric_source(reward)
    if source == "none":
        return "No rubrics are judged."
    static = f"`{public_name(reward.static_rubrics)}`"
    if facts.static_rubric_titles:
        static += f" ({', '.join(_titles(facts))})"
    which = _SOURCE[source].format(static=static)
    score = _AGGREGATION[reward.rubric_aggregation]
    text = f"For each rollout the judge sees {which}; the score is {score}."
    if reward.rubric_aggregation == "weighted_mean":
        text += " Positive rubric scores enter as they are, negative ones as `1 - s`."
    return text


def _titles(facts: CardFacts) -> list[str]:
    """Titles of the static rubrics, with their weights where these are known."""
    titles, weights = facts.static_rubric_titles, facts.static_rubric_weights
    if len(weights) != len(titles):
        return [f"`{title}`" for title in titles]
    return [f"`{t}`, weight {shown(w)}" for t, w in zip(titles, weights, strict=True)]


def _judge_words(facts: CardFacts) -> str:
    judge = facts.config.judge
    if judge.kind == "lexical":
        return f"**Judge:** `{judge.model}`, deterministic word overlap (no language model)."
    revision = f" at `{judge.revision}`" if judge.revision else ""
    heat = "the server's own temperature"
    if judge.temperature is not None:
        heat = f"temperature {shown(judge.temperature)}"
    form = "one call for each rubric"
    if judge.form == "batched":
        form = "one call for all rubrics of an answer"
    text = (
        f"**Judge:** `{public_name(judge.model)}`{revision} behind an OpenAI-compatible server, "
        f"prompts `{public_name(judge.prompt)}`, {form}, {heat}, `max_tokens = {judge.max_tokens}`."
    )
    if judge.extra_body.strip():
        text += f" Further fields of each request: `{judge.extra_body.strip()}`."
    return text


def command_lines(facts: CardFacts) -> list[Line]:
    """Another trainer's run in words: what is recorded of it, and what is not."""
    report, command = facts.reports.get("command", {}), facts.config.command
    if command.adopted:
        lines = [
            "**Trainer:** not started by refiner. The checkpoint was adopted from the folder of a "
            "run that had ended: its files were checked, its training settings are not recorded.",
            f"**Checkpoint:** `{public_name(str(report.get('source', '')))}`, weights with digest "
            f"`{command.adopted[:12]}`.",
        ]
    else:
        lines = [f"**Trainer:** `{command.run}`"]
        if command.version:
            lines[0] += f" (version {command.version})"
        lines[0] += ", run by refiner as it stands; its settings are its own."
        lines.append(f"**Seed:** {facts.config.seed}.")
    numbers = {k: v for k, v in (report.get("final") or {}).items() if finite(v) is not None}
    said = list(map(as_line, lines))
    if numbers:
        listed = joined(
            f"{name} " + number(f"{value:.4g}", f"reports.command.final.{name}")
            for name, value in sorted(numbers.items())
        )
        said.append("**Last numbers that it printed:** " + listed + " (not checked by refiner).")
    return said


def sft_lines(facts: CardFacts, stage: str = "sft") -> list[Line]:
    """A stage that fine-tunes in words, and what was done."""
    return [*map(as_line, _sft_settings(facts, stage)), *_sft_done(facts, stage)]


def _sft_done(facts: CardFacts, stage: str) -> list[Line]:
    report = facts.reports.get(stage, {})
    parts = [
        counted(report[key], f"reports.{stage}.{key}", *words)
        for key, words in (
            ("steps", ("step",)),
            ("epochs", ("epoch begun", "epochs begun")),
            ("demonstrations", ("demonstration",)),
            ("tokens", ("token",)),
            ("loss_tokens", ("of them with loss", "of them with loss")),
        )
        if report.get(key) is not None
    ]
    return ["**Done:** " + joined(parts) + "."] if parts else []


def _sft_settings(facts: CardFacts, stage: str) -> list[str]:
    sft = sft_section(facts.config, stage)
    zero = "plain torch" if sft.deepspeed_stage is None else f"ZeRO-{sft.deepspeed_stage}"
    rates = f"`lr = {shown(sft.learning_rate)}`"
    name = "AdamW"
    if sft.optimizer == "muon":
        name, rates = "Muon with AdamW", f"{rates}, Muon `{shown(sft.muon_learning_rate)}`"
    length = f"{shown(sft.num_train_epochs)} epochs"
    if sft.max_train_steps is not None:
        length += f", at most {sft.max_train_steps} steps"
    return [
        "**Loss:** assistant tokens only; prompts, evidence and tool turns carry none.",
        f"**Optimizer:** {name}, {rates} {sft.lr_scheduler_type}, warm-up "
        f"{shown(sft.warmup_ratio)}, `weight_decay = {shown(sft.weight_decay)}`, "
        f"`max_grad_norm = {shown(sft.max_grad_norm)}`, "
        f"`per_device_train_batch_size = {sft.per_device_train_batch_size}`, "
        f"`gradient_accumulation_steps = {sft.gradient_accumulation_steps}`, {zero}, "
        f"`{facts.config.model.attn_implementation}` attention, {facts.config.model.dtype}.",
        f"**Length:** {length}; packs of {sft.pack_length} tokens.",
        f"**Seed:** {facts.config.seed}.",
    ]
