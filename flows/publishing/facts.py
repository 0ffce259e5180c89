"""All facts of a card, collected from records.

In: a `publish` or `card` stage. Out: :class:`PublicationFacts`: its :class:`CardFacts`, with the
record behind each of them, and the weights. The same records (including the newest proof of exact
resume) always give the same facts, here and in a copy of the workspace: facts that are known only
at the time (the requesting call, the checked command, the text of a template) are recorded by the
stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flows.publishing.lineage import (
    Lineage,
    Subject,
    cost_of,
    decide,
    lineage_of,
    need_result,
    recorded_subject,
    runs_of,
    weights_of,
)
from flows.stored import recorded_field
from infra.store.provenance import read_certificates, read_proof
from infra.store.workspace import Workspace
from infra.tracking import tracked_address
from refiner_core.cards.facts import UNKNOWN, CardFacts, attempt_notes, finite, step_revision
from refiner_core.cards.public import public_certificate, public_proof
from refiner_core.contract.config import PublishConfig, RecipeConfig
from refiner_core.contract.errors import StageFailed
from refiner_core.contract.kinds import model_order
from refiner_core.contract.marks import ABSENT, walk
from refiner_core.contract.protocols import protocol_name, without_protocol
from refiner_core.contract.records import RunRecord
from refiner_core.evaluation.metrics import higher_is_better
from refiner_core.report.printing import measured


class _Candidate(NamedTuple):
    """A checkpoint: the role of its weights, its step, and its deciding metric, which is finite."""

    role: str
    step: int
    entry: Mapping[str, Any]


def _choice_report(compared: Sequence[_Candidate]) -> dict[str, Any]:
    """The choice for a stage's report."""
    best, shared = compared[0], ("metric", "decoding", "protocol", "protocol_name")
    return {
        **{key: best.entry.get(key) for key in shared},
        "step": best.step,
        "candidates": [
            {"step": c.step, **{k: c.entry.get(k) for k in ("value", "low", "high", "n")}}
            for c in sorted(compared, key=lambda c: c.step)
        ],
    }


def _choice_sentence(compared: Sequence[_Candidate]) -> str:
    """The choice for the card; empty if there was no comparison."""
    if not compared:
        return ""
    entry, step = compared[0].entry, compared[0].step
    best, *rest = (f"{measured(c.entry)}, n = {c.entry['n']}" for c in compared)
    others = "; ".join(f"step {c.step}: {s}" for c, s in zip(compared[1:], rest, strict=True))
    how = f"`{entry['metric']}` ({entry['decoding']} decoding, protocol `{entry['protocol']}`)"
    return (
        f"Published as the best of {len(compared)} checkpoints by {how}: step {step} with {best}."
        + (f" The others had: {others}." if others else "")
    )


def _measured_as(role: str, model: str) -> str:
    """The name of a role's weights in evaluations (``weights-step50``)."""
    step = role.removeprefix("weights").removeprefix("-")
    return f"{model}-{step}" if step else model


def _compared(subject: Subject) -> list[_Candidate]:
    """Checkpoints, the best first, then by step; ``evaluation-<model>-step50`` belongs to
    ``weights-step50``.

    Raises
    ------
    StageFailed
        A checkpoint has no such metric, or they were measured in different ways.
    """
    workspace, config, found = subject.workspace, subject.config.publish, []
    for role, stage_id in weights_of(subject).items():
        step = int(need_result(workspace, stage_id).report["steps"])
        evaluated = subject.inputs.get(f"evaluation-{_measured_as(role, subject.spec.model)}")
        result = workspace.read_result(evaluated) if evaluated else None
        entries = result.report["evaluations"] if result is not None else ()
        found.append(_Candidate(role, step, _number(entries, step, config)))
    found.sort(key=lambda candidate: candidate.step)
    if len({c.entry["protocol"] for c in found}) > 1:
        by = (
            f"step {c.step} by {c.entry.get('protocol_name') or c.entry['protocol']}" for c in found
        )
        raise StageFailed(
            f"The checkpoints were measured in several ways: {', '.join(by)}",
            expected="one protocol: the same prompts, decoding, judge and reward",
            fix="evaluate all of them by one recipe",
        )
    sign = -1.0 if higher_is_better(config.best_metric) is False else 1.0
    best = max(found, key=lambda c: (sign * float(c.entry["value"]), -c.step))
    return [best, *(c for c in found if c is not best)]


def _number(
    entries: Sequence[Mapping[str, Any]], step: int, config: PublishConfig
) -> Mapping[str, Any]:
    metric, decoding = config.best_metric, config.best_decoding
    there: dict[str, Mapping[str, Any]] = {
        e["metric"]: e for e in reversed(entries) if e["decoding"] == decoding
    }
    if finite(there.get(metric, {}).get("value")) is not None:
        return there[metric]
    raise StageFailed(
        f"The checkpoint of step {step} has no {metric} under {decoding} decoding, so the best "
        "cannot be chosen",
        expected=f"a metric of each checkpoint; measured are: {', '.join(sorted(there)) or 'none'}",
        fix="set publish.best_metric= and publish.best_decoding= to a measured one",
    )


