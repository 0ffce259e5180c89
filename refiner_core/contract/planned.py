"""A planned stage, and the rules about fields that hold for all kinds.

In: nothing. Out: :class:`PlannedStage`, and the tables that :mod:`.plan_builder` uses.
:mod:`refiner_core.contract.kinds` has the rules of single kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from refiner_core.contract.kinds import KINDS
from refiner_core.contract.sections.steering import Resources

#: These determine which evaluations and publications exist, not their definitions.
NOT_IN_A_STAGE = (
    *("evaluate.models", "evaluate.protocols"),
    *("publish.which", "publish.steps", "publish.evaluate"),
)
#: Used by `publish-best` alone.
ONLY_OF_THE_BEST = ("publish.best_metric", "publish.best_decoding")
#: Ignored by the lexical judge.
ONLY_OF_A_SERVED_JUDGE = ("judge.form", "judge.structured_output", "judge.extra_body")
#: Limits of health checks, and the checks that use them.
HEALTH_CHECKS_OF = {
    "spike_factor": ("loss_spike",),
    "min_entropy": ("entropy_collapse",),
    "max_truncated_share": ("length_explosion",),
    "max_kl": ("kl_blow_up",),
    "patience": ("entropy_collapse", "zero_reward_variance", "length_explosion", "kl_blow_up"),
}
#: The place of a source is not part of the identity once its content is known by a digest.
NAMED_BY_SOURCE = {
    "data.sft_path": "data.sft",
    "data.rl_path": "data.rl",
    "model.name_or_path": "model",
    "publish.card_template": "card_template",
    "environment.tasks": "environment",
}
#: Names of shipped files remain part of the identity, as in all older runs; files have digests.
SHIPPED_OR_FILE = {
    "reward.static_rubrics": "rubrics",
    "judge.prompt": "judge_prompt",
    "environment.name": "environment",
}

#: Prefix of the digest of a source on a Hub.
HUB_DIGEST = "hub:"


@dataclass(frozen=True)
class PlannedStage:
    """One planned stage.

    ``inputs`` maps a role (``data``, ``policy``, ``weights``, ``evaluation-sft`` …) to the name of
    the stage that fills it. ``model`` names the model that a training stage makes or that an
    evaluation measures: ``base``, ``sft``, ``rft``, ``grpo``, ``command``, ``grpo-step50``.
    ``version`` is that of its kind, with or without an environment. ``after`` names stages that
    must be done first although none of their files is read by path (they fill a cache): not part of
    the identity. ``at_step`` maps roles to steps: the input's checkpoint of that step is read,
    which exists before the stage ends. ``protocol`` names the stage's protocol file, empty for the
    recipe's own; see :meth:`refiner_core.contract.plan.Plan.config_of`.
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
        """The title in tables and in the Prefect UI."""
        return f"{self.name} [{self.fingerprint[:8]}]"


def stage_changes(kind: str, version: int, since: int = 1) -> str:
    """Differences of a kind's version from an older one, in words; empty for an unknown kind."""
    changes = KINDS[kind].changes if kind in KINDS else {}
    return "; ".join(changes[v] for v in range(since + 1, version + 1) if v in changes)
