"""Fields that have no effect while another one says so: a sweep over them compares nothing.

In: a configuration. Out: whether a field is idle there, and why, in words. They are part of a
stage's identity all the same, so that a fingerprint alone would not tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.plan import Plan


class Idle(NamedTuple):
    """When a field is without effect, and why."""

    idle: Callable[[RecipeConfig], bool]
    why: str


def _no_static(config: RecipeConfig) -> bool:
    reward = config.reward
    return "static" not in reward.rubric_source or reward.instance_rubrics_only


_LEXICAL = Idle(lambda c: c.judge.kind == "lexical", "means nothing to the lexical judge")
_NO_DEMONSTRATIONS = Idle(
    lambda c: c.data.sft_path != "builtin:synthetic", "is about demonstrations that are made up"
)

#: Field -> when it is idle.
DORMANT: dict[str, Idle] = {
    "grpo.kl_estimator": Idle(
        lambda c: c.grpo.beta == 0, "is of no use where `grpo.beta` is 0: there is no KL term"
    ),
    "reward.static_rubrics": Idle(
        _no_static, "is not asked: `reward.rubric_source` has no static rubrics"
    ),
    "reward.instance_rubrics_only": Idle(
        lambda c: c.reward.rubric_source == "instance",
        "drops nothing: `reward.rubric_source` is instance",
    ),
    "reward.paper_citation_weight": Idle(
        lambda c: not c.reward.apply_paper_citation_reward,
        "is not used: `reward.apply_paper_citation_reward` is false",
    ),
    "reward.combination": Idle(
        lambda c: not c.reward.apply_paper_citation_reward or c.reward.paper_citation_weight == 0,
        "has nothing to combine: there is no citation term",
    ),
    "reward.non_stop_penalty_value": Idle(
        lambda c: not c.reward.non_stop_penalty, "is not used: `reward.non_stop_penalty` is false"
    ),
    "reward.rubric_aggregation": Idle(
        lambda c: c.reward.rubric_source == "none", "has no rubrics to aggregate"
    ),
    "sft.muon_learning_rate": Idle(
        lambda c: c.sft.optimizer != "muon", "is not used: `sft.optimizer` is adamw"
    ),
    "rft.muon_learning_rate": Idle(
        lambda c: c.rft.optimizer != "muon", "is not used: `rft.optimizer` is adamw"
    ),
    "judge.prompt": _LEXICAL,
    "judge.revision": _LEXICAL,
    "judge.temperature": _LEXICAL,
    "judge.max_tokens": _LEXICAL,
    "judge.form": _LEXICAL,
    "judge.structured_output": _LEXICAL,
    "judge.extra_body": _LEXICAL,
    "data.synthetic_sft_rows": _NO_DEMONSTRATIONS,
    "data.synthetic_rl_rows": Idle(
        lambda c: c.data.rl_path != "builtin:synthetic", "is about prompts that are made up"
    ),
}


def why_without_effect(field: str, plan: Plan, other: Plan) -> str:
    """Why two plans are the same though a field differs."""
    rule = DORMANT.get(field)
    if rule is not None and (rule.idle(plan.config) or rule.idle(other.config)):
        return rule.why
    section, _, name = field.rpartition(".")
    stages = plan.config.stages
    owner = KINDS[section].entry if section in KINDS else ""
    if owner and owner != "data" and owner not in stages:
        return f"belongs to a stage that the recipe does not have (`stages` is {', '.join(stages)})"
    if section == "publish":
        return "decides how a model is published, which no number depends on"
    if name in ("sft_path", "rl_path", "name_or_path", "static_rubrics", "prompt"):
        return f"names the same content twice ({get_field(plan.config, field)})"
    return "is read by no stage of this recipe"
