"""What the criteria of a run's judge teach: a report from stored judgements, and a smaller set.

In: a run. Out: the document of :mod:`refiner_core.rescoring.criteria`, and ``report.md``,
``report.json`` and, if a smaller static set keeps the order of the answers, ``smaller.yaml``, which
``refiner rescore --rubrics`` accepts. No judge is called.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from flows.rescoring.reading import RolloutSelection, SampledPolicy, read_policies
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


class CriteriaReport(NamedTuple):
    """The document of a report, and the folder of its files."""

    document: dict[str, Any]
    folder: Path


def report_criteria(
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    part: RolloutSelection | None = None,
    keep: float = 0.95,
    out: str | Path | None = None,
) -> CriteriaReport:
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
    CriteriaReport
        ``document["smaller"]["file"]`` is the smaller set, if there is one.

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
    document = {
        **criteria_report(rows, keep=keep, seed=config.seed),
        **{"run": record.run, "policies": [policy.name for policy in policies]},
        "judge": config.judge.model,
        "batched": is_batched(config.judge),
    }
    folder = Path(out) if out else ws.layout.rubric_reports / record.run
    smaller = document["smaller"] or {}
    if smaller.get("reached"):
        smaller["file"] = str(folder / SMALLER)
        smaller["command"] = _command(record.run, ws, policies, folder / SMALLER)
    _write(document, folder)
    return CriteriaReport(document, folder)


def criteria_text(document: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    steps = document["steps"]
    about = (
        f"training steps {steps[0]} to {steps[-1]}" if steps else ", ".join(document["policies"])
    )
    lead = (
        f"Run {document['run']}, {about}: {document['answers']} answers to {document['prompts']} "
        f"prompts, {document['judgements']} judgements by {document['judge']}, "
        f"{document['unusable']} of them without a score. Answers without a score are left out, as "
        "in training. This describes the judge's scores, not whether they are right."
    )
    text = printing.document("Criteria", lead, sections(document))
    return text + "".join(f"\n{line}\n" for line in _ending(document["smaller"] or {}, document))


def _ending(smaller: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    if not smaller.get("reached"):
        return
    if document["batched"]:
        yield (
            "This judge is asked about all criteria of an answer in one call: a smaller set makes "
            "calls shorter, not fewer, and may change its scores."
        )
    yield f"Try it on stored answers:\n\n```bash\n{smaller['command']}\n```"


def _command(run: str, workspace: Workspace, policies: list[SampledPolicy], file: Path) -> str:
    words = ["refiner", "rescore", run, f"workspace={workspace.root}", "--rubrics", str(file)]
    if policies[0].model != "grpo" or not policies[0].steps:
        words += ["--from", "evaluation"]
    return shlex.join(words)


def _write(document: Mapping[str, Any], folder: Path) -> None:
    with no_space_guard(folder, "writing the report on criteria"):
        folder.mkdir(parents=True, exist_ok=True)
        if "file" in (document["smaller"] or {}):
            atomic.write_text(folder / SMALLER, _set_text(document))
        atomic.write_text(folder / TEXT, criteria_text(document))
        values = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        atomic.write_text(folder / REPORT, values + "\n")


def _set_text(document: Mapping[str, Any]) -> str:
    """The smaller set as a file."""
    smaller, kept = document["smaller"], document["smaller"]["kept"]
    names = {"title": "title", "criterion": "description", "polarity": "polarity"}
    content = {
        "name": f"{kept[0]['source']}-smaller",
        "version": 1,
        "description": f"{len(kept)} of {smaller['of']} criteria of {kept[0]['source']}, with "
        f"weights fitted to judgements of run {document['run']} by `refiner rubrics report`.",
        "rubrics": [
            {new: one[old] for old, new in names.items()} | {"weight": round(one["weight"], 4)}
            for one in kept
        ],
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
