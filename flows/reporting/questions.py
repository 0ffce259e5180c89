"""What prompts ask, from the prepared rows that a stage has read.

In: a workspace, a stage's attempt, sample ids. Out: questions and prompts. Where the rows are gone
there are none: numbers and answers do without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infra.store.workspace import Workspace
from refiner_core.report.sweep.evidence import Question

#: The rows that evaluations read, and those that are trained on.
HELD_OUT, TRAINED_ON = "rl_test.parquet", "rl_train.parquet"


def questions_of(
    workspace: Workspace, stage_id: str, attempt: int, prompts: Sequence[str], file: str = HELD_OUT
) -> dict[str, Question]:
    """What these prompts ask, by the data that an attempt at a stage has read."""
    inputs = workspace.part(workspace.layout.attempt(stage_id, attempt), "inputs")
    data = inputs.get("data")
    folder = None if data is None else workspace.output_dir(str(data))
    return {} if folder is None else read_questions(folder / file, prompts)


def read_questions(path: Path, prompts: Sequence[str]) -> dict[str, Question]:
    """What these prompts ask; empty where the file is gone."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            table = file.read(["sample_id", "question", "prompt_text"])
    except (OSError, pa.ArrowInvalid):
        return {}
    asked = table.filter(pc.field("sample_id").isin(list(prompts)))
    return {
        row["sample_id"]: Question(row["question"], row["prompt_text"]) for row in asked.to_pylist()
    }
