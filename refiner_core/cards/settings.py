"""The training set-up: every setting by its flag, and the important ones in words.

In: :class:`CardFacts`. Out: flag lines in the reference trainer's names and order, settings that
the reference has no flag for as overrides of ours, and the lines of the section "Training set-up".
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from refiner_core.cards.facts import CardFacts, finite, is_hub_id, public_name
from refiner_core.contract.config import DataConfig, GrpoConfig, RecipeConfig, RewardConfig
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import walk

#: The seed cards' flags, line by line. The rest of ``grpo`` follows in the order of the fields.
_FLAG_LINES: tuple[tuple[str, ...], ...] = (
    ("reward.verification_reward",),
    ("reward.non_stop_penalty",),
    ("reward.gate_judge_score_with_format_bonus",),
    ("reward.apply_paper_citation_reward",),
    ("reward.paper_citation_weight",),
    ("reward.instance_rubrics_only",),
    ("grpo.kl_estimator", "grpo.beta"),
    ("grpo.num_unique_prompts_rollout", "grpo.num_samples_per_prompt_rollout"),
    ("grpo.learning_rate", "grpo.lr_scheduler_type"),
    ("data.max_prompt_token_length", "grpo.response_length"),
    ("grpo.max_token_length", "grpo.pack_length"),
    ("grpo.temperature", "seed"),
    ("grpo.per_device_train_batch_size", "grpo.deepspeed_stage"),
)
#: Reward fields that the reference trainer names without its ``refiner_reward_`` prefix.
_PLAIN = ("verification_reward", "non_stop_penalty", "non_stop_penalty_value")
#: Reward fields of ours; the reference has no flag for them.
_OURS = ("combination", "rubric_source", "static_rubrics", "rubric_aggregation")

#: An absolute path, or one from a home folder; the group is its last part.
_FOLDERS = re.compile(r"(?<![\w./:-])(?:~|/)[\w.~+-]*(?:/[\w.~+-]+)*/([\w.~+-]+)")

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


def shown(value: Any) -> str:
    """A value as on a command line; paths lose their folders."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(shown, value)) or "[]"
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}e{int(exponent)}" if e else mantissa
    if isinstance(value, str) and "\n" in value:
        return f"(text with SHA-256 {hashlib.sha256(value.encode()).hexdigest()[:12]}…)"
    if isinstance(value, str):
        return public_name(value)
    return "null" if value is None else str(value)


def flag_of(path: str) -> str | None:
    """The reference trainer's flag for a field; None where it has none."""
    section, _, name = path.rpartition(".")
    if section == "reward":
        if name in _OURS:
            return None
        return f"--{name}" if name in _PLAIN else f"--refiner_reward_{name}"
    if section == "grpo" or path in ("seed", "data.max_prompt_token_length"):
        return f"--{name}"
    return None


def grpo_flags(facts: CardFacts) -> list[str]:
    """Flag lines of a GRPO run: the seed cards' lines first, then every other identity setting."""

    def flag(path: str) -> str:
        return f"{flag_of(path)} {shown(get_field(facts.config, path))}"

    def known(path: str) -> bool:
        value = get_field(facts.config, path)
        recorded = facts.recorded_fields is None or path in facts.recorded_fields
        return recorded and value is not None

    lines = [[path for path in line if known(path)] for line in _FLAG_LINES]
    used = {path for line in _FLAG_LINES for path in line}
    rest = [f"reward.{info.name}" for _, info in walk(RewardConfig) if info.mark == "identity"]
    rest += [f"grpo.{path}" for path, info in walk(GrpoConfig) if info.mark == "identity"]
    lines += [[path] for path in rest if path not in used and flag_of(path) and known(path)]
    return [" ".join(map(flag, line)) for line in lines if line]


def own_settings(facts: CardFacts, sections: tuple[str, ...]) -> list[str]:
    """Identity settings without a flag of the reference, as overrides ``section.field=value``."""
    lines = []
    for path, info in walk(RecipeConfig):
        if info.mark != "identity" or path.partition(".")[0] not in sections:
            continue
        if facts.recorded_fields is not None and path not in facts.recorded_fields:
            continue
        if facts.stage == "grpo" and flag_of(path):
            continue
        value = get_field(facts.config, path)
        if path.startswith("command.") and value in ("", ()):
            continue
        if value is not None:
            text = shown(value)
            lines.append(f"{path}={without_folders(text) if path[:8] == 'command.' else text}")
    return lines


# ---------------------------------------------------------------- in words


def data_lines(facts: CardFacts) -> list[str]:
    """Which rows went in, with counts where the data stage reported them."""
    report, data = facts.reports.get("data", {}), facts.config.data
    lines = []
    kinds = [("rl", "Prompts")] if facts.stage == "grpo" else []
    if facts.stage != "grpo" or "sft" in facts.reports:
        kinds.append(("sft", "Demonstrations"))
    for which, label in kinds:
        path = getattr(data, f"{which}_path")
        if path is None:
            continue
        text = f"**{label}:** {_source(data, which, path)}"
        counts = report.get(which, {})
        if counts:
            text += f"; {counts['kept']} of {counts['read']} rows kept"
        lines.append(text + ".")
    split = report.get("split", {})
    if split:
        lines.append(
            f"**Held out:** {split['held_out_questions']} of {split['questions']} questions, with "
            "all their rows; none of them is in the training data."
        )
    return lines


