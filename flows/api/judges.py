"""Judges: asked, measured, their servers listed and ended.

In: fields that say which judge, or the workspace whose servers are meant. Out: judgements, reports,
standings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest

if TYPE_CHECKING:
    from flows.judge_report import Asked, Kind, Made
    from infra.services.registry import ServiceStatus

_HERE = RecipeConfig.workspace


class Stopped(NamedTuple):
    """Ids of servers that have ended, that have not yet, and that are needed by somebody."""

    ended: list[str]
    left: list[str]
    busy: list[str]


def ask_judge(
    overrides: Sequence[str] = (),
    workspace: str | Path = _HERE,
    *,
    kind: Kind | None = None,
    question: str | None = None,
    answer: str | None = None,
    criterion: str | None = None,
) -> Asked:
    """Ask a judge one question.

    Parameters
    ----------
    overrides
        Which judge, such as ``judge.base_url=…`` and ``judge.model=…`` (default: the lexical one).
    workspace
        Whose servers of judges are used.
    kind
        What is asked, a rubric by default.
    question, answer, criterion
        What is judged, and against what; without any, an example, and without a kind one of each:
        what comes back is the first without a score, or else the rubric's.

    Returns
    -------
    Asked
        The judgement with its time and tokens; ``judgement.score`` is None where there is none.

    Raises
    ------
    ConfigurationError
        A field that does not fit, or a server that refuses.
    JudgeOutage
        Nobody answered within a few seconds.
    """
    from flows.judge_report import ask_once

    room = Workspace.read_only(workspace)
    return ask_once(room, overrides, kind, (question, answer, criterion))


def measure_judge(
    run: str | None = None,
    workspace: str | Path = _HERE,
    *,
    overrides: Sequence[str] = (),
    against: Sequence[str] = (),
    sample: int | None = None,
    repeats: int = 3,
    tell: Callable[[str, int], None] = lambda what, count: None,
) -> Made:
    """Measure a judge: repeatability, agreement, bias, hostile answers, cost. Writes nothing.

    Parameters
    ----------
    run
        Whose answers are judged (default: a small set with gold scores that comes with refiner).
    workspace
        The folder that the run is recorded in.
    overrides
        Which judge (default: the run's own, or the lexical one).
    against
        Fields of a second judge that differ from the first.
    sample
        At most so many questions.
    repeats
        How often everything is asked as it is.
    tell
        Hears what is asked next, and how many questions that is.

    Returns
    -------
    Made
        The report, and what it is called; ``flows.judge_report.write_report`` writes it.

    Raises
    ------
    ConfigurationError
        A field, run or judge that does not fit.
    JudgeOutage
        Nobody answered.
    WorkspaceError
        Somebody else may have written what is recorded of the run.
    """
    from flows.judge_report import Wanted, make_report
    from flows.running.status import find_run

    room = Workspace.read_only(workspace)
    if run is not None:
        room.require_trust()  # its record names the judge, and whose key it gets
    wanted = Wanted(
        workspace=room,
        run=None if run is None else find_run(room, run),
        overrides=tuple(overrides),
        against=tuple(against),
        sample=sample,
        repeats=repeats,
    )
    return make_report(wanted, tell)


def list_judge_servers(
    service: str | None = None, workspace: str | Path = _HERE
) -> list[ServiceStatus]:
    """The servers of judges that runs of a workspace have started.

    Parameters
    ----------
    service
        Only the one with this id, or those whose ids begin so.
    workspace
        The folder.

    Returns
    -------
    list of ServiceStatus
        How each is, where it answers, who needs it.

    Raises
    ------
    WorkspaceError
        It is no workspace, or a record is damaged.
    """
    from infra.services.registry import services_of

    return services_of(Workspace.read_only(workspace), service)


def stop_judge_servers(
    service: str | None = None,
    workspace: str | Path = _HERE,
    *,
    tell: Callable[[str], None] = lambda message: None,
) -> Stopped:
    """End a server of a judge, or all that nobody needs just now.

    Parameters
    ----------
    service
        An id or its beginning; it is ended though somebody needs it, who then starts another one.
    workspace
        The folder.
    tell
        Hears what is waited for.

    Returns
    -------
    Stopped
        Which have ended, and which have not.

    Raises
    ------
    ConfigurationError
        There is no such server; names the nearest.
    """
    from infra.services.registry import RUNNING, end_service, services_of

    room = Workspace.read_only(workspace)
    found = services_of(room, service)
    if service is not None and not found:
        names = [one.id for one in services_of(room)]
        raise ConfigurationError(
            f"{workspace} has no server {service!r}.{suggest(service, names)}",
            expected=f"one of: {', '.join(names) or '(none was ever started)'}",
            fix="see `refiner judge servers`",
        )
    wanted = [one for one in found if one.state in (*RUNNING, "killed")]
    if service is None:
        wanted = [one for one in wanted if not one.leases]
    stopped = Stopped([], [], [one.id for one in found if one.leases])
    for one in wanted:
        for holder in one.leases:
            tell(f"{one.id} is needed by {holder}, which starts another one")
        over = end_service(room, one.id, "`refiner judge stop`", tell=tell)
        (stopped.ended if over else stopped.left).append(one.id)
    return stopped
