"""The training set-up in words.

In: :class:`CardFacts`. Out: the lines of the section "Training set-up": which rows, what reward and
judge, which optimiser, how long, what was sampled and kept, and what was done. Of an agent with
tools its tasks, environment, user and credit stand in the place of evidence, rubrics and citations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from refiner_core.cards.facts import (
    CardFacts,
    counted,
    finite,
    is_hub_id,
    number,
    public_name,
)
from refiner_core.cards.settings import shown
from refiner_core.contract.config import DataConfig, RewardConfig, UserConfig
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
_SAME = {
    "none": "all of them",
    "text": "of those that say the same, one",
    "tools": "of those that call the same tools in the same order, one",
}
_FAILING = {
    "failure": "An episode that ends with a turn that is no tool call has reward 0.",
    "exclude": "Episodes that end with a turn that is no tool call are left out of training, "
    "which favours tasks that are easy to talk about (survivorship bias).",
}
_CREDIT = {
    "trajectory": "**Credit:** all tokens of an episode have the advantage of the whole.",
    "turn_rewards": "**Credit:** a turn has the sum of the rewards, normalised over all "
    "turns of its group, from it on.",
}

#: What a stage has done, in words: keys of its report, with what stands there in one and in many.
_DONE_BY_SFT = (
    ("steps", "step"),
    ("epochs", "epoch begun", "epochs begun"),
    ("demonstrations", "demonstration"),
    ("tokens", "token"),
    ("loss_tokens", "of them with loss", "of them with loss"),
)
_DONE_BY_GRPO = (
    ("steps", "step"),
    ("prompts", "prompt to draw from", "prompts to draw from"),
    ("episodes", "rollout"),
    ("tokens", "sampled token"),
)
_COUNTS = (
    ("groups/kept", "group of samples trained on", "groups of samples trained on"),
    (
        "groups/dropped_zero_std",
        "group dropped for equal rewards",
        "groups dropped because their rewards were equal",
    ),
    (
        "groups/dropped_too_few_scored",
        "group dropped for want of scores",
        "groups dropped for want of two scored samples",
    ),
    (
        "samples/malformed",
        "malformed sample (rewarded as such)",
        "malformed samples (rewarded as such)",
    ),
    (
        "samples/truncated_masked",
        "sample masked as cut by length",
        "samples masked as cut by length",
    ),
    ("samples/unscored", "sample without a score", "samples without a score"),
    ("optimizer_steps", "optimiser step"),
)


def setup_lines(facts: CardFacts) -> list[str]:
    """The set-up of the model's own stage."""
    if facts.stage == "command":
        return _command_lines(facts)
    if facts.stage == "grpo":
        done = [*_done(facts, "grpo", _DONE_BY_GRPO), *_done(facts, "grpo.counts", _COUNTS)]
        return [*data_lines(facts), *_grpo_settings(facts), *_as_done(done)]
    return data_lines(facts) + _fine_tuned(facts, facts.stage)


class Earlier(NamedTuple):
    """A stage that training started from: a sentence, and the stage in words."""

    sentence: str
    lines: list[str]


def earlier_stages(facts: CardFacts) -> list[Earlier]:
    """The stages of the same run that this one started from, the last first."""
    if facts.stage not in TRAINED_HERE:
        return []
    before = TRAINED_HERE[: TRAINED_HERE.index(facts.stage)]
    found: list[Earlier] = []
    for stage in reversed([s for s in before if s in facts.reports]):
        lines = [
            line for line in _fine_tuned(facts, stage) if not line.startswith(("**Loss", "**Seed"))
        ]
        who = "That one" if found else "Training"
        found.append(
            Earlier(f"{who} started from the {stage.upper()} stage of the same run:", lines)
        )
    return found


def _done(facts: CardFacts, path: str, words: tuple[tuple[str, ...], ...]) -> list[str]:
    """Counts of a report; what it has not, and counts that are 0, are left out."""
    report = facts.fact(f"reports.{path}") or {}
    least = 0 if path.endswith("counts") else -1
    return [
        counted(report[key], f"reports.{path}.{key}", *said)
        for key, *said in words
        if report.get(key) is not None and report[key] > least
    ]


def _as_done(parts: list[str]) -> list[str]:
    return [f"**Done:** {', '.join(parts)}."] if parts else []


# ---------------------------------------------------------------- rows


