"""What the criteria of a run's judge teach: a report from stored judgements, and a smaller set.

In: a run. Out: the document of :mod:`refiner_core.rescoring.criteria`, and ``report.md``,
``report.json`` and, if a smaller static set keeps the order of the answers, ``smaller.yaml``, which
``refiner rescore --rubrics`` accepts. No judge is called.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from flows.rescoring.reading import RolloutSelection, read_policies
from flows.running.status import required_run
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.judge_report.material import is_batched
from refiner_core.report import printing
from refiner_core.rescoring.criteria import criteria_report, rubric_credits, sections

REPORT, TEXT, SMALLER = "report.json", "report.md", "smaller.yaml"


def report_criteria(
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    part: RolloutSelection | None = None,
    keep: float = 0.95,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Report what each criterion teaches, from a run's stored judgements.

    Parameters
    ----------
    run
        Run id (default: the newest).
    workspace
        The folder that has its records.
    part
        Selection of rollouts or samples (default: all rollouts of training).
    keep
        Rank correlation that a smaller set must keep.
    out
        Folder for the files (default: ``rubric-reports/RUN`` in the workspace).

    Returns
    -------
    dict
        Numbers of criteria; ``folder`` has the files; ``command`` tries the smaller set, if there
        is one.

    Raises
    ------
    ConfigurationError
        There is no such run, or none of its answers was judged by a rubric.
    DataError, NoSpaceError, UnsupportedError
        Files are gone or do not fit on the disk, or the run trains an agent.
    """
    ws = Workspace.read_only(workspace)
    record = required_run(ws, run, "a run whose answers were judged")
    policies = read_policies(ws, [record], part or RolloutSelection())
    rollouts = [
        replace(rollout, group=f"{policy.name}, {rollout.group}")
        for policy in policies
        for rollout in policy.rollouts
    ]
    rows = rubric_credits(rollouts)
    if rows.empty:
        raise ConfigurationError(
            f"None of the {len(rollouts)} answers of run {record.run} was judged by a rubric.",
            expected="a run with rubrics (reward.rubric_source), and answers with an answer block",
            fix="name another run, or later steps with --steps",
        )
    config = policies[0].config
    folder = Path(out) if out else ws.layout.rubric_reports / record.run
    document = {
        **criteria_report(rows, keep=keep, seed=config.seed),
        **{"run": record.run, "policies": [policy.name for policy in policies]},
        **{"judge": config.judge.model, "batched": is_batched(config.judge)},
        **{"folder": str(folder), "command": ""},
    }
    with no_space_guard(folder, "writing the report on criteria"):
        folder.mkdir(parents=True, exist_ok=True)
        if (document["smaller"] or {}).get("reached"):
            atomic.write_text(folder / SMALLER, _set_text(document))
            words = ["refiner", "rescore", record.run, f"workspace={ws.root}"]
            words += ["--rubrics", str(folder / SMALLER)]
            words += [] if policies[0].steps else ["--from", "evaluation"]
            document["command"] = shlex.join(words)
        atomic.write_text(folder / TEXT, criteria_text(document))
        atomic.write_json(folder / REPORT, document)
    return document


def criteria_text(document: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    steps = document["steps"]
    about = f"training steps {steps[0]} to {steps[-1]}" if steps else ""
    lead = (
        f"Run {document['run']}, {about or ', '.join(document['policies'])}: "
        f"{document['answers']} answers to {document['prompts']} prompts, "
        f"{document['judgements']} judgements by {document['judge']}. {document['unusable']} have "
        "no score; their answers are left out, as in training. This describes the judge's scores, "
        "not whether they are right."
    )
    return printing.document("Criteria", lead, sections(document))


def _set_text(document: Mapping[str, Any]) -> str:
    """The smaller set as a file."""
    kept, of = document["smaller"]["kept"], document["smaller"]["of"]
    name, run = kept[0]["source"], document["run"]
    content = {
        **{"name": f"{name}-smaller", "version": 1},
        "description": f"{len(kept)} of {of} criteria of {name}, with weights fitted to judgements "
        f"of run {run} by `refiner rubrics report`.",
        "rubrics": [
            {
                **{"title": one["title"], "description": one["criterion"]},
                **{"polarity": one["polarity"], "weight": round(one["weight"], 4)},
            }
            for one in kept
        ],
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
