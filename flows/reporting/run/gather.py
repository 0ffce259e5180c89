"""Everything about a run, from its records.

In: a workspace and the id of a run. Out: a :class:`~refiner_core.report.run.document.RunReport`.
Reads only, asks no scheduler, imports neither torch nor Prefect.
"""

from __future__ import annotations

from flows.reporting.run import facts
from flows.reporting.run.cost import cost_of_run, disk_of_run
from flows.reporting.run.curves import training_curves
from flows.reporting.run.examples import evaluation_examples
from flows.reporting.run.numbers import change_rows, evaluations_of_run, number_rows
from flows.reporting.run.reading import RunReading
from flows.reporting.run.rollouts import rollout_examples
from flows.reporting.run.stages import incident_lines, look, stage_rows, standing_of
from infra.store.workspace import Workspace, now_text
from refiner_core.report.run.document import RUN_REPORT_VERSION, RunReport


def report_of_run(run: str, workspace: Workspace) -> RunReport:
    """The report of a run as it is now; changes nothing.

    Parameters
    ----------
    run
        Its id.

    Raises
    ------
    ConfigurationError
        There is no such run.
    WorkspaceError
        The record of the call itself is damaged.
    """
    reading = RunReading(workspace, workspace.read_run(run))
    status = look(reading)
    rows = stage_rows(reading, status)
    standing = standing_of(reading, status, rows)
    evaluations = evaluations_of_run(reading)
    published = facts.publications(reading)
    report = RunReport(
        version=RUN_REPORT_VERSION,
        run=reading.run.run,
        recipe=reading.run.recipe,
        description=reading.config.description,
        state=standing.state,
        state_text=standing.text,
        command=facts.command_of(reading),
        workspace=str(workspace.root),
        began_at=reading.run.started_at,
        ended_at=standing.ended_at,
        made_at=now_text(),
        agent=bool(reading.config.environment.name),
        stages=rows,
        incidents=incident_lines(reading),
        curves=training_curves(reading),
        numbers=reading.tried("Numbers of evaluations", number_rows, evaluations) or (),
        changes=change_rows(reading, evaluations),
        examples=(*evaluation_examples(reading, evaluations), *rollout_examples(reading)),
        disk=disk_of_run(reading),
        cost=cost_of_run(reading, rows),
        published=published,
        overrides=facts.shown_overrides(reading.run.overrides),
        settings=facts.changed_settings(reading.run.config),
        provenance=facts.provenance_of(reading),
        next_commands=facts.next_commands(reading, standing.state, rows, published),
        warnings=tuple(dict.fromkeys(reading.warnings)),
    )
    return facts.without_credentials(report)
