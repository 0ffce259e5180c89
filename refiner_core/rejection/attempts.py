"""An attempt at a prompt, as a value and as a row of ``attempts.parquet``.

In: sampled attempts and their rewards. Out: Parquet files, and back; the same rows give the
same bytes. Rewards' components and details are stored as JSON text. ``status`` is ``sampled`` while
an attempt waits for its reward.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from refiner_core.contract.config import SampleConfig
from refiner_core.contract.errors import DamagedCheckpoint, DataError
from refiner_core.contract.files import replacing
from refiner_core.contract.records import picked

#: Rounding tolerance of scores, which are sums of products, at a threshold.
EPSILON = 1e-9
#: Why an attempt is no candidate. ``unscored``: the judge failed; ``error``: the infrastructure
#: failed; ``no_reward``: its prompt has no possible reward; the others are the policy's faults.
Flaw = Literal["", "error", "unscored", "no_reward", "malformed", "truncated"]
#: Results of the selection.
Why = (
    Flaw
    | Literal[
        "full_success", "best_partial", "duplicate", "surplus", "too_low", "not_best", "not_full"
    ]
)
#: Results of kept attempts.
KEPT: tuple[Why, ...] = ("full_success", "best_partial")
Status = Literal["sampled", "scored", "malformed", "unscored", "error"]
#: Columns of JSON text.
_JSON = ("components", "detail")


@dataclass(frozen=True)
class RejectionAttempt:
    """One attempt.

    Attributes
    ----------
    sample_id, domain, index, seed
        Its prompt, its number, and its seed. ``domain`` of an answer is its prompt's
        ``refiner_mode``.
    token_ids, own
        All tokens after the prompt, and the mask of sampled ones (None: all).
    text
        The sampled text, for people and for comparing attempts.
    ended
        ``stop`` or ``length`` for an answer; the end reason of an episode.
    status, flaw
        See :func:`choose`.
    score, partial
        1 is full: an answer's share of the highest reward of its prompt (partial is the
        same), an episode's reward and partial score.
    reward
        The reward itself.
    tools
        Names of called tools, in order; None for an answer.
    components, detail
        Parts of the reward; judgements of an answer, or the record of an episode.
    """

    sample_id: str
    domain: str
    index: int
    seed: int
    token_ids: tuple[int, ...]
    text: str
    ended: str
    own: tuple[bool, ...] | None = None
    status: Status = "sampled"
    flaw: Flaw = ""
    score: float | None = None
    partial: float | None = None
    reward: float | None = None
    tools: tuple[str, ...] | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    detail: Any = None
    error_kind: str = ""
    error: str = ""
    kept: bool = False
    why: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """Id of its prompt, and its number."""
        return self.sample_id, self.index

    @property
    def sampled_tokens(self) -> int:
        """Number of its tokens that the model sampled."""
        return len(self.token_ids) if self.own is None else sum(self.own)

    def is_full(self, rule: SampleConfig) -> bool:
        """True if it is a full success: high score, ended by itself, readable."""
        score = self.score
        return not self.flaw and score is not None and score >= rule.success - EPSILON

    def form(self, rule: SampleConfig) -> tuple[object, ...]:
        """Key under which attempts are equal by ``sample.distinct``."""
        if rule.distinct == "none":
            return (self.index,)
        if rule.distinct == "tools" and self.tools is not None:
            return self.tools
        return (self.text,)


def choose(attempts: Sequence[RejectionAttempt], rule: SampleConfig) -> list[RejectionAttempt]:
    """All of one prompt's attempts, in order, with the result of the selection.

    1. Unusable demonstrations are out: no score (the judge or the infrastructure failed), no
       single readable answer or tool call at the end (``malformed``), cut off by a limit
       (``truncated``). From truncated text a model learns not to end.
    2. Every full success is kept: a score of at least ``sample.success``. Of several that are
       equal by ``sample.distinct`` one is kept, and no more than ``sample.max_kept`` in total.
    3. Without one, the best attempt is kept if its partial score is at least
       ``sample.min_partial``.

    A choice among several prefers the better score, then the lower number: nothing
    depends on the time of an attempt.
    """
    left = [place for place, attempt in enumerate(attempts) if not attempt.flaw]
    full = [place for place in left if attempts[place].is_full(rule)]
    why: dict[int, Why] = {place: a.flaw for place, a in enumerate(attempts) if a.flaw}
    why |= dict.fromkeys(left, "not_full" if full else "not_best")
    forms: set[tuple[object, ...]] = set()
    for place in sorted(full, key=lambda p: (-_number(attempts[p].score), attempts[p].index)):
        form = attempts[place].form(rule)
        if form in forms:
            why[place] = "duplicate"
        elif rule.max_kept is not None and len(forms) >= rule.max_kept:
            why[place] = "surplus"
        else:
            forms.add(form)
            why[place] = "full_success"
    if left and not full:
        best = min(left, key=lambda p: (-_number(attempts[p].partial), attempts[p].index))
        enough = _number(attempts[best].partial) >= rule.min_partial - EPSILON
        why[best] = "best_partial" if enough else "too_low"
    return [replace(a, kept=why[i] in KEPT, why=why[i]) for i, a in enumerate(attempts)]


def _number(value: float | None) -> float:
    return float("-inf") if value is None else value


_IDS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_MASK = pa.list_(pa.field("element", pa.bool_(), nullable=False))
_TYPES: dict[str, Any] = {
    "index": pa.int32(),
    "seed": pa.int64(),
    "token_ids": _IDS,
    "own": _MASK,
    "tools": pa.list_(pa.string()),
    "kept": pa.bool_(),
    **dict.fromkeys(("score", "partial", "reward"), pa.float64()),
}
SCHEMA = pa.schema(
    [pa.field(f.name, _TYPES.get(f.name, pa.string())) for f in fields(RejectionAttempt)],
    metadata={b"refiner.kind": b"attempts", b"refiner.format": b"1"},
)


@contextmanager
def writing_attempts(path: Path) -> Iterator[Callable[[Sequence[RejectionAttempt]], None]]:
    """A file of attempts, written batch by batch; complete or absent."""
    with replacing(path) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:

        def write(attempts: Sequence[RejectionAttempt]) -> None:
            rows = [_row(attempt) for attempt in attempts]
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))

        yield write


def write_attempts(path: Path, attempts: Sequence[RejectionAttempt]) -> None:
    """Write a file of attempts."""
    with writing_attempts(path) as write:
        write(attempts)


def load_attempts(path: Path) -> list[RejectionAttempt]:
    """Read a file of attempts.

    Raises
    ------
    DamagedCheckpoint
        It is not such a file.
    """
    try:
        return [_attempt(row) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowInvalid, OSError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(
            f"{path} holds no attempts ({error})",
            expected="an undamaged file",
            fix="none needed; the stage resumes from the previous checkpoint",
        ) from error


def _row(attempt: RejectionAttempt) -> dict[str, Any]:
    values = {f.name: getattr(attempt, f.name) for f in fields(RejectionAttempt)}
    values["components"] = dict(attempt.components)
    for name in _JSON:
        values[name] = json.dumps(values[name], ensure_ascii=False, sort_keys=True)
    return values


def _attempt(row: dict[str, Any]) -> RejectionAttempt:
    for name in _JSON:
        row[name] = json.loads(row[name])
    for name in ("token_ids", "own", "tools"):
        row[name] = None if row[name] is None else tuple(row[name])
    return RejectionAttempt(**row)


_UNMEASURED = ("error", "unscored", "no_reward")


class _Tally:
    """Counts of all attempts, or of those of one domain; adds whole prompts."""

    def __init__(self, rule: SampleConfig) -> None:
        self._rule = rule
        self._counts: defaultdict[str, Counter[Any]] = defaultdict(Counter)
        self._scores, self._partial, self._distinct = 0.0, 0.0, 0

    def add(self, attempts: Sequence[RejectionAttempt]) -> None:
        """Add all attempts at one prompt."""
        counts = self._counts
        full = [a for a in attempts if a.is_full(self._rule)]
        kept = [a for a in attempts if a.kept]
        measured = [a for a in attempts if a.flaw not in _UNMEASURED]
        outcome = "full" if full else "partial" if kept else "none"
        counts["prompts"].update(("total", outcome))
        counts["acceptance"][len(full)] += 1
        counts["why"].update(a.why for a in attempts)
        counts["errors"].update(a.error_kind or "error" for a in attempts if a.status == "error")
        counts["attempts"].update(total=len(attempts), measured=len(measured), full=len(full))
        self._scores += sum(a.score or 0.0 for a in measured)
        self._partial += sum(a.partial or 0.0 for a in measured)
        self._distinct += len({a.form(self._rule) for a in full})
        counts["tokens"].update(
            sampled=sum(a.sampled_tokens for a in attempts),
            kept=sum(a.sampled_tokens for a in kept),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        counts, why = self._counts, self._counts["why"]
        measured, full = counts["attempts"]["measured"], counts["attempts"]["full"]
        return {
            "prompts": {name: counts["prompts"][name] for name in _OUTCOMES},
            "acceptance": {str(n): counts["acceptance"][n] for n in range(self._rule.attempts + 1)},
            "attempts": dict(counts["attempts"]),
            "success_rate": full / measured if measured else None,
            "score_mean": self._scores / measured if measured else None,
            "partial_mean": self._partial / measured if measured else None,
            "distinct_full": self._distinct,
            "kept": {
                "demonstrations": sum(why[name] for name in KEPT),
                **{name: why[name] for name in KEPT},
            },
            "not_kept": {name: n for name, n in sorted(why.items()) if name not in KEPT},
            "errors": dict(sorted(counts["errors"].items())),
            "tokens": dict(counts["tokens"]),
        }


_OUTCOMES = ("total", "full", "partial", "none")


class RejectionReport:
    """A stage's report, updated batch by batch."""

    def __init__(self, rule: SampleConfig, lane: str) -> None:
        self._rule, self._lane, self._all = rule, lane, _Tally(rule)
        self._domains: defaultdict[str, _Tally] = defaultdict(lambda: _Tally(rule))

    def add(self, attempts: Sequence[RejectionAttempt]) -> None:
        """Add a batch: all attempts at some prompts, prompt by prompt."""
        for _, found in groupby(attempts, key=lambda attempt: attempt.sample_id):
            group = list(found)
            self._all.add(group)
            self._domains[group[0].domain].add(group)

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``lane`` is ``answers`` or ``episodes``."""
        of_rule = ("attempts", "temperature", "success", "min_partial", "max_kept", "distinct")
        return {
            "lane": self._lane,
            "rule": picked(self._rule, *of_rule),
            **self._all.as_json(),
            "by_domain": {name: one.as_json() for name, one in sorted(self._domains.items())},
        }


def require_kept(report: dict[str, Any]) -> None:
    """Raise if there is nothing to train on.

    Raises
    ------
    DataError
        The message has the acceptance counts, and the fields to lower.
    """
    if report["kept"]["demonstrations"]:
        return
    attempts, prompts, rule = report["attempts"], report["prompts"], report["rule"]
    why = ", ".join(f"{n} {name}" for name, n in report["not_kept"].items())
    policy = sum(report["not_kept"].get(name, 0) for name in ("malformed", "truncated"))
    fix = "lower sample.success or sample.min_partial, or raise sample.attempts"
    if policy >= attempts["measured"]:  # the thresholds are not the cause
        fix = "train longer before `rft`, or raise grpo.response_length"
    mean = 0.0 if report["score_mean"] is None else report["score_mean"]
    raise DataError(
        f"Of {attempts['total']} attempts at {prompts['total']} prompts none is kept ({why}); "
        f"{attempts['measured']} have a score, {mean:.3f} on average",
        expected=f"a score of sample.success={rule['success']:g}, or of a prompt's best attempt a "
        f"partial score of sample.min_partial={rule['min_partial']:g}",
        fix=fix,
    )


def batch_metrics(number: int, attempts: Sequence[RejectionAttempt]) -> dict[str, float]:
    """The metrics that a batch logs."""
    total, why = len(attempts), Counter(attempt.why for attempt in attempts)
    measured = [a for a in attempts if a.flaw not in _UNMEASURED]
    scores = [a.score for a in measured if a.score is not None]
    kept = sum(why[name] for name in KEPT)
    metrics: dict[str, float] = {
        "sample/batch": number,
        "sample/attempts": total,
        "sample/kept": kept,
        "sample/kept_share": kept / total,
        "sample/errors": why["error"],
        "sample/unscored": why["unscored"],
        "val/sequence_lengths": sum(a.sampled_tokens for a in attempts) / total,
    }
    if scores:
        metrics["scores"] = sum(scores) / len(scores)
        metrics["sample/partial"] = sum(a.partial or 0.0 for a in measured) / len(measured)
    return metrics
