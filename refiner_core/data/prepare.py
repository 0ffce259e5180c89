"""The data stage: raw rows to prepared files, with every dropped row counted.

In: the recipe's ``data`` section, the lengths of ``sft`` and ``grpo``, and a tokenizer.
Out, in one folder: ``rl_train.parquet``, ``rl_test.parquet`` (held out), ``sft_train.parquet``,
``sft_val.parquet``, ``report.json`` and ``README.md`` (a data card).

Rows are kept or dropped whole; nothing is ever cut. Why a row is dropped:

==================== ========================================================================
wrong_mode           its ``refiner_mode`` is not ``data.refiner_mode``
no_tool_output       the prompt holds no evidence to cite
duplicate            the same prompt, answer and rubrics stand in an earlier row
control_token        its text holds a special token of the tokenizer, e.g. ``<|im_end|>``
reasoning            an ``answer_only`` demonstration that thinks aloud (``</think>``)
held_out_question    a demonstration for a question that evaluation will ask
prompt_too_long      prompt > ``data.max_prompt_token_length``
answer_too_long      prompt + answer > ``sft.pack_length``
too_long_for_pack    prompt + ``grpo.response_length`` > ``grpo.max_token_length``
over_max_rows        ``data.max_sft_rows`` / ``data.max_rl_rows`` were reached before its turn
==================== ========================================================================

The same input and configuration give the same bytes. The split and the choice of rows under a limit
depend on ``data.split_seed`` and on what rows say, not on their order.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError, Interrupted
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import DemonstrationRow, Progress, PromptRow, StageIO
from refiner_core.data import chat
from refiner_core.data.datacard import Tally, data_card, make_report
from refiner_core.data.prepared import write_demonstrations, write_prompts
from refiner_core.data.rows import DEFAULT_MODE, Row, choose_questions, parse_row, same_questions
from refiner_core.data.sources import Source, Which, read_rows, resolve_source

FILES = ("sft_train.parquet", "sft_val.parquet", "rl_train.parquet", "rl_test.parquet")
_PROGRESS_EVERY = 64
T = TypeVar("T")


class Kept(NamedTuple, Generic[T]):
    """A row that passed, and what was made of it."""

    row: Row
    made: T


class _Desk:
    """Progress and stop requests, where there is somebody to tell."""

    def __init__(self, io: StageIO | None) -> None:
        self._io = io

    def tick(self, done: int, total: int, phase: str) -> None:
        if self._io is None or done % _PROGRESS_EVERY:
            return
        self._io.progress(Progress(done, max(done, total), phase))
        if self._io.should_stop():
            raise Interrupted(
                f"Stopped while preparing data ({phase}, row {done})",
                fix="run the same command again; the data stage starts over",
            )


def prepare_data(
    config: RecipeConfig,
    *,
    tokenizer: chat.ChatTokenizer,
    output_dir: Path,
    io: StageIO | None = None,
) -> dict[str, Any]:
    """Prepare all rows of a recipe and write them to ``output_dir``.

    Returns
    -------
    dict
        The report, as it also stands in ``report.json``: per kind of row ``read``, ``kept``,
        ``dropped`` by reason and length percentiles; the split; files with rows and SHA-256.

    Raises
    ------
    DataError
        If a source or row cannot be used, or nothing is left (the field to raise is named).
    ConfigurationError
        If the recipe names no source, or the chat template does not allow an exact loss mask.
    Interrupted
        If ``io`` asked to stop.
    """
    data, desk = config.data, _Desk(io)
    sources: dict[Which, Source] = {w: resolve_source(data, w) for w in ("sft", "rl")}
    if all(source.kind == "none" for source in sources.values()):
        raise ConfigurationError(
            "Both data.sft_path and data.rl_path are empty",
            expected="at least one source of rows",
            fix="set data.sft_path=FILE or data.rl_path=FILE",
        )
    rl_tally, sft_tally = Tally("rl"), Tally("sft")
    prompts = _select(config, sources["rl"], tokenizer, rl_tally, desk, _prompt_maker(config))
    held_out = _held_out(config, prompts)
    demonstrations = _select(
        config,
        sources["sft"],
        tokenizer,
        sft_tally,
        desk,
        _demonstration_maker(config, held_out.names),
    )
    rows = _write_rows(config, output_dir, prompts, demonstrations, held_out.names)
    report = make_report(
        config,
        tokenizer=tokenizer,
        tallies=(sft_tally, rl_tally),
        split={
            "questions": held_out.of,
            "held_out_questions": held_out.questions,
            "rl_without_rubrics": sum(not _has_rubrics(kept.row) for kept in prompts),
        },
        answer_lengths=[sum(kept.made.loss_mask) for kept in demonstrations],
        files={name: (output_dir / name, count) for name, count in rows.items()},
    )
    text = json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False)
    (output_dir / "README.md").write_text(data_card(report), encoding="utf-8")
    (output_dir / "report.json").write_text(text + "\n", encoding="utf-8")
    return report


def _write_rows(
    config: RecipeConfig,
    output_dir: Path,
    prompts: Sequence[Kept[PromptRow]],
    demonstrations: Sequence[Kept[DemonstrationRow]],
    held_out: set[str],
) -> dict[str, int]:
    """Split and write the four files; the number of rows by file name."""
    data = config.data
    validation = _choose(demonstrations, data.validation_fraction, data.split_seed, "validation")
    sft, rl = _on_each_side(demonstrations, validation.names), _on_each_side(prompts, held_out)
    for name, demonstrated in zip(FILES[:2], sft, strict=True):
        write_demonstrations(output_dir / name, demonstrated)
    for name, asked in zip(FILES[2:], rl, strict=True):
        write_prompts(output_dir / name, asked)
    counts = [*(len(side) for side in sft), *(len(side) for side in rl)]
    return dict(zip(FILES, counts, strict=True))


# ---------------------------------------------------------------- rows in, rows kept


def _select(
    config: RecipeConfig,
    source: Source,
    tokenizer: chat.ChatTokenizer,
    tally: Tally,
    desk: _Desk,
    make: Callable[[Row, chat.ChatTokenizer, Tally], T | str],
) -> list[Kept[T]]:
    """Read, filter and encode the rows of one source; ``make`` gives a row or why it is dropped."""
    which = source.which
    rows = _candidates(config, source, tokenizer, tally, desk)
    limit: int | None = getattr(config.data, f"max_{which}_rows")
    order = list(range(len(rows)))
    if limit is not None:  # a seeded choice, so that a file sorted by topic gives all topics
        seed = config.data.split_seed
        order.sort(key=lambda i: derive_seed(seed, "limit", which, rows[i].content_key))
    found: dict[int, Kept[T]] = {}
    for done, index in enumerate(order, start=1):
        if limit is not None and len(found) >= limit:
            tally.dropped["over_max_rows"] += len(rows) - done + 1
            break
        desk.tick(done, len(rows), f"tokenise {which}")
        made = make(rows[index], tokenizer, tally)
        if isinstance(made, str):
            tally.dropped[made] += 1
        else:
            found[index] = Kept(rows[index], made)
    tally.kept = len(found)
    if source.kind != "none" and not found:
        raise _nothing_left(config, source, tally)
    return [found[index] for index in sorted(found)]


def _candidates(
    config: RecipeConfig,
    source: Source,
    tokenizer: chat.ChatTokenizer,
    tally: Tally,
    desk: _Desk,
) -> list[Row]:
    """Valid rows that pass the rules that need no tokens."""
    seen: set[str] = set()
    rows: list[Row] = []
    for raw in read_rows(source):
        tally.read += 1
        desk.tick(tally.read, 0, f"read {source.which}")
        row = parse_row(raw, source.which)
        tally.modes[row.refiner_mode] += 1
        reason = _reason_to_drop(row, config, tokenizer, seen)
        if reason:
            tally.dropped[reason] += 1
            continue
        seen.add(row.content_key)
        tally.differing_ids += row.evidence.differing
        rows.append(row)
    return rows


def _reason_to_drop(
    row: Row, config: RecipeConfig, tokenizer: chat.ChatTokenizer, seen: set[str]
) -> str | None:
    wanted = config.data.refiner_mode
    if wanted is not None and row.refiner_mode != wanted:
        return "wrong_mode"
    if not row.evidence:
        return "no_tool_output"
    if row.content_key in seen:
        return "duplicate"
    if chat.control_token(row, tokenizer) is not None:
        return "control_token"
    if row.refiner_mode == DEFAULT_MODE and "</think>" in (row.answer or ""):
        return "reasoning"
    return None


Maker = Callable[[Row, chat.ChatTokenizer, Tally], T | str]


def _prompt_maker(config: RecipeConfig) -> Maker[PromptRow]:
    longest, grpo = config.data.max_prompt_token_length, config.grpo

    def make(row: Row, tokenizer: chat.ChatTokenizer, tally: Tally) -> PromptRow | str:
        ids = chat.encode_prompt(row, tokenizer)
        tally.prompt_lengths.append(len(ids))
        if len(ids) > longest:
            return "prompt_too_long"
        if len(ids) + grpo.response_length > grpo.max_token_length:
            return "too_long_for_pack"
        return PromptRow(
            sample_id=row.sample_id,
            question=row.question,
            prompt_text=row.prompt_text,
            prompt_ids=ids,
            rubrics=row.rubrics,
            refiner_mode=row.refiner_mode,
            truth=row.truth,
        )

    return make


def _demonstration_maker(config: RecipeConfig, held_out: set[str]) -> Maker[DemonstrationRow]:
    longest, pack_length = config.data.max_prompt_token_length, config.sft.pack_length

    def make(row: Row, tokenizer: chat.ChatTokenizer, tally: Tally) -> DemonstrationRow | str:
        if not held_out.isdisjoint(row.question_names):
            return "held_out_question"
        encoded = chat.encode_demonstration(row, tokenizer)
        tally.prompt_lengths.append(encoded.prompt_length)
        tally.total_lengths.append(len(encoded.input_ids))
        if encoded.prompt_length > longest:
            return "prompt_too_long"
        if len(encoded.input_ids) > pack_length:
            return "answer_too_long"
        return DemonstrationRow(row.sample_id, encoded.input_ids, encoded.loss_mask)

    return make


# ---------------------------------------------------------------- split


class Chosen(NamedTuple):
    """Some questions: all names that they go by, how many they are, and of how many."""

    names: set[str]
    questions: int
    of: int


def _choose(kept: Sequence[Kept[T]], share: float, seed: int, purpose: str) -> Chosen:
    """A seeded share of the questions of these rows."""
    question_of = same_questions([item.row.question_names for item in kept])
    questions = set(question_of.values())
    chosen = choose_questions(questions, share, seed, purpose)
    names = {name for name, question in question_of.items() if question in chosen}
    return Chosen(names, len(chosen), len(questions))


def _held_out(config: RecipeConfig, prompts: Sequence[Kept[PromptRow]]) -> Chosen:
    data = config.data
    if data.all_held_out:
        question_of = same_questions([item.row.question_names for item in prompts])
        questions = len(set(question_of.values()))
        return Chosen(set(question_of), questions, questions)
    held_out = _choose(prompts, data.held_out_fraction, data.split_seed, "held_out")
    if held_out.of == 1:
        raise DataError(
            f"All {len(prompts)} usable prompts of data.rl_path={data.rl_path} ask one question",
            expected="at least two questions: one to train on and one to hold out",
            fix="add rows, or raise the limits that dropped the others",
        )
    return held_out


def _on_each_side(kept: Sequence[Kept[T]], other: set[str]) -> tuple[list[T], list[T]]:
    """Rows for training, and rows whose question goes by a name in ``other``; ids made unique."""
    ids = Counter(item.row.sample_id for item in kept)
    sides: tuple[list[T], list[T]] = ([], [])
    for item in kept:
        made: Any = item.made
        if ids[item.row.sample_id] > 1:  # results are paired by id, so one id may not be two rows
            unique = f"{item.row.sample_id}~{item.row.content_key[:8]}"
            made = dataclasses.replace(made, sample_id=unique)
        sides[not other.isdisjoint(item.row.question_names)].append(made)
    return sides


def _has_rubrics(row: Row) -> bool:
    return any(json.loads(row.rubrics).values())


# ---------------------------------------------------------------- refusals


def _nothing_left(config: RecipeConfig, source: Source, tally: Tally) -> DataError:
    """Why no row is left, and which field brings some back."""
    which, dropped = source.which, tally.dropped
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    what = f"None of the {tally.read} rows of data.{which}_path={source.path} is usable ({counts})"
    if dropped["prompt_too_long"]:
        shortest = min(tally.prompt_lengths)
        return DataError(
            f"{what}: the shortest prompt has {shortest} tokens",
            expected=f"prompts of at most {config.data.max_prompt_token_length} tokens "
            "(data.max_prompt_token_length)",
            fix=f"set data.max_prompt_token_length={shortest} or more, where the model's window "
            "allows it; prompts are never cut",
        )
    if dropped["answer_too_long"]:
        shortest = min(tally.total_lengths)
        return DataError(
            f"{what}: the shortest prompt and answer have {shortest} tokens together",
            expected=f"at most {config.sft.pack_length} (sft.pack_length)",
            fix=f"set sft.pack_length={shortest} or more",
        )
    if dropped["too_long_for_pack"]:
        needed = min(tally.prompt_lengths) + config.grpo.response_length
        return DataError(
            f"{what}: the shortest prompt and a response need {needed} tokens",
            expected=f"at most {config.grpo.max_token_length} (grpo.max_token_length)",
            fix=f"set grpo.max_token_length={needed} or more, or lower grpo.response_length",
        )
    if dropped["no_tool_output"]:
        return DataError(
            what,
            expected="prompts with <tool_output> that holds <snippet id=…> or <webpage id=…>",
            fix=f"set data.{which}_path= to rows with evidence",
        )
    if dropped["wrong_mode"]:
        found = ", ".join(sorted(tally.modes))
        return DataError(
            what,
            expected=f"rows with refiner_mode {config.data.refiner_mode}; there are only {found}",
            fix="set data.refiner_mode= to one of them, or leave it empty to keep all",
        )
    return DataError(
        what,
        expected="at least one usable row",
        fix=f"correct the rows by these reasons, or set data.{which}_path= to others",
    )
