"""Checks of rubrics before training on them.

In: a file with a rubric set, or a file of rows with their own rubrics. Out: :class:`RubricCheck`,
with every :class:`RubricFinding` and its place; :data:`RULES` has the reasons and fixes. An
``error`` is refused or counted wrongly by the reward; a ``warning`` is usually wording that
inverts a judgement or makes the judge guess, found by patterns that accept usual
wording. No judge is called. Unlike loading, a check continues after an error, so that one run
shows everything.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.files import json_lines, keys_twice, parquet_rows
from refiner_core.rubrics import rubric_set_path, shipped_rubric_sets
from refiner_core.rubrics.rows import Rubric, normal_entry, read_entry, read_set, rubric_entries

Severity = Literal["error", "warning"]


class _Rule(NamedTuple):
    """One kind of problem: its severity, its effect, its fix."""

    severity: Severity
    why: str
    fix: str


@dataclass(frozen=True, order=True)
class RubricFinding:
    """One problem.

    Attributes
    ----------
    line
        Line of the file, counted from 1; for a Parquet file, the row.
    place
        The rubric, such as ``rubrics[2]``; empty for the file or row as a whole.
    title
        Its title, if it has one.
    rule
        The kind of problem; see :data:`RULES`.
    what
        The text found.
    """

    line: int
    place: str
    title: str
    rule: str
    what: str

    @property
    def is_error(self) -> bool:
        """True if the reward would refuse the rubric or count it wrongly."""
        return RULES[self.rule].severity == "error"

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        rule = RULES[self.rule]
        return {**asdict(self), "severity": rule.severity, "why": rule.why, "fix": rule.fix}


_error, _warning = functools.partial(_Rule, "error"), functools.partial(_Rule, "warning")

#: Every rule.
RULES: dict[str, _Rule] = {
    "unreadable": _error(
        "everything after it is unreliable", "write the file with a YAML or JSON library"
    ),
    "schema": _error(
        "loading refuses it, so that no run starts", "correct the named part; see `rubrics show v3`"
    ),
    "duplicate-key": _error("all but the last value are silently lost", "drop one of them"),
    "duplicate-title": _error(
        "reports and agreement tables go by title and would mix the two", "rename one of them"
    ),
    "duplicate-description": _error(
        "one criterion is asked and weighted twice",
        "drop one of them, and raise the other's weight",
    ),
    "contradictory-sign": _error(
        "the weight says that it counts against the answer, the list that it counts for it",
        "move it to negative_rubrics, or drop the sign",
    ),
    "unread-key": _warning(
        "rows keep title, description and weight alone; anything else changes nothing",
        "correct the key, or drop it",
    ),
    "negated": _warning(
        "a judge's score s counts as 1 - s, so that the answer is rewarded for the opposite: right "
        "if the sentence describes a fault, inverted if it describes a merit, and hard to judge "
        "either way",
        "describe the fault in plain words, or ask for the merit as a positive rubric",
    ),
    "polarity": _warning(
        "a positive description says what a good answer does, a negative one what a bad answer "
        "does; the other way round the reward has the wrong sign, or is a double negation",
        "move it to the other polarity and describe what a reader would see",
    ),
    "weightless": _warning(
        "it is judged and paid for, but counts nothing", "give it a weight, or drop it"
    ),
    "only-faults": _warning(
        "an empty answer has none of the faults and gets the full judge term",
        "add what a good answer does; or use it as `instance+static`, beside rows that ask for it",
    ),
}


_QUOTED = re.compile(r"\"[^\"]*\"|“[^”]*”")
_SUBJECT = r"^(?:(?:the|an?|this|its)\s+)?(?:answer|response|text|reply|output|summary|it)?\s*"
_NEGATED = re.compile(
    rf"{_SUBJECT}(?:(?:does|do|did|is|are|was|has|have|can|could|will|would)\s*(?:not|n[’']t)\b"
    r"|never\b|cannot\b|can[’']t\b|fail(?:s|ed|ing|ure)?\s+to\b|lacks?\b|lacking\b|omits?\b"
    r"|miss(?:es|ing)\b|neglects?\b|contains?\s+no\b|includes?\s+no\b|has\s+no\b|makes?\s+no\b"
    r"|gives?\s+no\b|no\b|not\b|without\b|absence\s+of\b)",
    re.IGNORECASE,
)
_WANTED = re.compile(
    rf"{_SUBJECT}(?:(?:should|must|ought\s+to|needs?\s+to|has\s+to)\b|avoids?\b|avoiding\b"
    r"|refrains?\b|is\s+free\s+(?:of|from)\b|stays?\s+(?:on|within|away)\b)",
    re.IGNORECASE,
)
_UNWANTED = re.compile(
    rf"{_SUBJECT}(?:(?:should|must|ought)\s*(?:not|n[’']t|never|avoid|refrain)\b|avoids?\b|avoiding\b"
    r"|refrains?\b|do\s+not\b|don[’']t\b)",
    re.IGNORECASE,
)

#: _Rule, its polarity, its pattern, and the finding in words.
_WORDING: list[tuple[str, str, re.Pattern[str], str]] = [
    ("negated", "negative", _NEGATED, "a negative rubric that begins with a negation"),
    ("polarity", "negative", _WANTED, "a negative rubric says what is wanted"),
    ("polarity", "positive", _UNWANTED, "a positive rubric names a fault"),
]


def wording(rubric: Rubric) -> Iterator[tuple[str, str]]:
    """All warnings about one rubric's own wording as (rule, what)."""
    if rubric.weight == 0:
        yield "weightless", "its weight is 0"
    text = _QUOTED.sub("…", rubric.description).lstrip()  # quotes are not the wording
    for rule, polarity, pattern, what in _WORDING:
        if polarity == rubric.polarity and (match := pattern.search(text)):
            yield rule, f"{what} ({match[0].strip()!r})"


