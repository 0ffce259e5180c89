"""What a publication finds out once, and records for whoever makes its card again.

In: a stage, what is behind the weights, the calls. Out: JSON values for ``made_with`` of
the stage's report: the command that was checked, the texts of files that may change later, the
calls among which others will be recorded.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from flows.cards.reproduction import Made, reproduce
from flows.publishing.behind import Behind, Subject
from infra.host.processes import ProcessId
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, StageFailed
from refiner_core.contract.records import RunRecord
from refiner_core.rubrics import load_rubric_set


def decide(
    subject: Subject, made: Behind, runs: tuple[RunRecord | None, RunRecord | None]
) -> dict[str, Any]:
    """All of it.

    Raises
    ------
    StageFailed
        No command makes the model again, or the template is not what it was.
    """
    (asked, began), config = runs, subject.config
    command = reproduce(
        Made(
            recipe=str(asked.provenance.get("recipe") or asked.recipe) if asked else "",
            overrides=asked.overrides if asked else (),
            config=config,
            trained=made.model.spec.name,
            specs={name: record.spec for name, record in made.records.items()},
        )
    )
    return {
        "runs": [None if r is None else r.run for r in (asked, began)],
        "command": command.command,
        "recipe_file": command.recipe_file,
        "not_the_shipped_recipe": list(command.why_not_shipped),
        "sources": dict(command.files),
        "template": _template(config, subject.spec.sources.get("card_template")),
        "static_rubrics": _static_rubrics(config, made),
        "stopped": _stopped(subject, made),
    }


def _stopped(subject: Subject, made: Behind) -> dict[str, Any]:
    """How the training behind a checkpoint had ended by now, if it had and was not taken up again;
    empty where it goes on or is done. Later the records may tell of another attempt."""
    attempts = made.model.attempts
    if made.whole or made.model.result is not None or not attempts:
        return {}
    last = attempts[-1]
    if last.outcome is not None:
        found = {"failure": last.outcome.failure, "step": last.outcome.step}
        return {**found, "ended_at": last.ended_at}
    workspace = subject.workspace
    started = workspace.read_control(workspace.layout.attempt(made.trained, last.number).started)
    worker = ProcessId.parse(str((started or {}).get("process") or ""))
    if started is None or not worker.here or worker.alive:
        return {}
    beat = workspace.read_heartbeat(made.trained, last.number) or {}
    return {"failure": "killed", "step": (beat.get("progress") or {}).get("done")}


def _template(config: RecipeConfig, digest: str | None) -> str | None:
    if config.publish.card_template is None:
        return None
    path = Path(config.publish.card_template).expanduser()
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StageFailed(
            f"publish.card_template {path} cannot be read ({error})",
            expected="a Jinja file in UTF-8",
            fix="bring it back, and run the same command again",
        ) from error
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise StageFailed(
            f"publish.card_template {path} has changed since the run was begun",
            expected="the template that the publication was planned with",
            fix="give the same `refiner run` command again: it plans with what the file holds now",
        )
    return text


def _static_rubrics(config: RecipeConfig, made: Behind) -> list[tuple[str, float]]:
    """Titles and signed weights of the static rubrics that shaped the reward; none where their file
    is not any more what it was."""
    reward = config.reward
    if "static" not in reward.rubric_source or reward.instance_rubrics_only:
        return []
    try:
        rubrics = load_rubric_set(reward.static_rubrics)
    except ConfigurationError:
        return []
    used = {r.spec.sources["rubrics"] for r in made.records.values() if "rubrics" in r.spec.sources}
    if used and used != {rubrics.digest()}:
        return []
    return [(r.title, r.signed_weight) for r in rubrics.rubrics]
