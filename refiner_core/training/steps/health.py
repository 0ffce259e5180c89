"""Health checks of a training at every step, and their policies: `off`, `warn`, `skip`, `stop`.

In: numbers of a step. Out: whether to make its update, metrics under ``health/``, warnings in the
log, or :class:`HealthStop`. Pure: no torch, no files; the state is JSON-ready and part of a
checkpoint's progress, so that a resumed run decides as the uninterrupted one.

| check | looks at | when |
|---|---|---|
| `not_finite` | loss, gradient norm, entropy, KL | before each optimiser step |
| `loss_spike` | gradient norm, and for SFT the loss, against their running means | the same |
| `entropy_collapse` | mean entropy per token (GRPO) | the same |
| `kl_blow_up` | mean kl3 per token to the reference (GRPO) | the same |
| `zero_reward_variance` | groups with a spread of rewards (GRPO) | when rewards are known |
| `length_explosion` | samples that hit the length limit (GRPO) | the same |

Calls of a training loop, in this order::

    health = HealthMonitor(config.grpo.health, "grpo")     # or config.sft.health, "sft"
    health.restore(progress.get("health"))                 # after Boundary.restore
    for step in ...:
        health.begin(step)
        # GRPO, once the step's rewards are known; with async_steps, when its update is due
        skip = health.after_rollouts(groups_with_spread=n, truncated_share=x)
        # for each optimiser step, unless skip: forward and backward, then before the weights move
        if health.before_update(loss=loss, grad_norm=norm, entropy=entropy, kl=kl):
            drop the gradients                             # and make no optimiser step
        else:
            make the optimiser step
        metrics.update(health.metrics())                   # last: counts of this step
        progress["health"] = health.state()                # when the step is counted, not before

* Both calls return whether to skip, and raise :class:`HealthStop` or :class:`NotFiniteError` if
  the policy is `stop`. On ``HealthStop`` save the state before the step if the weights have not
  changed in this step, then re-raise: ``boundary.save(step - 1, progress)``, as for a judge's
  outage. After a first optimiser step of the same step the newest checkpoint must do.
* Ranks must agree: give every rank the same numbers (reduced over ranks), and all decide alike;
  only rank 0's monitor ``says`` the findings.
* A skipped step is counted and logged; its schedule and its position in the data advance. Numbers
  that are not finite cannot be stored in a progress (JSON): use None.
* ``before_update`` may be called without values that a loop lacks (SFT: no entropy, no kl).

A mean covers the last :data:`WINDOW` values and is silent before :data:`WARM_UP` of them. A spike
enters it clipped to the limit, so that a lasting new level soon becomes normal, and `skip` cannot
skip forever. Entropy, KL, spread and lengths must be out of bounds in ``patience`` consecutive
steps; a step counts if any of its optimiser steps is out of bounds, and a step without the number
neither counts nor breaks the sequence.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from refiner_core.contract.errors import HealthStop, NotFiniteError
from refiner_core.contract.sections.training import HealthConfig

log = logging.getLogger(__name__)

#: Number of values in a running mean, and the minimum.
WINDOW, WARM_UP = 20, 5
#: A lasting finding is logged again after this many steps; metrics show all.
SAID_AGAIN = 50

#: Suggested changes of a recipe after a check stopped a run.
_FIX = {
    "loss_spike": "lower the learning rate, or raise {section}.health.spike_factor",
    "entropy_collapse": "raise the temperature or {section}.entropy_coefficient, or lower "
    "{section}.health.min_entropy",
    "kl_blow_up": "raise {section}.beta, lower the learning rate, or raise {section}.health.max_kl",
    "zero_reward_variance": "check the rewards (`refiner why`), set {section}.active_sampling, "
    "or raise {section}.health.patience",
    "length_explosion": "check the rollouts, raise {section}.response_length, or raise "
    "{section}.health.max_truncated_share",
}


class _Finding(NamedTuple):
    """A finding of a check: which one, the policy, the step, and the reason."""

    check: str
    policy: str
    step: int
    message: str


class HealthMonitor:
    """Health monitor of one training stage.

    Parameters
    ----------
    config
        Checks, limits and policies.
    stage
        ``sft``, ``rft`` or ``grpo``: the section of the recipe, and the prefix of messages.
    says
        Whether to log findings: all ranks find the same, and one of them logs it.
    """

    def __init__(self, config: HealthConfig, stage: str, *, says: bool = True) -> None:
        self.config, self.stage, self._says = config, stage, says
        self.step = 0
        #: Findings of this step's checks, in order.
        self.findings: list[_Finding] = []
        self._skipped = 0
        self._means: dict[str, list[float]] = {}
        # Check -> [consecutive steps, last step checked, whether that one counts]
        self._rows: dict[str, list[int]] = {}

    # ------------------------------------------------------------ interface

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore a state; None (an older checkpoint, or a start) resets it."""
        state = copy.deepcopy(dict(state or {}))
        self._means = state.get("means", {})
        self._rows = state.get("rows", {})

    def state(self) -> dict[str, Any]:
        """A copy of the state behind later decisions, JSON-ready."""
        return copy.deepcopy({"means": self._means, "rows": self._rows})

    def begin(self, step: int) -> None:
        """Begin a step: clear the last one's findings, keep counters and means."""
        self.step, self.findings, self._skipped = step, [], 0

    def after_rollouts(self, *, groups_with_spread: int, truncated_share: float) -> bool:
        """Check a step's samples and rewards; True: make no update in this step.

        Parameters
        ----------
        groups_with_spread
            Groups whose scored samples do not all have the same reward.
        truncated_share
            Share of the samples that hit the length limit, 0 to 1.

        Raises
        ------
        HealthStop
            A finding's policy is `stop`.
        """
        limit = self.config.max_truncated_share
        return self._act(
            self._in_a_row(
                "zero_reward_variance",
                groups_with_spread == 0,
                "no group of samples has any spread of rewards",
            ),
            self._in_a_row(
                "length_explosion",
                truncated_share > limit,
                f"{truncated_share:.0%} of the samples hit the length limit, above {limit:.0%}",
            ),
        )

    def before_update(
        self,
        *,
        loss: float,
        grad_norm: float,
        entropy: float | None = None,
        kl: float | None = None,
    ) -> bool:
        """Check one optimiser step before it is made; True: do not make it.

        Parameters
        ----------
        loss, grad_norm
            Of the optimiser step; the norm before clipping.
        entropy, kl
            Mean per token, in nats; None if unknown.

        Raises
        ------
        NotFiniteError
            A number is not finite, and the policy is `stop`.
        HealthStop
            A finding's policy is `stop`.
        """
        given = {"loss": loss, "gradient_norm": grad_norm, "entropy": entropy, "kl": kl}
        numbers = {name: value for name, value in given.items() if value is not None}
        if (broken := self._not_finite(numbers)) is not None:
            return self._act(broken)
        found = [self._spike("gradient_norm", grad_norm)]
        if self.stage != "grpo":  # GRPO's loss is near 0 and has either sign
            found.append(self._spike("loss", loss))
        if entropy is not None:
            limit = self.config.min_entropy
            said = f"the mean entropy is {entropy:.4g} nats per token, below {limit:g}"
            found.append(self._in_a_row("entropy_collapse", entropy < limit, said))
        if kl is not None:
            limit = self.config.max_kl
            said = f"the mean KL to the reference is {kl:.4g} nats per token, above {limit:g}"
            found.append(self._in_a_row("kl_blow_up", kl > limit, said))
        return self._act(*found)

    def metrics(self) -> dict[str, float]:
        """``health/CHECK``: number of findings in this step, and ``health/skipped_updates``:
        skipped optimiser steps, where a fully skipped step counts as one. Zero counts have no
        metric."""
        counts: dict[str, float] = {}
        for finding in self.findings:
            name = f"health/{finding.check}"
            counts[name] = counts.get(name, 0) + 1
        if self._skipped:
            counts["health/skipped_updates"] = self._skipped
        return counts

    # ------------------------------------------------------------ checks

    def _not_finite(self, numbers: Mapping[str, float]) -> _Finding | None:
        broken = {name: v for name, v in numbers.items() if not math.isfinite(v)}
        if not broken:
            return None
        name, value = next(iter(broken.items()))
        said = f"the {name.replace('_', ' ')} is {value}"
        return _Finding("not_finite", self.config.not_finite, self.step, said)

    def _spike(self, name: str, value: float) -> _Finding | None:
        values = self._means.setdefault(name, [])
        mean = sum(values) / len(values) if values else 0.0
        limit = self.config.spike_factor * mean
        spiked = len(values) >= WARM_UP and mean > 0 and value > limit
        values.append(min(value, limit) if spiked else value)
        del values[:-WINDOW]
        if not spiked or self.config.loss_spike == "off":
            return None
        said = (
            f"the {name.replace('_', ' ')} is {value:.4g}, more than {self.config.spike_factor:g} "
            f"times its running mean of {mean:.4g}"
        )
        return _Finding("loss_spike", self.config.loss_spike, self.step, said)

    def _in_a_row(self, check: str, bad: bool, said: str) -> _Finding | None:
        count, step, counted = self._rows.get(check, [0, 0, 0])
        if step != self.step:
            count, counted = (count if counted else 0), 0
        if bad and not counted:
            count, counted = count + 1, 1
        self._rows[check] = [count, self.step, counted]
        policy = getattr(self.config, check)
        if not bad or policy == "off" or count < self.config.patience:
            return None
        steps = "1 step" if count == 1 else f"{count} steps in a row"
        return _Finding(check, policy, self.step, f"{said} ({steps})")

    # ------------------------------------------------------------ actions

    def _act(self, *found: _Finding | None) -> bool:
        findings = [finding for finding in found if finding is not None]
        self.findings += findings
        for finding in findings if self._says else ():
            beyond = self._rows.get(finding.check, [0])[0] - self.config.patience
            if beyond <= 0 or beyond % SAID_AGAIN == 0:
                does = {"skip": "; its update is not made"}.get(finding.policy, "")
                where = f"{self.stage} step {finding.step}"
                log.warning("%s: %s [%s]%s", where, finding.message, finding.check, does)
        for finding in findings:
            if finding.policy == "stop":
                raise self._error(finding)
        skip = any(finding.policy == "skip" for finding in findings)
        self._skipped += skip
        return skip

    def _error(self, finding: _Finding) -> HealthStop | NotFiniteError:
        where = f"{self.stage} step {finding.step}: {finding.message}"
        if finding.check == "not_finite":
            return not_finite(where)
        fix = _FIX[finding.check].format(section=self.stage)
        return HealthStop(
            f"{where}, and {self.stage}.health.{finding.check} is `stop`",
            expected="values within the limits of the recipe",
            fix=f"{fix}; {self.stage}.health.{finding.check}=warn resumes from the last checkpoint "
            "as it is",
        )


def not_finite(what: str) -> NotFiniteError:
    """The error of a non-finite number."""
    return NotFiniteError(
        f"{what}; the weights were not updated with it",
        expected="a finite number",
        fix="lower the learning rate or max_grad_norm, or check the step's data",
    )
