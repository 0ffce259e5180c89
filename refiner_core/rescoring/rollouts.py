"""Stored rollouts and evaluation samples as values.

In: rows of Parquet files and the prompts that they were sampled from. Out: :class:`StoredRollout`
values, in the order of their rows, and which of them form a group (samples of one prompt, whose
advantages are relative to each other).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refiner_core.contract.errors import DataError
from refiner_core.contract.types import PromptRow

_COMPONENT = "reward/"
#: Metric of an evaluation's sample -> component of the reward that it is.
_OF_SAMPLES = {
    "rubric_score": "rubric",
    "citation_precision": "citation_precision",
    "citation_recall": "citation_recall",
    "citation_f1": "citation_f1",
    "citation_format": "citation_format",
    "format_valid": "format_valid",
    "claims": "claims",
    "uncited": "uncited",
}


@dataclass(frozen=True)
class StoredRollout:
    """One sample with the reward that it was given.

    Attributes
    ----------
    group
        Which samples it is compared with: its step (or decoding) and prompt.
    stopped
        Whether it ended by itself instead of at the length limit.
    total, advantage
        As stored; None where the judge failed. An evaluation stores no advantages.
    components, judgements
        As stored.
    """

    group: str
    step: int | None
    sample_index: int
    prompt: PromptRow
    text: str
    stopped: bool
    status: str
    total: float | None
    advantage: float | None
    components: Mapping[str, float]
    judgements: tuple[Mapping[str, Any], ...]


def from_training(
    rows: Iterable[Mapping[str, Any]], prompts: Sequence[PromptRow]
) -> list[StoredRollout]:
    """Rollouts of training steps.

    Raises
    ------
    DataError
        A row's prompt is not among ``prompts``.
    """
    by_id = _by_id(prompts)
    return [
        _rollout(
            row,
            _prompt_of(row, prompts, by_id),
            group=f"step {row['step']}, prompt {row.get('prompt_index', row['sample_id'])}",
            total=row["reward"],
            components={
                name.removeprefix(_COMPONENT): float(value)
                for name, value in row.items()
                if name.startswith(_COMPONENT) and value is not None
            },
        )
        for row in rows
    ]


def from_evaluation(
    rows: Iterable[Mapping[str, Any]], prompts: Sequence[PromptRow], decoding: str
) -> list[StoredRollout]:
    """Samples of an evaluation. Errors as above."""
    by_id = _by_id(prompts)
    return [
        _rollout(
            row,
            _prompt_of(row, prompts, by_id),
            group=f"{decoding}, {row['sample_id']}",
            total=row["reward"],
            components={
                component: float(row[metric])
                for metric, component in _OF_SAMPLES.items()
                if row.get(metric) is not None
            },
        )
        for row in rows
    ]


def _rollout(
    row: Mapping[str, Any],
    prompt: PromptRow,
    *,
    group: str,
    total: float | None,
    components: Mapping[str, float],
) -> StoredRollout:
    judgements = row["judgements"]
    found = json.loads(judgements) if isinstance(judgements, str) else judgements
    return StoredRollout(
        group=group,
        step=row.get("step"),
        sample_index=int(row["sample_index"]),
        prompt=prompt,
        text=str(row["response_text"]),
        stopped=row["finish_reason"] == "stop",
        status=str(row["status"]),
        total=total,
        advantage=row.get("advantage"),
        components=components,
        judgements=tuple(found or ()),
    )


def _by_id(prompts: Sequence[PromptRow]) -> dict[str, PromptRow]:
    return {prompt.sample_id: prompt for prompt in prompts}


def _prompt_of(
    row: Mapping[str, Any], prompts: Sequence[PromptRow], by_id: Mapping[str, PromptRow]
) -> PromptRow:
    """By position where the row says one, since ids need not be unique; else by id."""
    position, wanted = row.get("prompt_index"), str(row["sample_id"])
    if position is not None and 0 <= position < len(prompts):
        prompt: PromptRow = prompts[position]
        if prompt.sample_id == wanted:
            return prompt
    if wanted in by_id:
        return by_id[wanted]
    raise DataError(
        f"The prompt {wanted} of a stored rollout is not among the {len(prompts)} prompts of the "
        "run's data",
        expected="the prompts that the rollouts were sampled from",
        fix="bring the output of the run's data stage back as it was",
    )


def groups_of(rollouts: Sequence[StoredRollout]) -> dict[str, list[int]]:
    """Positions of the members of each group, groups in order of appearance, members by sample."""
    groups: dict[str, list[int]] = {}
    for position, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(position)
    return {
        name: sorted(members, key=lambda i: rollouts[i].sample_index)
        for name, members in groups.items()
    }


def some_groups(rollouts: Sequence[StoredRollout], count: int) -> list[StoredRollout]:
    """All samples of ``count`` groups, drawn by their names: the same ones each time, and of more
    groups those of fewer are a part. All groups where there are no more."""
    names = sorted(groups_of(rollouts), key=lambda n: hashlib.sha256(n.encode()).digest())
    chosen = set(names[:count])
    return [rollout for rollout in rollouts if rollout.group in chosen]
