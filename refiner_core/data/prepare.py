"""The data stage: raw rows to prepared files, with every dropped row counted.

In: the recipe's ``data`` section, the lengths of ``sft`` and ``grpo``, and a tokenizer.
Out, in one folder: ``rl_train.parquet``, ``rl_test.parquet`` (held out), ``sft_train.parquet``,
``sft_val.parquet``, ``report.json`` and ``README.md`` (a data card).

Rows are kept or dropped whole, never cut. Reasons for dropping a row:

==================== ========================================================================
wrong_mode           its ``refiner_mode`` is not ``data.refiner_mode``
no_tool_output       the prompt has no evidence to cite
duplicate            the same prompt, answer and rubrics as in an earlier row
control_token        its text contains a special token of the tokenizer, e.g. ``<|im_end|>``
reasoning            an ``answer_only`` demonstration with reasoning (``</think>``)
held_out_question    a demonstration for a held-out question
prompt_too_long      prompt > ``data.max_prompt_token_length``
answer_too_long      prompt + answer > ``sft.pack_length``
too_long_for_pack    prompt + ``grpo.response_length`` > ``grpo.max_token_length``
over_max_rows        ``data.max_sft_rows`` / ``data.max_rl_rows`` were reached first
==================== ========================================================================

The same input and configuration give the same bytes. The split and the choice of rows under a limit
depend on ``data.split_seed`` and on the rows' content, not on their order.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError, Interrupted
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import DemonstrationRow, Progress, PromptRow, StageIO
from refiner_core.data import chat
from refiner_core.data.datacard import in_order, make_report, tally_of, write_report
from refiner_core.data.prepared import write_demonstrations, write_prompts
from refiner_core.data.rows import (
    DEFAULT_MODE,
    DataRow,
    bad_rows,
    choose_questions,
    parse_any_row,
    same_questions,
)
from refiner_core.data.sources import Which, read_all_rows, resolve_source

FILES = ("sft_train.parquet", "sft_val.parquet", "rl_train.parquet", "rl_test.parquet")
T = TypeVar("T")
#: Training rows, and the others.
Sides = tuple[list[T], list[T]]


class _KeptRow(NamedTuple, Generic[T]):
    """A row that passed, and its result."""

    row: DataRow
    made: T


def prepare_data(
    config: RecipeConfig, *, tokenizer: Any, output_dir: Path, io: StageIO | None = None
) -> dict[str, Any]:
    """Prepare all rows of a recipe and write them to ``output_dir``.

    Returns
    -------
    dict
        The report, as in ``report.json``: per kind of row ``read``, ``kept``,
        ``dropped`` by reason and length percentiles; the split; files with rows and SHA-256.

    Raises
    ------
    DataError
        A source or row is invalid, or nothing is left (the message names the field to raise).
    ConfigurationError
        The recipe names no source, or the chat template does not allow an exact loss mask.
    Interrupted
        ``io`` requested a stop.
    """
    data = config.data
    if all(resolve_source(data, which).kind == "none" for which in ("sft", "rl")):
        raise ConfigurationError(
            "Both data.sft_path and data.rl_path are empty",
            expected="at least one source of rows",
            fix="set data.sft_path=FILE or data.rl_path=FILE",
        )
    rl = RowSelection(config, "rl", tokenizer, io)
    sft = RowSelection(config, "sft", tokenizer, io)
    prompts = rl.select(rl.prompt)
    held_out = _held_out(config, prompts)
    demonstrations = sft.select(lambda row: sft.demonstration(row, held_out.names))
    sft.tally.loss_lengths += [sum(kept.made.loss_mask) for kept in demonstrations]
    validation = _choose(demonstrations, data.validation_fraction, data.split_seed, "validation")
    files = write_rows(
        output_dir,
        _on_each_side(demonstrations, validation.names),
        _on_each_side(prompts, held_out.names),
    )
    split = {
        "questions": held_out.of,
        "held_out_questions": held_out.questions,
        "rl_without_rubrics": sum(not any(json.loads(k.row.rubrics).values()) for k in prompts),
    }
    report = make_report(config, tokenizer, {"sft": sft.tally, "rl": rl.tally}, split, files)
    write_report(output_dir, report)
    return report


def tell(io: StageIO | None, done: int, total: int, phase: str, every: int = 64) -> None:
    """Report the progress of the data stage, and stop if requested.

    Raises
    ------
    Interrupted
        ``io`` requests a stop.
    """
    if io is None or done % every:
        return
    io.progress(Progress(done, max(done, total), phase))
    if io.should_stop():
        raise Interrupted(
            f"Stopped while preparing data ({phase}, row {done})",
            fix="run the same command again; the data stage starts over",
        )


def write_rows(
    output_dir: Path, sft: Sides[DemonstrationRow], rl: Sides[PromptRow]
) -> dict[str, tuple[Path, int]]:
    """Write the four files; path and number of rows by name."""
    paths = [output_dir / name for name in FILES]
    for path, demonstrated in zip(paths[:2], sft, strict=True):
        write_demonstrations(path, demonstrated)
    for path, asked in zip(paths[2:], rl, strict=True):
        write_prompts(path, asked)
    counts = [len(side) for side in (*sft, *rl)]
    return {path.name: (path, count) for path, count in zip(paths, counts, strict=True)}


# ---------------------------------------------------------------- selection of rows


class RowSelection:
    """Rows of one source: read, filtered, encoded, counted."""

    def __init__(
        self, config: RecipeConfig, which: Which, tokenizer: Any, io: StageIO | None
    ) -> None:
        self.config, self.which, self.tokenizer, self.io = config, which, tokenizer, io
        self.source = resolve_source(config.data, which)
        self.tally, self.differing_ids = tally_of(config, which), 0

    def select(self, make: Callable[[DataRow], T | str]) -> list[_KeptRow[T]]:
        """Read, filter and encode; ``make`` returns a row's result, or the reason for dropping
        it."""
        tally, rows, which = self.tally, self._candidates(), self.which
        limit: int | None = getattr(self.config.data, f"max_{which}_rows")
        order = list(range(len(rows)))
        if limit is not None:  # a seeded choice, so that a file sorted by topic gives all topics
            seed = self.config.data.split_seed
            order.sort(key=lambda i: derive_seed(seed, "limit", which, rows[i].content_key))
        found: dict[int, _KeptRow[T]] = {}
        for done, index in enumerate(order, start=1):
            if limit is not None and len(found) >= limit:
                tally.dropped["over_max_rows"] += len(rows) - done + 1
                break
            tell(self.io, done, len(rows), f"tokenise {which}")
            made = make(rows[index])
            if isinstance(made, str):
                tally.dropped[made] += 1
            else:
                found[index] = _KeptRow(rows[index], made)
        tally.kept = len(found)
        tally.more = {
            "modes": in_order(tally.names),
            "ids_with_differing_texts": self.differing_ids,
        }
        if self.source.kind != "none" and not found:
            raise self._nothing_left()
        return [found[index] for index in sorted(found)]

    def _candidates(self) -> list[DataRow]:
        """Valid rows that pass the rules without tokens."""
        tally, seen, rows = self.tally, set[str](), list[DataRow]()
        errors: list[DataError] = []
        for raw in read_all_rows(self.source):
            tally.read += 1
            tell(self.io, tally.read, 0, f"read {self.which}")
            row = parse_any_row(raw, self.which)
            if isinstance(row, DataError):
                errors.append(row)
                continue
            tally.names[row.refiner_mode] += 1
            if reason := self.reason_to_drop(row, seen):
                tally.dropped[reason] += 1
                continue
            seen.add(row.content_key)
            self.differing_ids += row.evidence.differing
            rows.append(row)
        if errors:
            raise bad_rows(errors, tally.read, self.source)
        return rows

    def reason_to_drop(self, row: DataRow, seen: set[str]) -> str:
        """Reason for dropping a row before its tokens are counted; empty if there is none."""
        if self.config.data.refiner_mode not in (None, row.refiner_mode):
            return "wrong_mode"
        if not row.evidence:
            return "no_tool_output"
        if row.content_key in seen:
            return "duplicate"
        if self.tokenizer and chat.control_token(row, self.tokenizer) is not None:
            return "control_token"
        thinks = row.refiner_mode == DEFAULT_MODE and "</think>" in (row.answer or "")
        return "reasoning" if thinks else ""

    def prompt(self, row: DataRow) -> PromptRow | str:
        """A row as a prompt, or the reason for dropping it."""
        ids, grpo = chat.encode_prompt(row, self.tokenizer), self.config.grpo
        self.tally.prompt_lengths.append(len(ids))
        if len(ids) > self.config.data.max_prompt_token_length:
            return "prompt_too_long"
        if len(ids) + grpo.response_length > grpo.max_token_length:
            return "too_long_for_pack"
        return PromptRow(
            *(row.sample_id, row.question, row.prompt_text, ids),
            *(row.rubrics, row.refiner_mode, row.truth),
        )

    def demonstration(self, row: DataRow, held_out: set[str]) -> DemonstrationRow | str:
        """A row as a demonstration, or the reason for dropping it."""
        if not held_out.isdisjoint(row.question_names):
            return "held_out_question"
        ids, loss_mask, prompt_length = chat.encode_demonstration(row, self.tokenizer)
        self.tally.prompt_lengths.append(prompt_length)
        self.tally.total_lengths.append(len(ids))
        if prompt_length > self.config.data.max_prompt_token_length:
            return "prompt_too_long"
        if len(ids) > self.config.sft.pack_length:
            return "answer_too_long"
        return DemonstrationRow(row.sample_id, ids, loss_mask)

    def _nothing_left(self) -> DataError:
        """The reasons why no row is left, with the field that would keep some."""
        config, tally, path = self.config, self.tally, f"data.{self.which}_path="
        what = f"None of the {tally.read} rows of {path}{self.source.path} is usable "
        what += f"({tally.reasons})"
        prompt = min(tally.prompt_lengths, default=0)
        too_long = {
            "prompt_too_long": ("data.max_prompt_token_length", prompt),
            "answer_too_long": ("sft.pack_length", min(tally.total_lengths, default=0)),
            "too_long_for_pack": ("grpo.max_token_length", prompt + config.grpo.response_length),
        }
        for reason, (field, needed) in too_long.items():
            if tally.dropped[reason]:
                return DataError(
                    f"{what}: the shortest needs {needed} tokens",
                    expected=f"at most {attrgetter(field)(config)} ({field}); rows are never cut",
                    fix=f"set {field}={needed} or more, if the model's window allows it",
                )
        modes = ", ".join(sorted(tally.names))
        return DataError(
            what,
            expected="prompts with <tool_output> that holds <snippet id=…> or <webpage id=…>, of "
            f"refiner_mode {config.data.refiner_mode or 'of any kind'}; there are only {modes}",
            fix=f"correct the rows by these reasons, set {path} to others, or leave "
            "data.refiner_mode empty to keep all",
        )


# ---------------------------------------------------------------- split


class _QuestionSelection(NamedTuple):
    """Chosen questions: all their names, their number, and the total."""

    names: set[str]
    questions: int
    of: int


def _choose(
    kept: Sequence[_KeptRow[T]], share: float | None, seed: int, purpose: str
) -> _QuestionSelection:
    """A seeded share of the questions of these rows; or all of them."""
    question_of = same_questions([item.row.question_names for item in kept])
    questions = set(question_of.values())
    chosen = questions if share is None else choose_questions(questions, share, seed, purpose)
    names = {name for name, question in question_of.items() if question in chosen}
    return _QuestionSelection(names, len(chosen), len(questions))


def _held_out(config: RecipeConfig, prompts: Sequence[_KeptRow[PromptRow]]) -> _QuestionSelection:
    data = config.data
    if data.all_held_out:
        return _choose(prompts, None, data.split_seed, "held_out")
    held_out = _choose(prompts, data.held_out_fraction, data.split_seed, "held_out")
    if held_out.of == 1:
        raise DataError(
            f"All {len(prompts)} usable prompts of data.rl_path={data.rl_path} ask one question",
            expected="at least two questions: one to train on and one to hold out",
            fix="add rows, or raise the limits that dropped the others",
        )
    return held_out


def _on_each_side(kept: Sequence[_KeptRow[T]], other: set[str]) -> Sides[T]:
    """Training rows, and rows whose question has a name in ``other``; ids made unique."""
    ids = Counter(item.row.sample_id for item in kept)
    sides: Sides[T] = ([], [])
    for item in kept:
        made: Any = item.made
        if ids[item.row.sample_id] > 1:  # results are paired by id, so ids must be unique
            unique = f"{item.row.sample_id}~{item.row.content_key[:8]}"
            made = dataclasses.replace(made, sample_id=unique)
        sides[not other.isdisjoint(item.row.question_names)].append(made)
    return sides
