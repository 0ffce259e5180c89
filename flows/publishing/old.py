"""Publishing: a run's records become a card, and weights and card go to where people find them.

In: the work of a ``publish`` or ``card`` stage. Out: a folder in Hub layout, and a report that says
what lies there. The card is a pure function of records (:mod:`refiner_core.cards`); this module
only collects the facts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.stages import StageWork
from infra.foreign.exports import require_whole
from infra.publishing import publish_to_folder, update_card
from refiner_core.cards import CardFacts, attempt_notes, build_card
from refiner_core.cards.facts import UNKNOWN
from refiner_core.contract.records import RunRecord, StageRecord
from refiner_core.evaluation.results import load_results
from refiner_core.rubrics import load_rubric_set

CARD_FILE = "README.md"


def publish(work: StageWork) -> dict[str, Any]:
    """Copy the final weights and a card to the target; numbers come later, by ``card``."""
    if work.spec.model == "command":
        require_whole(work.inputs["weights"] / "model", "publishing")
    records = _records_behind(work)
    facts = card_facts(work, records, evaluations=())
    card = build_card(facts)
    (work.output_dir / CARD_FILE).write_text(card, encoding="utf-8")
    target = _target(work, facts.repo_id)
    published = publish_to_folder(work.inputs["weights"] / "model", card, target)
    return {
        "repo_id": facts.repo_id,
        "target": str(target),
        "step": facts.step,
        "files": [{"path": f.path, "bytes": f.bytes, "sha256": f.sha256} for f in published.files],
        "card": card,
    }


def refresh_card(work: StageWork) -> dict[str, Any]:
    """Write the evaluations' numbers into the published card."""
    published = work.workspace.read_result(work.input_stages["publish"])
    assert published is not None, "an input of a running stage is done"
    evaluations: list[Mapping[str, Any]] = []
    for role, folder in work.inputs.items():
        if role.startswith("evaluation-"):
            results = load_results(folder)
            evaluations += [*results["evaluations"], *results["reference"]]
    facts = card_facts(work, _records_behind(work), evaluations=_unique(evaluations))
    card = build_card(facts)
    (work.output_dir / CARD_FILE).write_text(card, encoding="utf-8")
    target = Path(str(published.report["target"]))
    update_card(target, card)
    return {"repo_id": facts.repo_id, "target": str(target), "card": card}


def card_facts(
    work: StageWork, records: Mapping[str, StageRecord], evaluations: Sequence[Mapping[str, Any]]
) -> CardFacts:
    """What the card says, read from records. ``records`` maps stage names to records."""
    config, model = work.config, work.spec.model
    trained = records[model].result
    assert trained is not None, "an input of a running stage is done"
    step = int(trained.report["steps"])
    run = _run_of(work)
    reward = config.reward
    static = "static" in reward.rubric_source and not reward.instance_rubrics_only
    return CardFacts(
        repo_id=config.publish.repo_id.format(
            recipe=config.recipe,
            seed=config.seed,
            step=step,
            fingerprint=records[model].spec.fingerprint[:8],
        ),
        config=config,
        stage=model,
        step=step,
        final=not trained.report.get("adopted"),  # nobody knows whether it had more to come
        command=_command(config.recipe, run),
        license=config.publish.license,
        reports={n: r.result.report for n, r in records.items() if r.result is not None},
        evaluations=evaluations,
        attempts=[note for name, r in records.items() for note in attempt_notes(name, r.attempts)],
        provenance=_provenance(run, trained.provenance, records),
        base_model=_other_base(model, trained.report),
        static_rubric_titles=tuple(r.title for r in load_rubric_set(reward.static_rubrics).rubrics)
        if static
        else (),
    )


def _other_base(model: str, report: Mapping[str, Any]) -> str | None:
    """What another trainer has started from, as far as it is known; ours start at the recipe's."""
    return str(report.get("base_model") or UNKNOWN) if model == "command" else None


def _command(recipe: str, run: RunRecord | None) -> str:
    """The command that made it, without where it ran: that is nobody else's folder."""
    overrides = [o for o in (run.overrides if run else ()) if not o.startswith("workspace=")]
    return shlex.join(["refiner", "run", recipe, *overrides])


def _provenance(
    run: RunRecord | None, trained: Mapping[str, Any], records: Mapping[str, StageRecord]
) -> dict[str, Any]:
    code = run.provenance if run else {}
    host = trained.get("host") or {}
    gpus = host.get("gpus") or []
    machine = ", ".join(gpus) or f"{host.get('cpu')}, {host.get('cores')} cores"
    # Of another trainer's environment nothing is known, whatever its worker had.
    versions = {} if "command" in records else trained.get("versions")
    return {
        "commit": code.get("commit"),
        "dirty": code.get("dirty"),
        "packages": versions or {},
        "host": machine if host else None,
        "durations": {
            name: record.result.seconds
            for name, record in records.items()
            if record.result is not None and not record.result.report.get("adopted")
        },
    }


def _target(work: StageWork, repo_id: str) -> Path:
    path = work.config.publish.path
    root = Path(path).expanduser() if path else work.workspace.layout.published
    return root.absolute() / repo_id


def _records_behind(work: StageWork) -> dict[str, StageRecord]:
    """Records of the data and training stages that this stage rests on, by stage name."""
    found: dict[str, StageRecord] = {}
    waiting = [work.stage_id]
    while waiting:
        inputs = _inputs_of(work, waiting.pop())
        for stage_id in inputs.values():
            record = work.workspace.read_record(stage_id)
            if record is None or record.spec.name in found:
                continue
            found[record.spec.name] = record
            waiting.append(stage_id)
    order = ("data", "sft", "grpo", "command")
    return {name: found[name] for name in order if name in found}


def _inputs_of(work: StageWork, stage_id: str) -> dict[str, str]:
    """Role -> stage id of a stage's inputs, as its finished attempt had them."""
    if stage_id == work.stage_id:
        return dict(work.input_stages)
    result = work.workspace.read_result(stage_id)
    number = result.attempt if result else 1
    return work.workspace.read_control(work.workspace.layout.attempt(stage_id, number).inputs) or {}


def _run_of(work: StageWork) -> RunRecord | None:
    """The first recorded run that this stage belongs to."""
    for run_id in work.workspace.run_ids():
        run = work.workspace.read_run(run_id)
        if work.stage_id in run.stages.values():
            return run
    return None


def _unique(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every evaluation brings the random copier's floor along; it is said once per protocol."""
    keys = ("stage", "protocol", "decoding", "metric")
    return list({tuple(str(e[k]) for k in keys): e for e in evaluations}.values())
