"""Every setting behind a model, by its name.

In: :class:`CardFacts`. Out: flag lines in the reference trainer's names and order, and settings
that the reference has no flag for as overrides of ours.
"""

from __future__ import annotations

from typing import Any

from refiner_core.cards.facts import CardFacts
from refiner_core.contract.config import GrpoConfig, RecipeConfig, RewardConfig
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
#: What means nothing to an agent: its environment rewards it, its turns end as its template says.
_NOT_OF_AGENTS = ("reward.", "grpo.stop_strings")


def shown(value: Any) -> str:
    """A value as on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(shown, value)) or "[]"
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}e{int(exponent)}" if e else mantissa
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
        meant = not facts.config.environment.name or not path.startswith(_NOT_OF_AGENTS)
        return recorded and meant and value is not None

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
        section, _, name = path.partition(".")
        checks = name.startswith("health.") and section in (facts.stage, *sections)
        if info.mark != "identity" or (section not in sections and not checks):
            continue
        if checks and get_field(facts.config, path) == info.legacy_value:
            continue  # it watched as every run does
        if facts.recorded_fields is not None and path not in facts.recorded_fields:
            continue
        if facts.stage == "grpo" and flag_of(path):
            continue
        value = get_field(facts.config, path)
        if path.startswith("command.") and value in ("", ()):
            continue
        if value is not None:
            lines.append(f"{path}={shown(value)}")
    return lines
