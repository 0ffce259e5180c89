"""What was sampled and kept, in numbers.

In: attempts, batch by batch. Out: the report of a ``sample`` stage, and metrics of one batch.

``measured`` attempts are those with a score: neither the judge nor the infrastructure failed, and
their prompt has something to be rewarded for. A *full success* is one whose score reaches
``sample.success``, that ended by itself and can be read; ``success_rate`` is their share of the
measured ones, and ``acceptance`` counts prompts by how many full successes they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from refiner_core.contract.config import SampleConfig
from refiner_core.contract.errors import DataError
from refiner_core.rejection.attempts import Attempt
from refiner_core.rejection.selection import KEPT, form_of, is_full

_UNMEASURED = ("error", "unscored", "no_reward")


class Tally:
    """Counts of all attempts, or of those of one domain; whole prompts are added."""

    def __init__(self, rule: SampleConfig) -> None:
        self._rule = rule
        self._of_prompts: Counter[str] = Counter()
        self._acceptance: Counter[int] = Counter()
        self._attempts: Counter[str] = Counter()
        self._why: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._scores, self._partial, self._distinct = 0.0, 0.0, 0

    def add(self, attempts: Sequence[Attempt]) -> None:
        """All attempts at one prompt."""
        full = [a for a in attempts if is_full(a.candidate, self._rule)]
        kept = [a for a in attempts if a.kept]
        outcome = "full" if full else "partial" if kept else "none"
        self._of_prompts.update(("total", outcome))
        self._acceptance[len(full)] += 1
        self._distinct += len({form_of(a.candidate, self._rule) for a in full})
        self._why.update(a.why for a in attempts)
        self._errors.update(a.error_kind or "error" for a in attempts if a.status == "error")
        measured = [a for a in attempts if a.flaw not in _UNMEASURED]
        self._attempts.update(total=len(attempts), measured=len(measured), full=len(full))
        self._scores += sum(a.score or 0.0 for a in measured)
        self._partial += sum(a.partial or 0.0 for a in measured)
        self._tokens.update(
            sampled=sum(a.sampled_tokens for a in attempts),
            kept=sum(a.sampled_tokens for a in kept),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        measured, full = self._attempts["measured"], self._attempts["full"]
        return {
            "prompts": {name: self._of_prompts[name] for name in _OUTCOMES},
            "acceptance": {str(n): self._acceptance[n] for n in range(self._rule.attempts + 1)},
            "attempts": {name: self._attempts[name] for name in ("total", "measured", "full")},
            "success_rate": full / measured if measured else None,
            "score_mean": self._scores / measured if measured else None,
            "partial_mean": self._partial / measured if measured else None,
            "distinct_full": self._distinct,
            "kept": {
                "demonstrations": sum(self._why[why] for why in KEPT),
                **{why: self._why[why] for why in KEPT},
            },
            "not_kept": {why: n for why, n in sorted(self._why.items()) if why not in KEPT},
            "errors": dict(sorted(self._errors.items())),
            "tokens": {name: self._tokens[name] for name in ("sampled", "kept")},
        }


_OUTCOMES = ("total", "full", "partial", "none")


class Report:
    """The report of a stage, as batches are added."""

    def __init__(self, rule: SampleConfig, lane: str) -> None:
        self._rule, self._lane = rule, lane
        self._all, self._domains = Tally(rule), dict[str, Tally]()

    def add(self, attempts: Sequence[Attempt]) -> None:
        """A batch: all attempts at some prompts, prompt by prompt."""
        size = self._rule.attempts
        for first in range(0, len(attempts), size):
            group = attempts[first : first + size]
            self._all.add(group)
            self._domains.setdefault(group[0].domain, Tally(self._rule)).add(group)

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``lane`` is ``answers`` or ``episodes``."""
        rule = self._rule
        of_rule = ("attempts", "temperature", "success", "min_partial", "max_kept", "distinct")
        return {
            "lane": self._lane,
            "rule": {name: getattr(rule, name) for name in of_rule},
            **self._all.as_json(),
            "by_domain": {name: self._domains[name].as_json() for name in sorted(self._domains)},
        }


def require_kept(report: dict[str, Any]) -> None:
    """Refuse to leave nothing to train on.

    Raises
    ------
    DataError
        With the numbers of acceptance, and the fields to lower.
    """
    if report["kept"]["demonstrations"]:
        return
    attempts, prompts, rule = report["attempts"], report["prompts"], report["rule"]
    why = ", ".join(f"{n} {name}" for name, n in report["not_kept"].items())
    mean = report["score_mean"]
    shown = "" if mean is None else f", {mean:.3f} on average"
    policy = sum(report["not_kept"].get(name, 0) for name in ("malformed", "truncated"))
    fix = "lower sample.success or sample.min_partial, or raise sample.attempts"
    if policy >= attempts["measured"]:  # no threshold is in the way
        fix = "train longer before `rft`, or raise grpo.response_length"
    raise DataError(
        f"Of {attempts['total']} attempts at {prompts['total']} prompts none is kept: "
        f"{attempts['measured']} have a score{shown}, {attempts['full']} reach "
        f"sample.success={rule['success']:g}, and no prompt's best one has a partial score of "
        f"sample.min_partial={rule['min_partial']:g} ({why})",
        expected="at least one attempt to fine-tune on",
        fix=fix,
    )


def batch_metrics(number: int, attempts: Sequence[Attempt]) -> dict[str, float]:
    """The numbers that a batch logs."""
    total = len(attempts)
    scores = [a.score for a in attempts if a.score is not None and a.flaw not in _UNMEASURED]
    why = Counter(attempt.why for attempt in attempts)
    tokens = [attempt.sampled_tokens for attempt in attempts]
    metrics: dict[str, float] = {
        "sample/batch": number,
        "sample/attempts": total,
        "sample/kept": sum(why[name] for name in KEPT),
        "sample/kept_share": sum(why[name] for name in KEPT) / total,
        "sample/errors": why["error"],
        "sample/unscored": why["unscored"],
        "val/sequence_lengths": sum(tokens) / total,
    }
    if scores:
        metrics["scores"] = sum(scores) / len(scores)
        partial = [a.partial or 0.0 for a in attempts if a.flaw not in _UNMEASURED]
        metrics["sample/partial"] = sum(partial) / len(partial)
    return metrics