def together(rubrics: Sequence[tuple[str, Rubric]]) -> Iterator[tuple[int, str, str]]:
    """Problems between rubrics; places are such as ``rubrics[2]``."""
    yield from _same(rubrics, "title")
    yield from _same(rubrics, "description")
    weights = [rubric.signed_weight for _, rubric in rubrics]
    if weights and min(weights) < 0 and max(weights) <= 0:
        yield 0, "only-faults", "all rubrics with weight are negative"


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _same(rubrics: Sequence[tuple[str, Rubric]], part: str) -> Iterator[tuple[int, str, str]]:
    first: dict[str, int] = {}
    for position, (_, rubric) in enumerate(rubrics):
        if part == "title" and rubric.title == rubric.description[:60]:
            continue  # it has no title of its own
        earlier = first.setdefault(_normal(getattr(rubric, part)), position)
        if earlier != position:
            yield position, f"duplicate-{part}", f"{rubrics[earlier][0]} has the same {part}"


_ROW_SUFFIXES = (".jsonl", ".ndjson", ".json")
_ROW_KEYS = ("title", "description", "weight")


class _LocatedRubric(NamedTuple):
    """A rubric with its line and its place, such as ``rubrics[2]``."""

    line: int
    place: str
    rubric: Rubric


@dataclass
class RubricCheck:
    """Results of a check.

    Attributes
    ----------
    name, form
        The file as given; a ``set``, or ``rows`` with their own rubrics.
    findings
        By line.
    rubrics, rows, rows_without
        Their numbers; ``rows_without`` have no rubric (under ``instance`` no judge term).
    """

    name: str
    form: Literal["set", "rows"]
    findings: list[RubricFinding] = field(default_factory=list)
    rubrics: int = 0
    rows: int = 0
    rows_without: int = 0

    @property
    def errors(self) -> int:
        """Number of errors."""
        return sum(f.is_error for f in self.findings)

    @property
    def warnings(self) -> int:
        """Number of warnings."""
        return len(self.findings) - self.errors

    def by_rule(self) -> dict[str, list[RubricFinding]]:
        """Findings of each rule, errors first, then the most frequent."""
        counts = Counter(f.rule for f in self.findings)
        order = sorted(counts, key=lambda r: (RULES[r].severity != "error", -counts[r], r))
        return {rule: [f for f in self.findings if f.rule == rule] for rule in order}

    def add(self, line: int, rule: str, what: str, place: str = "", title: str = "") -> None:
        """Add one finding."""
        self.findings.append(RubricFinding(line, place, title, rule, what))


def check_file(name: str) -> RubricCheck:
    """Check a rubric set (shipped name or YAML file), or the rubrics of a file of rows.

    Raises
    ------
    ConfigurationError
        There is no such file, or its form is unknown.
    DataError
        A Parquet file is incomplete.
    """
    if name not in shipped_rubric_sets():
        path = Path(name).expanduser()
        suffix = path.suffix.lower()
        if path.is_file() and suffix in (*_ROW_SUFFIXES, ".parquet"):
            return _check_rows(name, path)
        if path.is_file() and suffix not in (".yaml", ".yml"):
            raise ConfigurationError(
                f"{name} has the unknown ending {suffix or '(none)'!r}",
                expected="a rubric set (.yaml), or rows (.jsonl, .ndjson, .json, .parquet)",
                fix="rename or convert it",
            )
    return _check_set(name, rubric_set_path(name))


# ---------------------------------------------------------------- sets


