"""What a rescoring leaves behind: ``rescore.json``, ``rewards.parquet``, ``table.md``,
``figure.svg``.

In: a :class:`~flows.rescoring.work.Done`. Out: the document, and the files, ``rescore.json`` last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows.rescoring.reading import Policy
from flows.rescoring.settings import AGAIN, Setting
from flows.rescoring.work import Done
from infra.store import atomic
from infra.store.room import no_space_guard
from infra.store.traces import encode_rollouts
from infra.store.workspace import now_text
from refiner_core.contract.records import to_json
from refiner_core.rescoring.document import (
    DOCUMENT_VERSION,
    comparison_json,
    matrix_json,
    plain,
)
from refiner_core.rescoring.figure import Cloud, draw
from refiner_core.rescoring.questions import judge_identity
from refiner_core.rescoring.rollouts import groups_of
from refiner_core.rescoring.table import markdown

DOCUMENT, REWARDS, TABLE, FIGURE = "rescore.json", "rewards.parquet", "table.md", "figure.svg"


def document_of(done: Done) -> dict[str, Any]:
    """Everything that was found, as plain values."""
    planned = done.planned
    wanted = planned.wanted
    document = {
        "version": DOCUMENT_VERSION,
        "id": planned.short_id,
        "made_at": now_text(),
        "refiner": version("refiner"),
        "workspace": str(wanted.workspace.root),
        "part": to_json(wanted.part),
        "metric": wanted.metric,
        "policies": [_policy(policy) for policy in planned.policies],
        "settings": [_setting(setting) for setting in planned.settings],
        "fidelity": {
            name: {
                **plain(found),
                "exact": found.exact,
                "sound": found.sound,
                "warning": found.warning(),
            }
            for name, found in done.fidelity.items()
        },
        "judging": [plain(bill) for bill in done.bills],
        "comparisons": [
            comparison_json(c.policy, c.setting, c.baseline, c.comparison, c.agreement)
            for c in done.compared
        ],
        "matrix": None if done.matrix is None else matrix_json(done.matrix),
    }
    return dict(atomic.finite(document))


def _policy(policy: Policy) -> dict[str, Any]:
    return {
        "name": policy.name,
        "run": policy.run,
        "recipe": policy.config.recipe,
        "stage": policy.stage_id,
        "model": policy.model,
        "attempt": policy.attempt,
        "data": policy.data_stage,
        "sources": dict(policy.sources),
        "reward": to_json(policy.config.reward),
        "judge": judge_identity(policy.config.judge, policy.sources.get("judge_prompt", "-")),
        "advantages": policy.config.grpo.advantage_normalization_type,
        "steps": policy.steps,
        "rollouts": len(policy.rollouts),
        "groups": len(groups_of(policy.rollouts)),
        "prompts": len({r.prompt.sample_id for r in policy.rollouts}),
        "files": list(policy.files),
    }


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        "name": setting.name,
        "reward": to_json(setting.reward),
        "judge": judge_identity(setting.judge, "-") | {"prompt": setting.judge.prompt},
    }


def write(done: Done, document: dict[str, Any], folder: Path) -> None:
    """All files; what was there of an earlier call is replaced.

    Raises
    ------
    NoSpaceError
        They did not fit.
    """
    with no_space_guard(folder, "writing the results of a rescoring"):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(folder / REWARDS, encode_rollouts(list(_rows(done))))
        atomic.write_text(folder / TABLE, markdown(document))
        atomic.write_text(folder / FIGURE, draw(document, _clouds(done)))
        atomic.write_json(folder / DOCUMENT, document)


def _rows(done: Done) -> Iterator[dict[str, Any]]:
    """One row per rollout and setting."""
    for policy in done.planned.policies:
        for setting, scores in done.scores[policy.name].items():
            for i, rollout in enumerate(policy.rollouts):
                yield {
                    "policy": policy.name,
                    "run": policy.run,
                    "setting": setting,
                    "step": rollout.step,
                    "group": rollout.group,
                    "sample_id": rollout.prompt.sample_id,
                    "sample_index": rollout.sample_index,
                    "status": scores.statuses[i],
                    "total": scores.totals[i],
                    "advantage": scores.advantages[i],
                    **{f"reward/{k}": v for k, v in scores.components[i].items()},
                    "judgements": json.dumps(list(scores.judgements[i]), ensure_ascii=False),
                }


def _clouds(done: Done) -> list[Cloud]:
    clouds = []
    for found in done.compared:
        if found.setting == AGAIN:
            continue
        scores = done.scores[found.policy]
        pairs = zip(
            scores[found.baseline].advantages, scores[found.setting].advantages, strict=True
        )
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        clouds.append(Cloud(found.policy, found.setting, known))
    return clouds
