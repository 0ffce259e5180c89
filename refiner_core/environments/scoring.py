"""Value of an episode in training: reward, partial credit, and the weight of its task.

In: records of episodes, and the recipe's shaping. Out: one
:class:`~refiner_core.contract.types.RewardResult` each; weights of tasks by their successes.

::

    total   = reward + alpha(domain) x partial
    partial = sum over kinds of weight(kind) x share of its checks that passed / sum of weights,
              over the kinds that the task has and that have a weight

An episode that ends with a turn without a tool call is worth 0, whatever it did before
(``malformed``), or with ``unparsable=exclude`` has no reward (``unscored``). One that the
infrastructure ended is always ``unscored``. :func:`unscored_kinds` distinguishes the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from refiner_core.contract.errors import EnvironmentOutage
from refiner_core.contract.sections.environment import EnvironmentConfig, alpha_of, check_weights
from refiner_core.contract.sections.training import CurriculumConfig
from refiner_core.contract.types import RewardResult
from refiner_core.environments.protocol import Check, EpisodeRecord

_KINDS_SHOWN = 3


def partial_score(
    checks: Iterable[Check | Mapping[str, Any]], weights: Mapping[str, float]
) -> float | None:
    """The weighted share of passed checks, in [0, 1]; None if no check has a weight.

    Each kind counts by its share, renormalised over the kinds present: action 2/4 and communicate
    1/1 with weights .5, .15, .35 give (.5 x .5 + .15) / .65 = .6154.
    """
    passed: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for check in checks:
        values = vars(check) if isinstance(check, Check) else check
        found[values["kind"]] += 1
        passed[values["kind"]] += bool(values["passed"])
    present = [kind for kind in weights if found[kind] and weights[kind] > 0]
    if not present:
        return None
    reached = sum(weights[kind] * passed[kind] / found[kind] for kind in present)
    return reached / sum(weights[kind] for kind in present)


def shaped_reward(record: EpisodeRecord, environment: EnvironmentConfig) -> RewardResult:
    """The reward of an episode in training.

    Components: ``reward`` (the environment's own), ``partial`` (if the task has checks),
    ``alpha``, ``success``, ``turns``, ``repairs``, ``tool_errors``, and each part of the
    environment's reward as ``environment_NAME``. The partial score is computed from the record's
    checks, so that stored episodes can be rescored with other weights.
    """
    components = {
        "turns": float(len(record.turns)),
        "repairs": float(sum(turn.tried_again for turn in record.turns)),
        "tool_errors": float(sum(bool(turn.tool_error) for turn in record.turns)),
    }
    if record.status == "error" or record.reward is None:
        return _unscored("failed", record.error_kind or "error", record.error, components)
    shaping = environment.shaping
    alpha = alpha_of(shaping, record.domain)
    partial = partial_score(record.checks, check_weights(shaping, record.domain))
    components |= {
        "reward": float(record.reward),
        "alpha": alpha,
        "success": float(record.success),
        **{f"environment_{name}": float(v) for name, v in record.components.items()},
    }
    if partial is not None:
        components["partial"] = partial
    if record.ended == "no_call":
        if environment.unparsable == "exclude":
            return _unscored("excluded", "no_call", "the last turn is no tool call", components)
        return RewardResult("malformed", 0.0, components)
    return RewardResult("scored", float(record.reward) + alpha * (partial or 0.0), components)


def _unscored(
    status: Literal["failed", "excluded"], kind: str, detail: str, components: Mapping[str, float]
) -> RewardResult:
    judgement = {"kind": kind, "status": status, "detail": detail}
    return RewardResult("unscored", None, components, (judgement,))


def require_episodes(
    errors: Sequence[tuple[str, str]], episodes: int, max_error_share: float, *, of: str
) -> None:
    """Raise if the infrastructure ended too many episodes.

    Parameters
    ----------
    errors
        Kind and message of each error that ended one of ``episodes`` episodes.
    of
        Description of these, e.g. ``episodes of a step``.

    Raises
    ------
    EnvironmentOutage
        More than ``max_error_share`` of them; names the most frequent kinds.
    """
    if len(errors) <= max_error_share * episodes:
        return
    most = Counter(kind for kind, _ in errors).most_common(_KINDS_SHOWN)
    shown = ", ".join(f"{kind} ({n} times)" for kind, n in most)
    raise EnvironmentOutage(
        f"The environment or its user failed in {len(errors)} of {episodes} {of}: {shown}; "
        f"for one: {errors[-1][1]}",
        expected=f"at most a share of {max_error_share} (environment.max_error_share)",
        fix="check that the environment's tools and its user simulator answer, then run the same "
        "command again",
    )


class Curriculum:
    """Weight of a task's advantages, by its success rate so far in training.

    A task with at least ``min_attempts`` attempts has ``high_weight`` above a success rate of
    ``high``, ``low_weight`` below ``low``, else 1. Attempts of earlier steps decide; errors of the
    infrastructure are not attempts. The counters are JSON and part of a checkpoint's progress.
    """

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config
        self._counts: dict[str, list[int]] = {}  # task -> [attempts, successes]

    def restore(self, state: Mapping[str, Sequence[int]] | None) -> None:
        """Restore counters; None (an older checkpoint, or a start) resets them."""
        self._counts = {task: [int(n) for n in counts] for task, counts in (state or {}).items()}

    def state(self) -> dict[str, list[int]]:
        """A copy of ``{task: [attempts, successes]}``."""
        return {task: list(counts) for task, counts in self._counts.items()}

    def count(self, task: str, attempts: int, successes: int) -> None:
        """Add attempts at a task."""
        counts = self._counts.setdefault(task, [0, 0])
        counts[0] += attempts
        counts[1] += successes

    def weight(self, task: str) -> float:
        """The current factor on its advantages; 1 if the curriculum is off."""
        config = self.config
        attempts, successes = self._counts.get(task, (0, 0))
        if not config.enabled or attempts < config.min_attempts:
            return 1.0
        rate = successes / attempts
        if rate > config.high:
            return config.high_weight
        return config.low_weight if rate < config.low else 1.0
