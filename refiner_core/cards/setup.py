"""The training set-up in words.

In: :class:`CardFacts`. Out: the lines of the section "Training set-up": which rows, what reward and
judge, which optimiser, how long, and what was done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from refiner_core.cards.agents import (
    agent_data_lines,
    agent_reward_lines,
    environment_lines,
    is_agent,
)
from refiner_core.cards.facts import CardFacts, finite, is_hub_id, public_name
from refiner_core.cards.printed import Line, as_line, counted, joined, number
from refiner_core.cards.rejection import sampling_lines
from refiner_core.cards.settings import shown
from refiner_core.contract.config import DataConfig, RewardConfig
from refiner_core.contract.kinds import KINDS, TRAINED_HERE
from refiner_core.contract.placement import sft_section

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