def data_lines(facts: CardFacts) -> list[str]:
    """Rows or tasks that went in, with counts where the data stage reported them."""
    data, lines = facts.config.data, []
    report = facts.reports.get("data", {})
    kinds = ["rl"] if facts.on_prompts else []
    if not facts.on_prompts or "sft" in facts.reports:
        kinds.append("sft")
    for which in kinds:
        path, known = getattr(data, f"{which}_path"), report.get(which) or {}
        if not (known.get("read") if facts.is_agent else path is not None):
            continue
        at = f"reports.data.{which}"
        kept = f"{facts.number(f'{at}.kept')} of {facts.number(f'{at}.read')}"
        if facts.is_agent:
            label = "Tasks" if which == "rl" else "Demonstrations"
            domains = [
                f"{number(count, f'{at}.domains.{name}')} {name}"
                for name, count in sorted((known.get("domains") or {}).items())
            ]
            text = f"**{label}:** {_source_of_tasks(facts, which)}; {kept} kept"
            text += f" ({', '.join(domains)})" if domains else ""
            if known.get("flawed"):
                flawed = facts.counted(f"{at}.flawed", "of them has", "of them have")
                text += f"; {flawed} a mistake"
        else:
            label = "Prompts" if which == "rl" else "Demonstrations"
            text = f"**{label}:** {_source(data, which, path)}"
            text += f"; {kept} rows kept" if known else ""
        lines.append(text + ".")
    return [*lines, *_held_out(facts, kinds)]


def _held_out(facts: CardFacts, kinds: Collection[str]) -> list[str]:
    """Rows or tasks that were kept out of training."""
    if not facts.fact("reports.data.split"):
        return []
    at = "reports.data.split"
    text = (
        f"**Held out:** {facts.number(f'{at}.held_out_questions')} of "
        f"{facts.number(f'{at}.questions')} "
    )
    if not facts.is_agent:
        text += "questions, with all their rows; none of them is in the training data "
        return [f"{text}(split seed {facts.config.data.split_seed})."]
    test = facts.config.environment.test_split
    text += f"tasks, the environment's `{test}` split; none of them is trained on"
    unnamed = "reports.data.sft.unnamed_task"
    if "sft" in kinds and facts.fact(unnamed):
        none = facts.counted(unnamed, "demonstration names none", "demonstrations name none")
        text += f", as far as demonstrations name their tasks: {none}"
    return [text + "."]


def _source(data: DataConfig, which: str, path: str) -> str:
    revision, split = getattr(data, f"{which}_revision"), getattr(data, f"{which}_split")
    if is_hub_id(path) and revision:  # without a revision it was a local path
        return f"[`{path}`](https://huggingface.co/datasets/{path}) at `{revision}` ({split} split)"
    return f"`{public_name(path)}`"


def _source_of_tasks(facts: CardFacts, which: str) -> str:
    environment = facts.config.environment
    if which == "rl":
        return f"of the environment `{public_name(environment.name)}`"
    if environment.demonstrations:
        return f"of the expert of `{public_name(environment.name)}`"
    return f"`{public_name(str(facts.config.data.sft_path))}`"


# ---------------------------------------------------------------- GRPO


def _grpo_settings(facts: CardFacts) -> list[str]:
    """Reward, judge, KL, optimiser, rollouts and lengths of a GRPO run."""
    c, grpo = facts.config, facts.config.grpo
    zero = "plain torch" if grpo.deepspeed_stage is None else f"ZeRO-{grpo.deepspeed_stage}"
    warm_up = f", warm-up {shown(grpo.warmup_ratio)}" if grpo.warmup_ratio else ""
    agent = [*environment_lines(facts), *_agent_reward_lines(facts)] if facts.is_agent else []
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
    citation, judged = reward.apply_paper_citation_reward, rubric_source(reward) != "none"
    w = shown(reward.paper_citation_weight if citation else 0.0)
    if not judged:
        formula = "citation" if citation else "0"
    elif reward.combination == "convex":
        formula = f"[(1 − {w}) · judge + {w} · citation]"
    else:
        formula = f"[judge + {w} · citation]"
    parts = ["rubric judge"] * judged + ["citation quality"] * citation
    text = (
        f"**Reward = {' + '.join(parts) or 'no judged part'}.** {_rubric_words(facts)} "
        f"Total = {shown(reward.verification_reward)} · {formula}."
    )
    if judged and reward.gate_judge_score_with_format_bonus:
        text += " The judge's part is multiplied by the format bonus."
    if reward.non_stop_penalty:
        instead = shown(reward.non_stop_penalty_value)
        text += f" A completion that does not stop scores {instead} instead."
    lines = [text, _judge_words(facts), "**Citation reward:** disabled."]
    if citation:
        lines[-1] = (
            f"**Citation reward:** enabled, weight {w} (0.6 · mean F1 of the judge's recall and "
            "precision per claim + 0.4 · share of cited ids that stand in the evidence)."
        )
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
    if rubric_source(reward) == "none":
        return "No rubrics are judged."
    static = f"`{public_name(reward.static_rubrics)}`"
    titles, weights = facts.static_rubric_titles, facts.static_rubric_weights
    if titles:
        known = len(weights) == len(titles)  # weights may be missing
        heavy = [f", weight {shown(w)}" for w in weights] if known else [""] * len(titles)
        listed = ", ".join(f"`{t}`{w}" for t, w in zip(titles, heavy, strict=True))
        static += f" ({listed})"
    text = (
        f"For each rollout the judge sees {_SOURCE[rubric_source(reward)].format(static=static)}; "
        f"the score is {_AGGREGATION[reward.rubric_aggregation]}."
    )
    if reward.rubric_aggregation == "weighted_mean":
        text += " Positive rubric scores enter as they are, negative ones as `1 - s`."
    return text


