"""Validation of raw rows in both forms, normalised to one.

In: :class:`RawRow` values from :mod:`refiner_core.data.sources`.
Out: :class:`DataRow` values, or a :class:`DataError` with file, line, and the expected form.

====================== ==================================================================
form                   columns
====================== ==================================================================
conversations          ``conversations`` [{role, content}], ``rubrics`` (JSON text or
                       object), ``metadata`` {sample_id, tool_query, refiner_mode, …}
messages               ``messages`` [{role, content}], ``ground_truth`` (JSON text or object
                       {query, rubrics: [{title, description, weight}]}), ``dataset``
====================== ==================================================================

The question is the ground truth's ``query``; without one, the content of the prompt's ``<query>``
tag, then ``metadata.tool_query``, then the whole prompt. ``truth`` (a generator's ground truth)
passes through unchanged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refiner_core.answers import ParsedEvidence, compared, parse_evidence
from refiner_core.contract.errors import DataError
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.data.sources import DataSource, RawRow, Which, read_all_rows
from refiner_core.rubrics import normalise_rubrics


def choose_questions(questions: Iterable[str], share: float, seed: int, purpose: str) -> set[str]:
    """A seeded ``share`` of the distinct questions.

    At least one question is chosen if ``share`` is above 0, and at least one is left; with fewer
    than two questions none is. ``purpose`` keeps different splits of one seed independent.
    """
    distinct = sorted(set(questions))
    if share <= 0 or len(distinct) < 2:
        return set()
    count = min(max(round(share * len(distinct)), 1), len(distinct) - 1)
    ranked = sorted(distinct, key=lambda question: derive_seed(seed, purpose, question))
    return set(ranked[:count])


def same_questions(rows: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """Map each name to the one name of its question.

    Rows that share a name, directly or through others, ask the same question. Its name is the first
    one of a row; of several such names the first in alphabetical order.
    """
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while above[name] != name:
            above[name] = above[above[name]]
            name = above[name]
        return name

    for names in rows:
        tops = {top(above.setdefault(name, name)) for name in names}
        above.update(dict.fromkeys(tops, min(tops)))
    known_as: dict[str, str] = {}
    for first, *_ in rows:
        known_as[top(first)] = min(first, known_as.get(top(first), first))
    return {name: known_as[top(name)] for name in above}


DEFAULT_MODE = "answer_only"
ROLES = ("system", "user", "assistant", "tool")
_RUBRICS = (
    "`rubrics` (positive_rubrics and negative_rubrics), or `ground_truth` (query and rubrics)"
)
_FORMS = (
    "columns conversations + rubrics + metadata, or messages + ground_truth + dataset "
    "(`refiner data convert` knows other layouts)"
)
#: Names from rows (modes, domains) appear on cards and in reports.
_PLAIN_NAME = re.compile(r"\w[\w .:+/-]{0,63}")

Message = dict[str, str]


@dataclass(frozen=True)
class DataRow:
    """One valid row.

    ``messages`` is the prompt (for SFT, everything before the last assistant turn) and ``answer``
    that turn's text; it is None for RL rows. ``rubrics`` is canonical JSON text.
    """

    sample_id: str
    question: str
    messages: tuple[Message, ...]
    answer: str | None
    rubrics: str
    refiner_mode: str
    truth: Mapping[str, Any] | None

    @property
    def prompt_text(self) -> str:
        """The prompt: the user's and the tools' messages, verbatim."""
        shown = [m["content"] for m in self.messages if m["role"] in ("user", "tool")]
        return "\n\n".join(shown)

    @property
    def evidence(self) -> ParsedEvidence:
        """The prompt's evidence with citable ids."""
        return parse_evidence(self.prompt_text)

    @property
    def content_key(self) -> str:
        """Equal for rows with the same prompt, answer and rubrics, whatever their ids."""
        parts = [list(map(dict, self.messages)), self.answer, self.rubrics, self.refiner_mode]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def question_key(self) -> str:
        """Equal for the same question up to case and spacing; key of a seeded split."""
        return " ".join(self.question.casefold().split())

    @property
    def question_names(self) -> tuple[str, ...]:
        """The names of the question: its own text, its normalised text, and the normalised
        prompt.

        Two rows may spell one question differently (a question mark, curly quotes), or have one
        prompt and different names of its question (``ground_truth.query`` in one form, the
        ``<query>`` tag in the other).
        """
        return self.question_key, compared(self.question), compared(self.prompt_text)


def parse_row(raw: RawRow, which: Which) -> DataRow:
    """Validate one raw row.

    Raises
    ------
    DataError
        The row has neither form, or a part of it is invalid.
    """
    try:
        return _parsed(raw, which)
    except RecursionError as error:
        raise raw.wrong("is nested too deeply", "objects and lists a few levels deep") from error


def parse_any_row(raw: RawRow | DataError, which: Which) -> DataRow | DataError:
    """The valid row, or the error of the line or of its content."""
    if isinstance(raw, DataError):
        return raw
    try:
        return parse_row(raw, which)
    except DataError as error:
        return error


#: Rows that are checked before a run, which takes a second, and rows that an error names.
FIRST_ROWS = 5_000
_SHOWN_ERRORS = 10


def check_first_rows(source: DataSource, *, parse: bool = True) -> None:
    """Refuse a source of which one of the first rows cannot be used; the error names all of these.

    Parameters
    ----------
    parse
        Whether rows must have a form of the refiner task; else any readable row will do.

    Raises
    ------
    DataError
        Rows cannot be used, or there are none.
    """
    rows = list(itertools.islice(read_all_rows(source), FIRST_ROWS))
    found = (parse_any_row(raw, source.which) if parse else raw for raw in rows)
    if errors := [row for row in found if isinstance(row, DataError)]:
        raise bad_rows(errors, len(rows), source)