def _source(data: DataConfig, which: str, path: str) -> str:
    revision, split = getattr(data, f"{which}_revision"), getattr(data, f"{which}_split")
    if is_hub_id(path) and revision:  # without a revision it was a local path
        return f"[`{path}`](https://huggingface.co/datasets/{path}) at `{revision}` ({split} split)"
    return f"`{public_name(path)}`"


def grpo_lines(facts: CardFacts) -> list[str]:
    """Reward, judge, KL, optimiser, rollouts and lengths of a GRPO run."""
    c, grpo = facts.config, facts.config.grpo
    zero = "plain torch" if grpo.deepspeed_stage is None else f"ZeRO-{grpo.deepspeed_stage}"
    warm_up = f", warm-up {shown(grpo.warmup_ratio)}" if grpo.warmup_ratio else ""
    return [
        *_reward_lines(facts),
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
    return "instance" if reward.instance_rubrics_only else reward.rubric_source


def _rubric_words(facts: CardFacts) -> str:
    reward = facts.config.reward
    source = rubric_source(reward)
    if source == "none":
        return "No rubrics are judged."
    static = f"`{public_name(reward.static_rubrics)}`"
    if facts.static_rubric_titles:
        static += f" ({', '.join(f'`{title}`' for title in facts.static_rubric_titles)})"
    which = _SOURCE[source].format(static=static)
    score = _AGGREGATION[reward.rubric_aggregation]
    text = f"For each rollout the judge sees {which}; the score is {score}."
    if reward.rubric_aggregation == "weighted_mean":
        text += " Positive rubric scores enter as they are, negative ones as `1 - s`."
    return text


def _judge_words(facts: CardFacts) -> str:
    judge = facts.config.judge
    if judge.kind == "lexical":
        return f"**Judge:** `{judge.model}`, deterministic word overlap (no language model)."
    revision = f" at `{judge.revision}`" if judge.revision else ""
    return (
        f"**Judge:** `{public_name(judge.model)}`{revision} behind an OpenAI-compatible server, "
        f"prompts `{judge.prompt}`, temperature {shown(judge.temperature)}, "
        f"`max_tokens = {judge.max_tokens}`."
    )


def command_lines(facts: CardFacts) -> list[str]:
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
        lines = [f"**Trainer:** `{without_folders(command.run)}`"]
        if command.version:
            lines[0] += f" (version {command.version})"
        lines[0] += ", run by refiner as it stands; its settings are its own."
        lines.append(f"**Seed:** {facts.config.seed}.")
    numbers = {k: v for k, v in (report.get("final") or {}).items() if finite(v) is not None}
    if numbers:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in sorted(numbers.items()))
        lines.append(f"**Last numbers that it printed:** {listed} (not checked by refiner).")
    return lines


def without_folders(text: str) -> str:
    """A command line without the folders of the machine that it ran on."""
    return _FOLDERS.sub(lambda match: match.group(1), text)


def sft_lines(facts: CardFacts) -> list[str]:
    """The SFT stage in words."""
    sft, report = facts.config.sft, facts.reports.get("sft", {})
    zero = "plain torch" if sft.deepspeed_stage is None else f"ZeRO-{sft.deepspeed_stage}"
    rates = f"`lr = {shown(sft.learning_rate)}`"
    name = "AdamW"
    if sft.optimizer == "muon":
        name, rates = "Muon with AdamW", f"{rates}, Muon `{shown(sft.muon_learning_rate)}`"
    length = f"{shown(sft.num_train_epochs)} epochs"
    if sft.max_train_steps is not None:
        length += f", at most {sft.max_train_steps} steps"
    lines = [
        "**Loss:** assistant tokens only; prompts, evidence and tool turns carry none.",
        f"**Optimizer:** {name}, {rates} {sft.lr_scheduler_type}, warm-up "
        f"{shown(sft.warmup_ratio)}, `weight_decay = {shown(sft.weight_decay)}`, "
        f"`max_grad_norm = {shown(sft.max_grad_norm)}`, "
        f"`per_device_train_batch_size = {sft.per_device_train_batch_size}`, "
        f"`gradient_accumulation_steps = {sft.gradient_accumulation_steps}`, {zero}, "
        f"`{facts.config.model.attn_implementation}` attention, {facts.config.model.dtype}.",
        f"**Length:** {length}; packs of {sft.pack_length} tokens.",
    ]
    if report.get("steps"):
        lines.append(f"**Done:** {report['steps']} steps, {report.get('tokens', 0)} tokens.")
    return [*lines, f"**Seed:** {facts.config.seed}."]