def _judge_words(facts: CardFacts) -> str:
    judge = facts.config.judge
    if judge.kind == "lexical":
        return f"**Judge:** `{judge.model}`, deterministic word overlap (no language model)."
    revision = f" at `{judge.revision}`" if judge.revision else ""
    heat = "the server's own temperature"
    if judge.temperature is not None:
        heat = f"temperature {shown(judge.temperature)}"
    batched = judge.form == "batched"
    form = "one call for all rubrics of an answer" if batched else "one call for each rubric"
    text = (
        f"**Judge:** `{public_name(judge.model)}`{revision} behind an OpenAI-compatible server, "
        f"prompts `{public_name(judge.prompt)}`, {form}, {heat}, `max_tokens = {judge.max_tokens}`."
    )
    if judge.extra_body.strip():
        text += f" Further fields of each request: `{judge.extra_body.strip()}`."
    return text


def environment_lines(facts: CardFacts) -> list[str]:
    """The environment and its user, as they were in training."""
    environment = facts.config.environment
    domains = ", ".join(f"`{name}`" for name in environment.domains) or "all domains"
    repairs = "one further attempt" if environment.repairs else "no further attempt"
    where = (
        f"**Environment:** `{public_name(environment.name)}`, {domains}; at most "
        f"{environment.max_turns} turns, {repairs} at a turn that is no tool call."
    )
    if environment.nl_assertions == "exclude":
        where += " Assertions in plain language, where tasks have any, are not part of rewards."
    return [where, f"**User in training:** {_user_words(environment.user)}."]


def _user_words(user: UserConfig) -> str:
    if not user.model:
        return "the environment's own script"
    return f"`{public_name(user.model)}`, temperature {shown(user.temperature)}"


def _agent_reward_lines(facts: CardFacts) -> list[str]:
    """Reward, credit and curriculum of GRPO in an environment."""
    environment, grpo = facts.config.environment, facts.config.grpo
    shaping, curriculum = environment.shaping, grpo.curriculum
    by_domain = ", ".join(shaping.alpha_by_domain)
    times = f", its weight times {by_domain} by domain" if by_domain else ""
    lines = [
        f"**Reward = environment + {shown(shaping.alpha)} · partial.** The environment's reward is "
        "1 for a success; partial is the weighted share of checks that passed, over the kinds that "
        f"a task has ({', '.join((*shaping.weights, *shaping.weights_by_domain))}){times}. "
        + _FAILING[environment.unparsable],
        _CREDIT[grpo.credit],
    ]
    if curriculum.enabled:
        lines.append(
            f"**Curriculum:** after {curriculum.min_attempts} attempts at a task its advantages "
            f"are weighted {shown(curriculum.high_weight)} above a success rate of "
            f"{shown(curriculum.high)} and {shown(curriculum.low_weight)} below "
            f"{shown(curriculum.low)}."
        )
    return lines


# ---------------------------------------------------------------- fine-tuning, and others' trainers


def _fine_tuned(facts: CardFacts, stage: str) -> list[str]:
    """SFT, or rejection sampling and SFT on what was kept."""
    lines: list[str] = []
    if stage in KINDS and KINDS[stage].learns_from == "sample":
        if facts.stage == stage:  # a GRPO stage that came after says it already
            lines = environment_lines(facts) if facts.is_agent else _reward_lines(facts)
        lines = [*lines, *_sampling_lines(facts)]
    else:
        stage = "sft"
    return [
        *lines,
        *_sft_settings(facts, stage),
        *_as_done(_done(facts, stage, _DONE_BY_SFT)),
    ]