def _check_set(name: str, path: Path) -> RubricCheck:
    checked = RubricCheck(name, "set")
    try:
        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        checked.add(mark.line + 1 if mark else 1, "unreadable", f"it is not YAML in UTF-8: {what}")
        return checked
    lines = _lines_of_entries(root)
    for line, key in keys_twice(root):
        checked.add(line, "duplicate-key", f"the key {key!r} appears twice")
    for entry, what in read_set(content, path.stem)[1]:
        if entry is None or entry >= len(lines):
            checked.add(1, "schema", what)
        else:
            checked.add(lines[entry], "schema", what, f"rubrics[{entry}]")
    entries = content["rubrics"] if lines and isinstance(content, Mapping) else []
    placed = []
    for position, entry in enumerate(entries):
        if (rubric := read_entry(entry, path.stem)) is not None:
            placed.append(_LocatedRubric(lines[position], f"rubrics[{position}]", rubric))
    checked.rubrics = len(entries)
    _check_together(checked, placed)
    checked.findings.sort()
    return checked


def _lines_of_entries(root: yaml.Node | None) -> list[int]:
    """The line of each entry of ``rubrics``."""
    if not isinstance(root, yaml.MappingNode):
        return []
    lists = [value for key, value in root.value if key.value == "rubrics"]
    if not lists or not isinstance(lists[-1], yaml.SequenceNode):
        return []
    return [node.start_mark.line + 1 for node in lists[-1].value]


# ---------------------------------------------------------------- rows


def _check_rows(name: str, path: Path) -> RubricCheck:
    checked = RubricCheck(name, "rows")
    for line, row, wrong in _rows(path):
        if wrong:
            checked.add(line, "unreadable", f"the line {wrong}")
            continue
        checked.rows += 1
        before = checked.rubrics
        _check_row(checked, line, row)
        checked.rows_without += checked.rubrics == before
    checked.findings.sort()
    return checked


def _rows(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Line, row, and the error if it cannot be read."""
    if path.suffix != ".parquet":
        yield from json_lines(path)
        return
    columns = ("rubrics", "ground_truth", "conversations")
    rows = parquet_rows(path, columns, fix="write it again")
    for line, row in enumerate(rows, start=1):
        yield line, row, ""


def _check_row(checked: RubricCheck, line: int, row: Any) -> None:
    try:
        entries = rubric_entries(_rubrics_of(row))
    except DataError as error:
        checked.add(line, "schema", error.what)
        return
    checked.rubrics += len(entries)
    placed = []
    for key, position, entry in entries:
        place = f"{key}[{position}]"
        try:
            normal, below_0 = normal_entry(entry, place)
        except DataError as error:
            checked.add(line, "schema", f"{error.what} (expected {error.expected})", place)
            continue
        negative = below_0 or key == "negative_rubrics"
        title = normal["title"]
        if below_0 and key == "positive_rubrics":
            what = f"its weight is {entry['weight']} in positive_rubrics"
            checked.add(line, "contradictory-sign", what, place, title)
        said = entry.get("polarity")
        if said in ("positive", "negative") and (said == "negative") != negative:
            counted = "negative" if negative else "positive"
            what = f"it says polarity {said}, which rows do not have: it is counted as {counted}"
            checked.add(line, "contradictory-sign", what, place, title)
        elif unread := sorted(str(k) for k in entry if k not in (*_ROW_KEYS, "polarity")):
            checked.add(line, "unread-key", f"it has {', '.join(unread)}", place, title)
        polarity: Literal["positive", "negative"] = "negative" if negative else "positive"
        rubric = Rubric(title, normal["description"], polarity, normal["weight"])
        placed.append(_LocatedRubric(line, place, rubric))
    _check_together(checked, placed)


def _rubrics_of(row: Any) -> Any:
    """The rubrics of a row, in either form.

    Raises
    ------
    DataError
        It has no field for rubrics.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"the row is a JSON {type(row).__name__}, not an object")
    if row.get("rubrics") is not None or row.get("conversations") is not None:
        return row.get("rubrics")
    truth = row.get("ground_truth")
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError) as error:
            raise DataError(f"`ground_truth` is not JSON: {error}") from None
    if not isinstance(truth, Mapping):
        columns = ", ".join(sorted(map(str, row))) or "no columns"
        raise DataError(f"the row has neither `rubrics` nor `ground_truth` (it has {columns})")
    return truth.get("rubrics")


# ---------------------------------------------------------------- both


def _check_together(checked: RubricCheck, placed: Sequence[_LocatedRubric]) -> None:
    """Check the wording of each rubric, then problems between them."""
    found = [(i, *said) for i, item in enumerate(placed) for said in wording(item.rubric)]
    for position, rule, what in (*found, *together([(p.place, p.rubric) for p in placed])):
        item = placed[position]
        checked.add(item.line, rule, what, item.place, item.rubric.title)