@dataclass(frozen=True)
class PublicationFacts:
    """Facts of a publication, and its weights.

    ``role`` is that of the weights among the stage's inputs, ``asked`` the requesting call.
    ``decided`` is for the stage's report: facts that records will not show later. ``best`` is set
    if the best checkpoint is published: the compared checkpoints.
    """

    facts: CardFacts
    made: Lineage
    role: str
    asked: RunRecord | None
    decided: Mapping[str, Any]
    best: Mapping[str, Any] | None = None

    @property
    def ends_run(self) -> bool:
        """True if the repository is to end at these weights."""
        return self.made.whole or self.best is not None


def facts_of_stage(workspace: Workspace, stage_id: str) -> CardFacts:
    """Facts of the card of a finished `publish` or `card` stage, from records alone.

    Raises
    ------
    ConfigurationError
        There is no such stage, or it is not done.
    WorkspaceError
        A required record is missing.
    """
    return collect(recorded_subject(workspace, stage_id)).facts


def collect(subject: Subject) -> PublicationFacts:
    """Facts of a `publish` or `card` stage."""
    workspace, config, model = subject.workspace, subject.config, subject.spec.model
    weights = weights_of(subject)
    compared = _compared(subject) if subject.spec.name == "publish-best" else []
    role = compared[0].role if compared else next(iter(weights))
    made = lineage_of(workspace, weights[role])
    made_by = role if role != "weights" else f"weights-step{made.step}"
    runs = runs_of(subject, made.trained)
    decided = subject.decided or decide(subject, made, runs)
    evaluations, protocols, records = _evaluations(subject, runs)
    records |= _record_paths(subject, made, runs)
    proof, fingerprint = read_proof(workspace, made.trained), made.model.spec.fingerprint
    report, ends_run = made.reports.get(model, {}), made.whole or bool(compared)
    # The start of a foreign training, if it is known; ours start at the recipe's model.
    other_base = str(report.get("base_model") or UNKNOWN) if model == "command" else None
    facts = CardFacts(
        repo_id=config.publish.repo_id.format(
            recipe=config.recipe, seed=config.seed, step=made.step, fingerprint=fingerprint[:8]
        ),
        config=config,
        stage=model,
        step=made.step,
        # An adopted checkpoint may not have been the end of its training.
        final=made.whole and not report.get("adopted"),
        command=str(decided["command"]),
        license=config.publish.license,
        reports=made.reports,
        evaluations=evaluations,
        attempts=[n for name, found in made.attempts.items() for n in attempt_notes(name, found)],
        provenance=_provenance(workspace, made, runs[1]),
        base_model=other_base,
        static_rubric_titles=tuple(t for t, _ in decided["static_rubrics"]),
        static_rubric_weights=tuple(w for _, w in decided["static_rubrics"]),
        recorded_fields=_recorded_fields(workspace, made),
        description=f"{config.description} {_choice_sentence(compared)}".strip(),
        measured_as=_measured_as("" if made.whole else made_by, model),
        fingerprint=fingerprint,
        recipe_file=decided["recipe_file"],
        sources=decided["sources"],
        cost=cost_of(workspace, made, config),
        tracking=_tracking(workspace, made),
        revision=step_revision(config.publish, made.step, final=ends_run),
        protocols=protocols,
        template=decided["template"],
        stopped=decided.get("stopped") or {},
        # Proof of exact resume of this training, if there is one.
        proof=public_proof(proof) if proof and proof.fingerprint == fingerprint else {},
        certificate=public_certificate(read_certificates(workspace), _worker(workspace, made)),
        versions={n: v for n, r in made.records.items() if (v := r.spec.stage_version) > 1},
        records=records,
    )
    best = _choice_report(compared) if compared else None
    return PublicationFacts(facts, made, role, runs[0], decided, best)


# ---------------------------------------------------------------- numbers


def _evaluations(
    subject: Subject, runs: Sequence[RunRecord | None]
) -> tuple[list[Mapping[str, Any]], dict[str, Any], dict[str, str]]:
    """Every metric of the input evaluations, also as corrected by people's labels that are recorded
    for one of the ``runs``, their protocols, and the source of each. All include the random
    copier's baseline; it is listed once."""
    entries: dict[tuple[str, ...], Mapping[str, Any]] = {}
    protocols: dict[str, Any] = {}
    places: dict[tuple[str, ...], str] = {}

    def add(entry: Mapping[str, Any], path: str) -> None:
        key = tuple(str(entry[k]) for k in ("stage", "protocol", "decoding", "metric"))
        entries.setdefault(key, entry)
        places.setdefault(key, path)

    named = [run.run for run in runs if run is not None]
    people = [
        (entry, f"runs/{name}/people.json#forms.{entry['form']}")
        for name in named
        for entry in subject.workspace.people_of(name)
    ]
    roles = [r for r in subject.inputs if r.startswith("evaluation-")]
    for role in sorted(roles, key=_rank):
        stage_id = subject.inputs[role]
        report = need_result(subject.workspace, stage_id).report
        protocols |= report["protocols"]
        for part in ("evaluations", "reference"):
            for position, entry in enumerate(report[part]):
                add(entry, subject.path(stage_id, f"result.json#report.{part}.{position}"))
        for entry, path in people:
            if entry["evaluation"] == stage_id:
                add(entry, path)
    records = {f"evaluations.{i}": places[key] for i, key in enumerate(entries)}
    used = {str(e["protocol"]) for e in entries.values()}
    return list(entries.values()), {k: v for k, v in protocols.items() if k in used}, records


