"""An attempt at a prompt, as a value and as a row of ``attempts.parquet``.

In: what was sampled and what it was worth. Out: Parquet files, and back; the same rows give the
same bytes. Rewards' components and details travel as JSON text. ``status`` is ``sampled`` while an
attempt waits for its reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from refiner_core.contract.errors import DamagedCheckpoint
from refiner_core.contract.files import replacing
from refiner_core.rejection.selection import Candidate, Choice, Flaw

Status = Literal["sampled", "scored", "malformed", "unscored", "error"]
#: Columns that hold JSON.
_JSON = ("components", "detail")


class Key(NamedTuple):
    """Which attempt at which prompt."""

    sample_id: str
    number: int


@dataclass(frozen=True)
class Attempt:
    """One attempt.

    Attributes
    ----------
    sample_id, domain, index, seed
        Of which prompt, which of its attempts, and what decides its randomness. ``domain`` of an
        answer is its prompt's ``refiner_mode``.
    token_ids, own
        All tokens after the prompt, and which of them were sampled (None: all).
    text
        What was sampled, for people and for telling attempts apart.
    ended
        ``stop`` or ``length`` of an answer; how an episode ended.
    status, flaw
        See :mod:`.selection`.
    score, partial
        1 is full: an answer's share of the highest reward that its prompt can give (partial is the
        same), an episode's reward and partial score.
    reward
        The reward itself.
    tools
        The tools called, in order; None for an answer.
    components, detail
        Parts of the reward; judgements of an answer, the record of an episode.
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
    def key(self) -> Key:
        """Which one it is."""
        return Key(self.sample_id, self.index)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the model sampled and that stand in it."""
        return len(self.token_ids) if self.own is None else sum(self.own)

    @property
    def candidate(self) -> Candidate:
        """For the rule."""
        return Candidate(self.index, self.flaw, self.score, self.partial, self.tools, self.text)

    def chosen(self, choice: Choice) -> Attempt:
        """With what became of it."""
        return replace(self, kept=choice.kept, why=choice.why)


_IDS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_MASK = pa.list_(pa.field("element", pa.bool_(), nullable=False))
_TYPES: dict[str, Any] = {
    "sample_id": pa.string(),
    "domain": pa.string(),
    "index": pa.int32(),
    "seed": pa.int64(),
    "token_ids": _IDS,
    "own": _MASK,
    "text": pa.string(),
    "ended": pa.string(),
    "status": pa.string(),
    "flaw": pa.string(),
    "score": pa.float64(),
    "partial": pa.float64(),
    "reward": pa.float64(),
    "tools": pa.list_(pa.string()),
    "components": pa.string(),
    "detail": pa.string(),
    "error_kind": pa.string(),
    "error": pa.string(),
    "kept": pa.bool_(),
    "why": pa.string(),
}
SCHEMA = pa.schema(
    [pa.field(f.name, _TYPES[f.name]) for f in fields(Attempt)],
    metadata={b"refiner.kind": b"attempts", b"refiner.format": b"1"},
)


def write_attempts(path: Path, attempts: Sequence[Attempt]) -> None:
    """Write a file of attempts; whole or not at all."""
    rows = [_row(attempt) for attempt in attempts]
    with replacing(path) as file:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file, compression="zstd")


def load_attempts(path: Path) -> list[Attempt]:
    """Read a file of attempts.

    Raises
    ------
    DamagedCheckpoint
        It is none.
    """
    try:
        return [_attempt(row) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowInvalid, OSError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(
            f"{path} holds no attempts ({error})",
            expected="a file as it was saved",
            fix="nothing; the checkpoint before it is gone on from",
        ) from error


def join_files(parts: Sequence[Path], target: Path) -> None:
    """One file of all parts' rows, in order; one part in memory at a time."""
    with replacing(target) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for part in parts:
            writer.write_table(pq.read_table(part))


def _row(attempt: Attempt) -> dict[str, Any]:
    values = {f.name: getattr(attempt, f.name) for f in fields(Attempt)}
    values["components"] = dict(attempt.components)
    for name in _JSON:
        values[name] = json.dumps(values[name], ensure_ascii=False, sort_keys=True)
    return values


def _attempt(row: dict[str, Any]) -> Attempt:
    for name in _JSON:
        row[name] = json.loads(row[name])
    for name in ("token_ids", "own", "tools"):
        row[name] = None if row[name] is None else tuple(row[name])
    return Attempt(**row)