def bad_rows(errors: Sequence[DataError], read: int, source: DataSource) -> DataError:
    """One error for all rows that cannot be used, of those that were read."""
    if len(errors) == 1:
        return errors[0]
    shown = "; ".join(error.what.rstrip(".") for error in errors[:_SHOWN_ERRORS])
    more = f"; and {len(errors) - _SHOWN_ERRORS} more" * (len(errors) > _SHOWN_ERRORS)
    return DataError(
        f"{len(errors)} of {read} rows cannot be used: {shown}{more}",
        expected=errors[0].expected,
        fix="correct these rows; `refiner data check "
        f"{shlex.quote(source.path)} --as {source.which}` lists all of them",
    )


def _parsed(raw: RawRow, which: Which) -> DataRow:
    row, metadata = raw.row, json_object(raw, "metadata")
    query: Any = None
    if (turns := row.get("conversations")) is not None:
        rubrics = row.get("rubrics")
    elif (turns := row.get("messages")) is not None:
        judged = json_object(raw, "ground_truth")
        rubrics, query = judged.get("rubrics"), judged.get("query")
    else:
        columns = ", ".join(sorted(row)) or "no columns"
        raise raw.wrong(f"has neither form of a row (it has {columns})", _FORMS)
    if which == "rl" and rubrics is None:
        raise raw.wrong("has no `rubrics`", _RUBRICS)
    messages, answer = _split_turns(raw, _messages(raw, turns), which)
    sample_id = metadata.get("sample_id") or row.get("sample_id") or row.get("id")
    prompt = "\n\n".join(m["content"] for m in messages if m["role"] == "user")
    question = query or _tagged(prompt) or metadata.get("tool_query") or prompt
    try:
        canonical = normalise_rubrics(rubrics)
    except DataError as error:
        raise DataError(
            f"{raw.origin}: {error.what}", expected=error.expected, fix=error.fix
        ) from error
    truth = None if row.get("truth") is None else json_object(raw, "truth")
    json.dumps(truth)  # later it is written as JSON, without the row's origin
    return DataRow(
        sample_id=str(sample_id) if sample_id is not None else _derived_id(messages, answer),
        question=str(question).strip(),
        messages=tuple(messages),
        answer=answer,
        rubrics=json.dumps(canonical, ensure_ascii=False),
        refiner_mode=plain_name(raw, "refiner_mode", metadata.get("refiner_mode") or DEFAULT_MODE),
        truth=truth,
    )


def plain_name(raw: RawRow, what: str, value: Any) -> str:
    """A name from a row, if it is safe for cards and reports."""
    if not _PLAIN_NAME.fullmatch(str(value)):
        expected = "a short name of letters, digits, spaces and `_.:+/-`"
        raise raw.wrong(f"has the {what} {str(value)[:40]!r}", expected)
    return str(value)


def json_object(raw: RawRow, name: str) -> Mapping[str, Any]:
    """A column with a JSON object, also as text (as in Parquet files); empty if there
    is none."""
    value = raw.row.get(name)
    if isinstance(value, list) and len(value) == 1:  # the reference trainer's form of ground truth
        value = value[0]
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise raw.wrong(f"has a `{name}` that is not JSON: {error}", "a JSON object") from error
    if not isinstance(value, Mapping | None):
        raise raw.wrong(f"has a `{name}` that is a {type(value).__name__}", "a JSON object")
    return value or {}


def _tagged(prompt: str) -> str:
    """Content of the first ``<query>``, in linear time; empty without one."""
    _, _, rest = prompt.partition("<query>")
    query, closed, _ = rest.partition("</query>")
    return query if closed else ""


def turns_of(raw: RawRow, values: Any) -> Sequence[Mapping[str, Any]]:
    """Turns of a conversation, each of a known role."""
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise raw.wrong("has no turns", "a non-empty list of {role, content}")
    for number, turn in enumerate(values, start=1):
        role = turn.get("role") if isinstance(turn, Mapping) else None
        if role not in ROLES:
            raise raw.wrong(f"turn {number} has the role {role!r}", f"one of {', '.join(ROLES)}")
    return values


def _messages(raw: RawRow, values: Any) -> list[Message]:
    messages: list[Message] = []
    for number, turn in enumerate(turns_of(raw, values), start=1):
        role, content = turn["role"], turn.get("content")
        if turn.get("tool_calls") or not isinstance(content, str) or not content.strip():
            raise raw.wrong(
                f"turn {number} ({role}) has no text alone",
                "non-empty text in `content`, calls of tools written out in it",
            )
        messages.append({"role": role, "content": content})
    return messages


def _split_turns(
    raw: RawRow, messages: list[Message], which: Which
) -> tuple[list[Message], str | None]:
    """Prompt and answer; an RL row's final assistant turn, if any, is dropped."""
    closes = messages[-1]["role"] == "assistant"
    if which == "sft" and not closes:
        raise DataError(
            f"{raw.origin} ends with the role {messages[-1]['role']!r}: it demonstrates nothing",
            expected="a last turn with the role assistant",
            fix="name prompts without answers with data.rl_path= instead",
        )
    prompt = messages[:-1] if closes else messages
    if not any(message["role"] == "user" for message in prompt):
        raise raw.wrong("has no user turn", "a prompt before the answer")
    return prompt, messages[-1]["content"] if which == "sft" else None


def _derived_id(messages: Sequence[Message], answer: str | None) -> str:
    text = json.dumps([list(messages), answer], sort_keys=True)
    return f"row-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
