"""Monitor of a GRPO run: proxy and gold reward on fixed prompts, and the test that they part.

In: held-out prompts that no evaluation reads, the training's judge, gold judges; at each look the
policy's samples. Out: a series in the training's progress (so that a resumed run has it), metrics
``monitor/…``, and an alarm at most once.

A look reads the weights after a step: each prompt is answered once, with the same seed at every
look, and each answer is scored by the training reward (*proxy*) and by each gold protocol. Scores
are shares of the highest reward of their prompt, within [0, 1]; an answer that one of the judges
did not score counts for none. Nothing of it reaches the training: its samples have seeds of their
own, and no random state is shared.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, JudgeOutage, MonitorPause
from refiner_core.contract.fingerprint import derive_seed, digest
from refiner_core.contract.monitoring import (
    evaluated_prompts,
    monitored_rows,
    monitored_steps,
)
from refiner_core.contract.protocols import gold_protocols
from refiner_core.contract.types import Judge, PromptRow
from refiner_core.rewards import RewardInput, compute_rewards, require_scored
from refiner_core.rewards.compute import highest_reward
from refiner_core.rewards.sequential import evidence
from refiner_core.samples import PlannedSample, judge_meter
from refiner_core.training.ranks import Ranks, on_first
from refiner_core.training.rollouts.pipeline import Pipeline
from refiner_core.training.rollouts.rollout import RolloutSample
from refiner_core.training.steps.checkpoint_manager import StepTimer

log = logging.getLogger(__name__)

#: Largest logarithm of an e-value that is written as a number.
_LOG_LIMIT = 600.0


class Gold(NamedTuple):
    """A gold protocol: its name, the recipe under it, and its judge."""

    name: str
    config: RecipeConfig
    judge: Judge


class GoldMonitor:
    """The monitor of one training run.

    Parameters
    ----------
    prompts
        All held-out prompts.
    judge, golds
        On rank 0: the training's judge, and the gold ones.
    state
        The series so far, which grows: part of the training's progress.
    """

    def __init__(
        self,
        config: RecipeConfig,
        prompts: Sequence[PromptRow],
        rollouts: Pipeline,
        ranks: Ranks,
        judge: Judge | None,
        golds: Sequence[Gold],
        state: dict[str, Any],
    ) -> None:
        self.config, self.rollouts, self.ranks = config, rollouts, ranks
        self._judge, self._golds, self.state = judge, golds, state
        self.rows = choose_rows(config, prompts)
        self.steps = monitored_steps(config)
        names = [row.sample_id for row in self.rows]
        key = digest([names, list(config.monitor.gold), config.monitor.every])[:12]
        if state.get("key") != key:  # other rows or judges: another series
            state.clear()
            state.update(key=key, looks=[], alarm=None, best=None, handled=False, calls=0)

    @property
    def looks(self) -> list[dict[str, Any]]:
        """The looks so far: ``step``, and the rows' scores."""
        found: list[dict[str, Any]] = self.state["looks"]
        return found

    def due(self, step: int) -> bool:
        """Tell whether the weights after a step are to be looked at, and were not yet."""
        return step in self.steps and all(look["step"] < step for look in self.looks)

    @property
    def stopped(self) -> bool:
        """Whether it has ended the training."""
        return self.config.monitor.action == "stop" and self.state["alarm"] is not None

    def pauses(self, step: int) -> bool:
        """Tell whether the training is to pause after a step: once, and not after the last."""
        waits = self.state["alarm"] is not None and not self.state["handled"]
        return self.config.monitor.action == "pause" and waits and step < self.steps[-1]

    def act(self, step: int) -> None:
        """Act on the alarm, once the state is saved.

        Raises
        ------
        MonitorPause
            The action is `pause`.
        """
        if self.config.monitor.action == "pause":
            raise MonitorPause(
                f"GRPO is paused after step {step} of {self.steps[-1]}: {alarm_text(self.state)}",
                expected="a person to look at the answers (`refiner report`); the checkpoint of "
                f"step {self.state['best']}, the best by gold, is kept",
                fix="run the same command again to continue without a further pause",
            )

    @property
    def kept(self) -> list[int]:
        """Steps whose checkpoints are kept: the best by gold, and the best before the newest look,
        until the newest is saved."""
        return sorted({best for best in (_best(self.looks[:-1]), _best(self.looks)) if best})

    @property
    def kept_at_end(self) -> list[int]:
        """The best by gold, unless its weights are the result."""
        best = self.state["best"]
        return [] if self.stopped or best is None else [best]

    def report(self) -> dict[str, Any]:
        """Entries of the stage's report; ``steps`` are those of the weights."""
        state = self.state
        if not self.looks:
            return {"remark": "its monitor has not looked once, for want of judgements"}
        told = {name: state[name] for name in ("alarm", "best", "calls")}
        told |= {"action": self.config.monitor.action, "alpha": self.config.monitor.alpha}
        told |= {"rows": len(self.rows), "golds": list(gold_protocols(self.config))}
        told["stopped"] = state["alarm"] if self.stopped else None
        series = {"proxy": "proxy_mean", "gold": "gold_mean", "e_value": "e_value"}
        for name, key in series.items():
            told[name] = [[look["step"], look[key]] for look in self.looks]
        if state["alarm"] is None:
            return {"monitor": told}
        told["since"] = next(k["since"] for k in self.looks if k["step"] == state["alarm"])
        why = alarm_text(state)
        if not self.stopped:
            return {"monitor": told, "remark": why}
        remark = (
            f"stopped by its monitor at step {state['alarm']}, with the weights of step "
            f"{state['best']}, the best by gold: {why}"
        )
        return {"steps": state["best"], "monitor": told, "remark": remark}

    def observe(self, step: int) -> dict[str, float]:
        """Look at the weights after ``step``; all ranks together. Returns metrics.

        Raises
        ------
        JudgeOutage, Interrupted
            As for a step's rollouts; the look is repeated, or skipped if the action is `warn`.
        """
        clock = StepTimer()
        wanted = [
            PlannedSample(row, 0, derive_seed(self.config.seed, "monitor", row.sample_id))
            for row in self.rows
        ]
        samples = self.rollouts.sample_aside(wanted, step, clock)
        found, calls = on_first(self.ranks, lambda: self._scores(samples))
        self.state["calls"] += calls
        self.looks.append({"step": step, **found})
        # One answer for all ranks: they have to agree on an alarm.
        values, told = on_first(self.ranks, self._judged)
        self.looks[-1].update(told)
        self.state["best"] = _best(self.looks)
        if self.state["alarm"] is None and values["monitor/alarm"]:
            self.state["alarm"] = step
            log.warning("%s", alarm_text(self.state))
        return {
            **values,
            "monitor/judge_calls": calls,
            "time/monitor_s": clock.metrics(0)["time/step_s"],
        }

    def _scores(self, samples: Sequence[RolloutSample]) -> tuple[dict[str, Any], int]:
        """Scores of the rows, and the number of calls to judges' servers; on rank 0."""
        assert self._judge is not None
        own = Gold("proxy", self.config, self._judge)
        calls, found = 0, {}
        for one in (own, *self._golds):
            usage = judge_meter(one.judge)
            found[one.name] = _shares(one, samples)
            used = usage()
            calls += 0 if used is None else used.calls
        golds = [found[one.name] for one in self._golds]
        gold = [None if None in row else sum(row) / len(row) for row in zip(*golds, strict=True)]
        proxy = [p if g is not None else None for p, g in zip(found["proxy"], gold, strict=True)]
        gold = [g if p is not None else None for p, g in zip(proxy, gold, strict=True)]
        if all(value is None for value in gold):
            raise JudgeOutage(
                "No answer to the monitor has a score of the training reward and of gold",
                expected="a score of each for some rows",
                fix="check that the prompts have rubrics, and that the judges answer",
            )
        means = {"proxy_mean": _mean(proxy), "gold_mean": _mean(gold)}
        parts = {one.name: _mean(found[one.name]) for one in self._golds}
        return {"proxy": proxy, "gold": gold, **means, "golds": parts}, calls

    def _judged(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics of the newest look, and its evidence."""
        first, newest = self.looks[0], self.looks[-1]
        proxy, gold = (
            np.array([look[name] for look in self.looks], dtype=np.float64)
            for name in ("proxy", "gold")
        )
        monitor = self.config.monitor
        looks = max(1, len(self.steps) - 1)
        found = evidence(proxy, gold, looks=looks, keep=monitor.keep)
        log_e = float(found.log_e[-1])
        since = self.looks[int(found.since[-1])]["step"]
        told = {"e_value": math.exp(min(log_e, _LOG_LIMIT)), "since": since}
        rises = [newest[f"{name}_mean"] - first[f"{name}_mean"] for name in ("proxy", "gold")]
        values = {
            "monitor/proxy": newest["proxy_mean"],
            "monitor/gold": newest["gold_mean"],
            "monitor/difference": rises[0] - rises[1],
            "monitor/e_value": told["e_value"],
            "monitor/alarm": float(found.first_alarm(monitor.alpha) is not None),
            "monitor/unscored": float(newest["gold"].count(None)),
        }
        if len(newest["golds"]) > 1:
            values |= {f"monitor/gold_{name}": mean for name, mean in newest["golds"].items()}
        return values, told


def _best(looks: Sequence[dict[str, Any]]) -> int | None:
    """The step after the start with the most gold, the first of several; None without one."""
    after = [look for look in looks if look["step"]]
    return max(after, key=lambda look: look["gold_mean"])["step"] if after else None


def choose_rows(config: RecipeConfig, prompts: Sequence[PromptRow]) -> list[PromptRow]:
    """The monitored prompts: a seeded choice of the held-out ones that no evaluation reads.

    Raises
    ------
    ConfigurationError
        There are too few.
    """
    used, wanted = evaluated_prompts(config) or 0, monitored_rows(config)
    left = list(prompts[used:])
    if len(left) < wanted:
        raise ConfigurationError(
            f"The monitor reads {wanted} held-out prompts (monitor.rows), and {max(0, len(left))} "
            f"of {len(prompts)} are left after the {used} evaluated ones",
            expected="held-out prompts for both",
            fix=f"set evaluate.max_prompts={max(1, len(prompts) - wanted)}, lower monitor.rows, or "
            "raise data.held_out_fraction",
        )
    seed = config.data.split_seed
    left.sort(key=lambda row: derive_seed(seed, "monitor", row.sample_id))
    return left[:wanted]


def alarm_text(state: dict[str, Any]) -> str:
    """Sentence about the alarm of a series."""
    at = next(look for look in state["looks"] if look["step"] == state["alarm"])
    since = next(look for look in state["looks"] if look["step"] == at["since"])
    proxy, gold = (at[f"{name}_mean"] - since[f"{name}_mean"] for name in ("proxy", "gold"))
    return (
        f"from step {since['step']} to {at['step']} the training reward changed by {proxy:+.3f} of "
        f"its range, and gold by {gold:+.3f} (alarm of the monitor, e-value {at['e_value']:.3g})"
    )


def _shares(one: Gold, samples: Sequence[RolloutSample]) -> list[float | None]:
    """Rewards as shares of the highest one of their prompt; None without a score."""
    reward = one.config.reward
    items = [RewardInput(sample.prompt, sample.text, sample.stopped) for sample in samples]
    results = compute_rewards(items, reward, one.judge, totals_only=True)
    require_scored(
        results, one.config.judge.max_failed_share, of=f"answers to the monitor ({one.name})"
    )
    found: list[float | None] = []
    for sample, result in zip(samples, results, strict=True):
        highest = highest_reward(sample.prompt, reward)
        scored = result.total is not None and highest > 0
        found.append(min(1.0, max(0.0, (result.total or 0.0) / highest)) if scored else None)
    return found


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