def _sft_settings(facts: CardFacts, stage: str) -> list[str]:
    sft = sft_section(facts.config, stage)
    zero = "plain torch" if sft.deepspeed_stage is None else f"ZeRO-{sft.deepspeed_stage}"
    name, rates = "AdamW", f"`lr = {shown(sft.learning_rate)}`"
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


def _command_lines(facts: CardFacts) -> list[str]:
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
        version = f" (version {command.version})" if command.version else ""
        lines = [
            f"**Trainer:** `{command.run}`{version}, run by refiner as it stands; its settings are "
            "its own.",
            f"**Seed:** {facts.config.seed}.",
        ]
    printed = ", ".join(
        f"{name} {number(f'{value:.4g}', f'reports.command.final.{name}')}"
        for name, value in sorted((report.get("final") or {}).items())
        if finite(value) is not None
    )
    if printed:
        lines.append(f"**Last numbers that it printed:** {printed} (not checked by refiner).")
    return lines


# ---------------------------------------------------------------- rejection sampling


def _sampling_lines(facts: CardFacts) -> list[str]:
    """Sampling of attempts, the rule by which they were kept, and numbers; none where no report
    says."""
    report, rule, at = facts.reports.get("sample", {}), facts.config.sample, "reports.sample"
    if not report.get("attempts"):
        return []
    episodes = report.get("lane") == "episodes"
    lane = "episode" if episodes else "answer"
    top_k = f", `top_k = {rule.top_k}`" if rule.top_k else ""
    lost = " and ".join(
        f"{facts.number(f'{at}.not_kept.{why}')} {words}"
        for why, words in (
            ("unscored", "without a score because the judge failed"),
            ("error", "ended by errors of the infrastructure"),
        )
        if (report.get("not_kept") or {}).get(why)
    )
    lines = [
        f"**Attempts:** {facts.counted(f'{at}.attempts.total', lane)} at "
        f"{facts.counted(f'{at}.prompts.total', 'prompt')} ({rule.attempts} each), sampled by the "
        f"model that training started from with `temperature = {shown(rule.temperature)}`, "
        f"`top_p = {shown(rule.top_p)}`{top_k}, {rule.generation_backend}"
        + (f"; of these {lost}." if lost else "."),
        _rule(facts, episodes),
        f"**Kept:** {facts.counted(f'{at}.kept.demonstrations', 'attempt')}: "
        f"{facts.number(f'{at}.kept.full_success')} of "
        f"{facts.counted(f'{at}.attempts.full', 'full success', 'full successes')} at "
        f"{facts.counted(f'{at}.prompts.full', 'prompt')}, and "
        f"{facts.counted(f'{at}.kept.best_partial', 'best attempt')} without full success; nothing "
        f"at {facts.counted(f'{at}.prompts.none', 'prompt')}.",
    ]
    domains = report.get("by_domain") or {}
    if len(domains) > 1:
        kept = (_domain(*item) for item in sorted(domains.items()))
        lines.append(f"**Kept by domain:** {', '.join(kept)}.")
    return lines


def _rule(facts: CardFacts, episodes: bool) -> str:
    rule = facts.config.sample
    score = "reward" if episodes else "share of the highest reward that the prompt can give"
    same = _SAME["text" if rule.distinct == "tools" and not episodes else rule.distinct]
    most = f", at most {rule.max_kept} a prompt" if rule.max_kept is not None else ""
    partial = f"{'a partial score' if episodes else 'a share'} of {shown(rule.min_partial)} on"
    rest = "nothing" if rule.min_partial > 1 else f"the best attempt from {partial}"
    return (
        f"**Kept by rule:** full successes ({score} at least {shown(rule.success)}; {same}{most}); "
        f"of a prompt without one {rest}."
    )


def _domain(name: str, counts: Mapping[str, Any]) -> str:
    kept, prompts, path = counts["kept"], counts["prompts"], f"reports.sample.by_domain.{name}"
    return (
        f"{name} {number(kept['demonstrations'], f'{path}.kept.demonstrations')} of "
        f"{number(counts['attempts']['total'], f'{path}.attempts.total')} "
        f"({number(prompts['full'], f'{path}.prompts.full')} of "
        f"{counted(prompts['total'], f'{path}.prompts.total', 'prompt')} solved)"
    )
