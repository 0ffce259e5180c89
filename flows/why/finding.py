"""Which recorded number is meant: of a run, of all runs, or of a card.

In: words as people type them. Out: the :class:`~flows.why.figures.Figure` values that fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.running.status import find_run
from flows.why.figures import (
    Figure,
    Query,
    figures_of_card,
    figures_of_stages,
    nothing_found,
    parse_query,
)
from infra.store.published import EVIDENCE
from infra.store.workspace import Workspace
from refiner_core.cards import Evidence, load_evidence
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import RunRecord


def find_figures(
    workspace: Workspace, words: Sequence[str], card: str | Path | None = None
) -> list[Figure]:
    """The numbers that are meant.

    Raises
    ------
    ConfigurationError
        There are none.
    """
    if card is not None:
        evidence = _evidence(Path(card))
        query = parse_query(words)
        if found := figures_of_card(query, evidence):
            return found
        others = figures_of_card(Query(names=query.names), evidence)
        others = others or figures_of_card(Query(), evidence)
        raise nothing_found(query, others, f"the evidence of {card}")
    run, names = _run_of(workspace, words)
    query = parse_query(names)
    everything = workspace.stage_ids()
    newest = list(run.stages.values()) if run is not None else everything
    if found := figures_of_stages(query, workspace, newest):
        return found
    named = len(names) < len(words)
    if not named and (found := figures_of_stages(query, workspace, everything)):
        return found
    where = f"run {run.run}" if named and run is not None else str(workspace.root)
    ids = newest if named else everything
    others = figures_of_stages(Query(names=query.names), workspace, ids)
    raise nothing_found(query, others or figures_of_stages(Query(), workspace, ids), where)


def _run_of(workspace: Workspace, words: Sequence[str]) -> tuple[RunRecord | None, list[str]]:
    """The run that a word names, else the newest; and the other words."""
    known = workspace.run_ids()
    for word in words:
        if any(word == run or (len(word) >= 4 and run.endswith(f"-{word}")) for run in known):
            return find_run(workspace, word), [w for w in words if w != word]
    return find_run(workspace), list(words)


def _evidence(path: Path) -> Evidence:
    """What a card was made from.

    Raises
    ------
    ConfigurationError
        There is no evidence beside it.
    """
    file = (path if path.is_dir() else path.parent) / EVIDENCE
    if not path.exists():
        raise ConfigurationError(
            f"There is no {path}.",
            expected=f"a card that refiner has published, with its {EVIDENCE} beside it",
            fix="check the path; or leave --card out and name the run's workspace=DIR",
        )
    try:
        return load_evidence(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read ({error.strerror}).",
            expected=f"a card that refiner has published, with its {EVIDENCE} beside it",
            fix="name its folder, or README.md in it, with --card; or leave --card out and name "
            "the run's workspace=DIR",
        ) from error
