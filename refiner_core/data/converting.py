"""Rows of other layouts as rows of refiner.

In: a row. Out: the same row with ``conversations``, ``rubrics`` and ``metadata``.

===================== ============================================================================
layout                columns
===================== ============================================================================
refiner               ``conversations``, or ``messages`` with ``ground_truth``: unchanged
open-instruct         ``messages``, ``ground_truth``, ``dataset``: unchanged
messages              ``messages`` [{role, content}]
TRL                   ``prompt`` and ``completion`` (or ``chosen``), each text or [{role, content}]
prompt and completion ``prompt`` and ``completion``, ``response`` or ``output``
question and answer   ``question`` and ``answer`` (or ``output``)
===================== ============================================================================

Evidence in a column ``context``, ``contexts``, ``documents``, ``passages`` or ``snippets`` (texts,
or objects with ``id``, ``title``, ``text``) becomes the prompt's tool output. ``rubrics`` may also
be a list of texts. No column is lost: others go to ``metadata``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.data.sources import RawRow

_EVIDENCE = ("context", "contexts", "documents", "passages", "snippets")
_ANSWERS = ("completion", "chosen", "response", "answer", "output")
LAYOUTS = (
    "`conversations`; `messages`; `prompt` with `completion`, `response` or `chosen`; `question` "
    "with `answer`"
)


def convert_row(raw: RawRow) -> dict[str, Any]:
    """A row in refiner's form.

    Raises
    ------
    DataError
        The layout is not known; the message lists the columns and the known layouts.
    """
    row = dict(raw.row)
    if "conversations" in row or ("messages" in row and "ground_truth" in row):
        return row
    taken = {"messages", "prompt", "question", "rubrics", "metadata", "truth", *_EVIDENCE}
    if "messages" in row:
        turns = _turns(row["messages"], "user")
    elif "prompt" in row or "question" in row:
        turns = _turns(row.get("prompt", row.get("question")), "user")
        answer = next((name for name in _ANSWERS if row.get(name) is not None), None)
        if answer is not None:
            taken.add(answer)
            turns += _turns(row[answer], "assistant")
    else:
        raise raw.wrong(f"has no known layout (it has {', '.join(sorted(row))})", LAYOUTS)
    question = next((t["content"] for t in turns if t["role"] == "user"), "")
    evidence = next((row[name] for name in _EVIDENCE if row.get(name)), None)
    if evidence is not None and "<tool_output>" not in question:
        place = next(i for i, t in enumerate(turns) if t["role"] == "user")
        text = f"<query>{question}</query>\n{_tool_output(evidence)}"
        turns[place] = {"role": "user", "content": text}
    metadata = row.get("metadata")
    more = {name: value for name, value in row.items() if name not in taken}
    if isinstance(metadata, Mapping):
        more |= metadata
    found: dict[str, Any] = {"conversations": turns, "metadata": more}
    if (rubrics := row.get("rubrics")) is not None:
        found["rubrics"] = _rubrics(rubrics)
    return found | ({"truth": row["truth"]} if "truth" in row else {})


def _turns(value: Any, role: str) -> list[Any]:
    """Turns from a text, or from turns of a conversation."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [dict(turn) if isinstance(turn, Mapping) else turn for turn in value]
    return [{"role": role, "content": value}]


def _tool_output(evidence: Any) -> str:
    parts = evidence if isinstance(evidence, list | tuple) else [evidence]
    lines = ["<tool_output>"]
    for number, part in enumerate(parts, start=1):
        said = part if isinstance(part, Mapping) else {"text": part}
        name = "".join(c for c in str(said.get("id", "")) if c.isalnum() or c in "_-.") or number
        title = f" {said['title']}" if said.get("title") else ""
        text = said.get("text") or said.get("content") or ""
        lines.append(f"{title}<snippet id=S_{name}> {text}</snippet>")
    return "\n".join([*lines, "</tool_output>"])


def _rubrics(value: Any) -> Any:
    """A list of texts as rubrics of weight 1; anything else unchanged."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        return value
    made = [{"title": t[:40], "description": t, "weight": 1} for t in value]
    return {"positive_rubrics": made, "negative_rubrics": []}