def _rank(role: str) -> tuple[str, tuple[int, int, str]]:
    """Sort key: the recipe's own protocol first, then models in the order of their training."""
    measured = without_protocol(role).removeprefix("evaluation-")
    return protocol_name(role), model_order(measured)


# ---------------------------------------------------------------- training


def _provenance(workspace: Workspace, made: Lineage, began: RunRecord | None) -> dict[str, Any]:
    code = began.provenance if began else {}
    trained = _worker(workspace, made)
    host = trained.get("host") or {}
    gpus = host.get("gpus") or []
    machine = ", ".join(gpus) or f"{host.get('cpu')}, {host.get('cores')} cores"
    # The environment of an external trainer is unknown, whatever its worker had.
    versions = {} if "command" in made.records else trained.get("versions")
    return {
        "commit": code.get("commit"),
        "dirty": code.get("dirty"),
        "packages": versions or {},
        "host": machine if host else None,
        "durations": {
            name: attempts[-1].seconds
            for name, attempts in made.attempts.items()
            if attempts
            and attempts[-1].seconds is not None
            and not made.reports.get(name, {}).get("adopted")
        },
    }


def _worker(workspace: Workspace, made: Lineage) -> Mapping[str, Any]:
    """Hardware and software of the attempt that made the weights."""
    if made.whole:
        return need_result(workspace, made.trained).provenance
    attempt = workspace.layout.attempt(made.trained, made.last_attempt)
    started = workspace.read_control(attempt.started) or {}
    return started.get("provenance") or {}


def _recorded_fields(workspace: Workspace, made: Lineage) -> tuple[str, ...] | None:
    """Fields of the training's configuration, if they differ from today's."""
    recorded = workspace.part(workspace.layout.attempt(made.trained, made.last_attempt), "config")
    paths = (path for path, _ in walk(RecipeConfig))
    known = tuple(p for p in paths if recorded_field(recorded, p, ABSENT) is not ABSENT)
    return None if len(known) == len(walk(RecipeConfig)) or not known else known


def _tracking(workspace: Workspace, made: Lineage) -> dict[str, str]:
    """Addresses of the stages' runs in an online tracker."""
    found = {}
    for name, attempts in made.attempts.items():
        for attempt in reversed(attempts):
            folder = workspace.layout.attempt(made.ids[name], attempt.number).tracker
            if address := tracked_address(folder):
                found[name] = address
                break
    return found


def _config_path(subject: Subject, stage_id: str, attempt: int) -> str:
    """Path of an attempt's configuration: earlier versions gave it a file of its own."""
    apart = subject.workspace.layout.attempt(stage_id, attempt).control / "config.json"
    name = apart.name if apart.exists() else "intent.json#config"
    return f"{subject.attempt_path(stage_id, attempt)}/{name}"


def _record_paths(
    subject: Subject, made: Lineage, runs: tuple[RunRecord | None, RunRecord | None]
) -> dict[str, str]:
    """Sources of the facts (except metrics), by the beginning of their dotted paths."""
    asked, began = runs
    trained, name, last = made.trained, made.model.spec.name, made.last_attempt
    found = {
        "config": _config_path(subject, subject.stage_id, subject.attempt),
        "fingerprint": subject.path(trained, "spec.json#fingerprint"),
        "step": subject.path(made.weights, "result.json#report.steps"),
        "recorded_fields": _config_path(subject, trained, last),
        "provenance": (
            subject.path(trained, "result.json#provenance")
            if made.whole
            else f"{subject.attempt_path(trained, last)}/started.json#provenance"
        ),
        "cost": subject.path(trained, "attempts"),
    }
    if subject.workspace.layout.proof(trained).exists():
        found["proof"] = f"proofs/{trained}/proof.json"
    if not made.whole:
        found["stopped"] = subject.path(trained, "attempts")
    if asked is not None:
        found["command"] = f"runs/{asked.run}/run.json#overrides"
    if began is not None:
        for part in ("commit", "dirty"):
            found[f"provenance.{part}"] = f"runs/{began.run}/run.json#provenance.{part}"
    for stage, stage_id in made.ids.items():
        source = made.weights if stage == name else stage_id
        if stage in made.reports:
            found[f"reports.{stage}"] = subject.path(source, "result.json#report")
    notes = [(made.ids[n], a.number) for n, found_ in made.attempts.items() for a in found_]
    for position, (stage_id, attempt) in enumerate(notes):
        found[f"attempts.{position}"] = subject.attempt_path(stage_id, attempt)
    return found
