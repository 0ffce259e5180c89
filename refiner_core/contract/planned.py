"""A stage as it should be, and the rules about fields that hold for all kinds.

In: nothing. Out: :class:`PlannedStage`, and the tables by which :mod:`.plan_builder` makes them.
What is of one kind alone is in :mod:`refiner_core.contract.kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from refiner_core.contract.kinds import KINDS
from refiner_core.contract.sections.steering import Resources

#: These say which evaluations and publications exist, not what one of them is.
NOT_IN_A_STAGE = (
    *("evaluate.models", "evaluate.protocols"),
    *("publish.which", "publish.steps", "publish.evaluate"),
)
#: Of these only `publish-best` makes use.
ONLY_OF_THE_BEST = ("publish.best_metric", "publish.best_decoding")
#: What the lexical judge takes no notice of.
ONLY_OF_A_SERVED_JUDGE = ("judge.form", "judge.structured_output", "judge.extra_body")
#: Limits of health checks, and the checks that go by them.
HEALTH_CHECKS_OF = {
    "spike_factor": ("loss_spike",),
    "min_entropy": ("entropy_collapse",),
    "max_truncated_share": ("length_explosion",),
    "max_kl": ("kl_blow_up",),
    "patience": ("entropy_collapse", "zero_reward_variance", "length_explosion", "kl_blow_up"),
}
#: Where something lies is no part of what it is, once its content is known by a source's digest.
NAMED_BY_SOURCE = {
    "data.sft_path": "data.sft",
    "data.rl_path": "data.rl",
    "model.name_or_path": "model",
    "publish.card_template": "card_template",
    "environment.tasks": "environment",
}
#: Names of what is shipped stay part of what a stage is, as in all older runs; files have digests.
SHIPPED_OR_FILE = {
    "reward.static_rubrics": "rubrics",
    "judge.prompt": "judge_prompt",
    "environment.name": "environment",
}

#: A source that lies on a Hub has a digest that begins so.
HUB_DIGEST = "hub:"


@dataclass(frozen=True)
class PlannedStage:
    """One stage as it should be.

    ``inputs`` maps a role (``data``, ``policy``, ``weights``, ``evaluation-sft`` …) to the name of
    the stage that fills it. ``model`` names the model that a training stage makes or that an
    evaluation measures: ``base``, ``sft``, ``rft``, ``grpo``, ``command``, ``grpo-step50``.
    ``version`` is that of its kind, with or without an environment. ``after`` names
    stages that must be done first though nothing of theirs is read by path (a cache that they
    fill): no part of what the stage is. ``at_step`` maps roles to steps: of that
    input its checkpoint of the step is read, which is there before the stage ends. ``protocol``
    names the protocol file that the stage belongs to, empty for the recipe's own; see
    :meth:`refiner_core.contract.plan.Plan.config_of`.
    """

    name: str
    kind: str
    fingerprint: str
    resources: Resources
    identity: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    input_fingerprints: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    needs_network: bool = False
    after: tuple[str, ...] = ()
    at_step: Mapping[str, int] = field(default_factory=dict)
    protocol: str = ""
    version: int = 1

    @property
    def id(self) -> str:
        """Folder-safe id, the same in every run that shares the stage: ``sft-0123456789ab``."""
        return f"{self.kind}-{self.fingerprint[:12]}"

    @property
    def title(self) -> str:
        """Give what a person reads in tables and in the Prefect UI."""
        return f"{self.name} [{self.fingerprint[:8]}]"


def stage_changes(kind: str, version: int, since: int = 1) -> str:
    """What a version of a kind does otherwise than an older one, in words; empty of an unknown."""
    changes = KINDS[kind].changes if kind in KINDS else {}
    return "; ".join(changes[v] for v in range(since + 1, version + 1) if v in changes)
