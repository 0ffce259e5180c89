"""Check of a file of rows before a run.

In: a recipe's configuration that names the file, and its tokenizer if there is one. Out: a
:class:`DataCheck`: every row that a run would refuse or drop, with line, reason and fix; lengths
against the recipe's windows; questions of the held-out side that nearly repeat one of the training
side. The rules are those of the data stage (:mod:`refiner_core.data.prepare`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from refiner_core.answers import compared
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.data.datacard import percentiles
from refiner_core.data.prepare import RowSelection
from refiner_core.data.rows import DataRow, choose_questions, parse_any_row, same_questions
from refiner_core.data.sources import RawRow, Which, read_all_rows

#: Reason for dropping a row -> what it means, and the fix.
DROPPED: Mapping[str, tuple[str, str]] = {
    "wrong_mode": ("its refiner_mode is not data.refiner_mode", "leave data.refiner_mode empty"),
    "no_tool_output": (
        "its prompt has no evidence to cite",
        "put evidence into the prompt: <tool_output><snippet id=S1>…</snippet></tool_output>",
    ),
    "duplicate": ("it repeats an earlier row", "nothing: the first one is used"),
    "control_token": (
        "its text contains a special token of the tokenizer",
        "remove the token from the text",
    ),
    "reasoning": (
        "it is answer_only, and its answer has reasoning (</think>)",
        "remove the reasoning, or set metadata.refiner_mode",
    ),
    "prompt_too_long": (
        "its prompt is longer than data.max_prompt_token_length",
        "shorten the evidence, or raise data.max_prompt_token_length",
    ),
    "answer_too_long": (
        "prompt and answer are longer than sft.pack_length",
        "shorten them, or raise sft.pack_length",
    ),
    "too_long_for_pack": (
        "prompt and grpo.response_length are longer than grpo.max_token_length",
        "shorten the prompt, or raise grpo.max_token_length",
    ),
}
#: Two questions with this share of words and pairs of words in common nearly repeat each other.
NEAR = 0.7
_HASHES, _BANDS, _PRIME = 32, 8, (1 << 31) - 1


@dataclass(frozen=True)
class RowProblem:
    """One row that a run would refuse (``refused``) or drop."""

    line: int
    refused: bool
    reason: str
    fix: str


class NearRepetition(NamedTuple):
    """A held-out question that nearly repeats a training question: lines, and the share."""

    training_line: int
    held_out_line: int
    share: float
    question: str


@dataclass(frozen=True)
class DataCheck:
    """Result of a check.

    Attributes
    ----------
    which
        ``sft`` (demonstrations) or ``rl`` (prompts with rubrics).
    rows, usable
        All rows, and those that a run would use.
    problems
        In the order of the file.
    lengths
        Tokens of prompts (``prompt``) and of prompts with answers (``total``): percentiles; empty
        without a tokenizer.
    windows
        The recipe's limits of these, by field.
    questions, held_out, near
        Distinct questions, those that the recipe would hold out, and near repetitions across the
        split.
    """

    which: Which
    rows: int
    usable: int
    problems: tuple[RowProblem, ...]
    lengths: Mapping[str, Mapping[str, int]]
    windows: Mapping[str, int]
    questions: int
    held_out: int
    near: tuple[NearRepetition, ...]

    @property
    def refused(self) -> int:
        """Number of rows for which a run would end with an error."""
        return sum(problem.refused for problem in self.problems)


def check_rows(
    config: RecipeConfig,
    which: Which,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DataCheck:
    """Check all rows of ``data.{which}_path``.

    Parameters
    ----------
    tokenizer
        The recipe's; without one no lengths are checked.
    progress
        Receives the number of rows read, and 0.

    Raises
    ------
    DataError
        The file has no rows, or cannot be read at all.
    """
    selection = RowSelection(config, which, tokenizer, None)
    problems, seen, kept, count = list[RowProblem](), set[str](), list[tuple[int, DataRow]](), 0
    for count, raw in enumerate(read_all_rows(selection.source), start=1):
        progress(count, 0)
        line = raw.line if isinstance(raw, RawRow) else _line_of(raw, count)
        row = parse_any_row(raw, which)
        if isinstance(row, DataError):
            reason = row.what.partition(f":{line} ")[2] or row.what
            problems.append(RowProblem(line, True, f"{reason}; expected {row.expected}", row.fix))
            continue
        reason = selection.reason_to_drop(row, seen) or _too_long(selection, row)
        if reason:
            problems.append(RowProblem(line, False, *DROPPED[reason]))
            continue
        seen.add(row.content_key)
        kept.append((line, row))
    data, tally = config.data, selection.tally
    question_of = same_questions([row.question_names for _, row in kept])
    asked = [question_of[row.question_names[0]] for _, row in kept]
    held_out = set[str]()
    if which == "rl" and not data.all_held_out:
        share = data.held_out_fraction or 0.0
        held_out = choose_questions(asked, share, data.split_seed, "held_out")
    totals = tally.total_lengths
    lengths = {"prompt": percentiles(tally.prompt_lengths), "total": percentiles(totals)}
    windows = {"data.max_prompt_token_length": data.max_prompt_token_length}
    windows |= {"sft.pack_length": config.sft.pack_length} if which == "sft" else {}
    return DataCheck(
        which=which,
        rows=count,
        usable=len(kept),
        problems=tuple(problems),
        lengths={name: found for name, found in lengths.items() if found},
        windows=windows,
        questions=len(set(asked)),
        held_out=len(held_out),
        near=tuple(_near_repetitions(kept, [question in held_out for question in asked])),
    )


def _line_of(error: DataError, count: int) -> int:
    """Line of an unreadable row: ``file:LINE is not JSON``."""
    number = error.what.split(" ", 1)[0].rpartition(":")[2]
    return int(number) if number.isdigit() else count


def _too_long(selection: RowSelection, row: DataRow) -> str:
    if selection.tokenizer is None:
        return ""
    made = selection.prompt(row) if row.answer is None else selection.demonstration(row, set())
    return made if isinstance(made, str) else ""


def _near_repetitions(
    kept: Sequence[tuple[int, DataRow]], is_held_out: Sequence[bool]
) -> list[NearRepetition]:
    """Pairs of questions across the split that share most of their words, by MinHash: candidates
    agree in a band of hashes, and are then compared exactly."""
    if not any(is_held_out):
        return []
    words = [_features(row.question) for _, row in kept]
    dice = np.random.default_rng(0)
    factors = dice.integers(1, _PRIME, size=(2, _HASHES, 1), dtype=np.int64)
    buckets: dict[tuple[int, bytes], list[int]] = {}
    for index, features in enumerate(words):
        hashes = np.array([zlib.crc32(w.encode()) % _PRIME for w in features], dtype=np.int64)
        least = ((factors[0] * hashes + factors[1]) % _PRIME).min(axis=1)
        for band, part in enumerate(least.reshape(_BANDS, -1)):
            buckets.setdefault((band, part.tobytes()), []).append(index)
    found: dict[int, NearRepetition] = {}
    for members in buckets.values():
        held = [i for i in members if is_held_out[i] and i not in found]
        trained = [i for i in members if not is_held_out[i]] if held else []
        for one in held:
            for other in trained[:_MOST_COMPARED]:
                share = len(words[one] & words[other]) / len(words[one] | words[other])
                if share >= NEAR:
                    found[one] = NearRepetition(
                        kept[other][0], kept[one][0], round(share, 3), kept[one][1].question
                    )
                    break
    return [found[index] for index in sorted(found)]


#: Training questions that a held-out one of the same band is compared with.
_MOST_COMPARED = 50


def _features(question: str) -> set[str]:
    """Words, and pairs of neighbouring words."""
    words = compared(question).split() or [""]
    return {*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))}
