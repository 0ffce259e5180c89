"""Publications: checkpoints published by hand, cards checked and shown, dead runs taken over.

In: names of runs, cards and folders. Out: plans, outcomes, findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.running.calls import RunOutcome
from flows.running.runs import publish_run
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord

if TYPE_CHECKING:
    from flows.cards.inspection import Checked, Shown

_HERE = RecipeConfig.workspace


def plan_publication(
    run: str | None = None,
    workspace: str | Path = _HERE,
    *,
    steps: Sequence[int] = (),
    overrides: Sequence[str] = (),
    evaluate: bool = True,
) -> Plan:
    """What publishing checkpoints of a run by hand would do. Changes nothing.

    Parameters
    ----------
    run
        Which run (default: the newest that trains). It may still train, have ended or have died.
    workspace
        The folder that it is recorded in.
    steps
        Saved steps (default: the last checkpoint).
    overrides
        Of ``publish``, ``dispatch``, ``disk`` and ``tracking``, as ``key=value``.
    evaluate
        Wait for evaluations, and begin those that are missing.

    Returns
    -------
    Plan
        Exports, evaluations, publications.

    Raises
    ------
    ConfigurationError
        There is no such run or step, or an override is not about publishing.
    """
    from flows.publishing import by_hand

    room = Workspace.read_only(workspace)
    return by_hand.plan_publication(room, run, steps, overrides, evaluate=evaluate).plan


def begin_publication(
    run: str | None = None,
    workspace: str | Path = _HERE,
    *,
    steps: Sequence[int] = (),
    overrides: Sequence[str] = (),
    evaluate: bool = True,
) -> tuple[Plan, Workspace, RunRecord]:
    """Record a call that publishes, for somebody to work on.

    Parameters
    ----------
    run, workspace, steps, overrides, evaluate
        As of :func:`flows.api.plan_publication`.

    Returns
    -------
    Plan, Workspace, RunRecord
        For :func:`flows.api.publish_run`, or :func:`flows.api.detach_run`.

    Raises
    ------
    RefinerError
        As of :func:`flows.api.plan_publication`; or the Hub would not take it.
    """
    from flows.publishing import by_hand

    room = Workspace.read_only(workspace)
    return by_hand.begin_publication(room, run, steps, overrides, evaluate=evaluate)


def publish_checkpoints(
    run: str | None = None,
    workspace: str | Path = _HERE,
    *,
    steps: Sequence[int] = (),
    overrides: Sequence[str] = (),
    evaluate: bool = True,
    use_server: bool = True,
    quiet: bool = True,
) -> RunOutcome:
    """Publish checkpoints of a run by hand. What is published already is not sent again.

    Parameters
    ----------
    run, workspace, steps, overrides, evaluate
        As of :func:`flows.api.plan_publication`.
    use_server, quiet
        As of :func:`flows.api.run_recipe`.

    Returns
    -------
    RunOutcome
        Its views' reports say where each checkpoint has gone.

    Raises
    ------
    RefinerError
        As of :func:`flows.api.begin_publication`.
    """
    begun = begin_publication(run, workspace, steps=steps, overrides=overrides, evaluate=evaluate)
    return publish_run(*begun, use_server=use_server, quiet=quiet)


def check_card(
    target: str, evidence: str | Path | None = None, *, template: str | Path | None = None
) -> Checked:
    """Check a model card: numbers, links, licence, commands, leaks. Changes nothing.

    Parameters
    ----------
    target
        A README.md, the folder of a publication, ``OWNER/NAME[@revision]`` on the Hub, or ``-`` for
        stdin.
    evidence
        The ``refiner.json`` that belongs to it (default: the one beside it).
    template
        Your own template, where the card was made with one: no other is run.

    Returns
    -------
    Checked
        Findings, each with its line and what mends it.

    Raises
    ------
    ConfigurationError
        There is no such card.
    DataError
        It cannot be read as text.
    HubRefused, HubOutage
        The Hub does not give it.
    """
    from flows.cards.inspection import check

    own = None if template is None else Path(template)
    return check(target, None if evidence is None else Path(evidence), own)


def show_card(words: Sequence[str] = (), workspace: str | Path = _HERE) -> Shown:
    """The card of a finished publication, made again from its records.

    Parameters
    ----------
    words
        A run (default: the newest) and one of its ``publish`` or ``card`` stages (default: the
        last).
    workspace
        The folder that it is recorded in.

    Returns
    -------
    Shown
        ``differs`` says whether it is no longer what was published.

    Raises
    ------
    ConfigurationError
        There is no such run or publication.
    """
    from flows.cards.inspection import show

    return show(Workspace.read_only(workspace), words)


def card_template() -> str:
    """The template that cards are made with, to copy and change.

    Returns
    -------
    str
        Jinja; a recipe takes another one by ``publish.card_template=FILE``.

    Raises
    ------
    OSError
        It cannot be read: the installation is damaged.
    """
    from refiner_core.cards.build import shipped_template

    return shipped_template()
