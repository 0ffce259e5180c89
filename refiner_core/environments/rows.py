"""Tasks as prepared prompts, so that one lane of stages carries both prompts and tasks.

In: tasks. Out: :class:`~refiner_core.contract.types.PromptRow` values and the tasks again. Of a
task's row, ``sample_id`` is ``DOMAIN/ID``, ``question`` its summary, ``prompt_text`` the task as
JSON, ``prompt_ids`` what all its episodes begin with (policy and tools, up to the first message of
the user), and ``refiner_mode`` is :data:`TASK_MODE`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from refiner_core.contract.errors import DataError
from refiner_core.contract.types import PromptRow
from refiner_core.environments.protocol import Task

#: The ``refiner_mode`` of rows that are tasks.
TASK_MODE = "task"


def row_of_task(task: Task, prompt_ids: tuple[int, ...]) -> PromptRow:
    """A task as a row."""
    values = {"id": task.id, "domain": task.domain, "split": task.split, "summary": task.summary}
    text = json.dumps({**values, "data": dict(task.data)}, ensure_ascii=False, sort_keys=True)
    return PromptRow(
        sample_id=f"{task.domain}/{task.id}",
        question=task.summary,
        prompt_text=text,
        prompt_ids=prompt_ids,
        rubrics="",
        refiner_mode=TASK_MODE,
    )


def task_of_row(row: PromptRow) -> Task:
    """The task of a row.

    Raises
    ------
    DataError
        The row is none of a task.
    """
    if row.refiner_mode != TASK_MODE:
        raise DataError(
            f"{row.sample_id} is no task of an environment (refiner_mode {row.refiner_mode!r})",
            expected="rows that the data stage has made with environment.name set",
            fix="run the data stage of this recipe again",
        )
    values: dict[str, Any] = json.loads(row.prompt_text)
    return Task(**values)


def domain_of_id(sample_id: str) -> str:
    """The domain of a task's row, from its ``sample_id``."""
    return sample_id.partition("/")[0]


def over_domains(rows: Sequence[PromptRow], most: int | None) -> list[PromptRow]:
    """At most so many rows, in their order: of each domain the first ones, by its share of all. A
    larger number has the rows of a smaller one, too."""
    if most is None or len(rows) <= most:
        return list(rows)
    of_domain = Counter(domain_of_id(row.sample_id) for row in rows)
    met = Counter[str]()
    places = []
    for place, row in enumerate(rows):
        domain = domain_of_id(row.sample_id)
        met[domain] += 1
        places.append(((met[domain] - 0.5) / of_domain[domain], place))
    return [rows[place] for place in sorted(place for _, place in sorted(places)[:most])]
