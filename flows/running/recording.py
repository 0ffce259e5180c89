"""What is recorded of a call before anybody works on it: its plan, and the code as it is now.

In: a plan and a workspace. Out: a :class:`RunRecord`, with a snapshot of the code that its jobs
will import and where all of it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.store.workspace import Workspace
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RECORD_VERSION, RunRecord, to_json


@dataclass(frozen=True)
class Pinned:
    """The code as it was when somebody began to work, for all runs that are begun then.

    Attributes
    ----------
    code
        Id of the snapshot.
    command
        The command line, masked.
    provenance
        What each run's record says of code, versions and machine.
    diff
        What is not committed, as long as a record may be; empty where all is.
    """

    code: str
    command: tuple[str, ...]
    provenance: Mapping[str, object]
    diff: str = ""


def pin_code(workspace: Workspace) -> Pinned:
    """A snapshot of the code as it is now, and where it comes from.

    Raises
    ------
    NoSpaceError
        The snapshot did not fit.
    """
    from infra.store.provenance import checkout_of, limited_diff, run_provenance, this_command
    from infra.store.snapshot import snapshot_code

    code = snapshot_code(workspace)
    checkout, command = checkout_of(), this_command()
    return Pinned(
        code=code.id,
        command=tuple(command),
        provenance=run_provenance(command, code.id, checkout),
        diff=limited_diff(checkout.diff) if checkout.diff else "",
    )


def record_run(
    plan: Plan,
    workspace: Workspace,
    recipe: str,
    overrides: Sequence[str],
    **more: object,
) -> RunRecord:
    """The record of a call on ``plan``, with the code as it is now; ``more`` goes into its
    provenance. It is not written yet."""
    from infra.store import atomic

    pinned = pin_code(workspace)
    run = record_pinned_run(plan, workspace, recipe, overrides, pinned, more)
    if pinned.diff:
        atomic.write_text(workspace.layout.run(run.run).diff, pinned.diff)
    return run


def record_pinned_run(
    plan: Plan,
    workspace: Workspace,
    recipe: str,
    overrides: Sequence[str],
    pinned: Pinned,
    more: Mapping[str, object],
) -> RunRecord:
    """As :func:`record_run`, with code that was pinned before; to keep its ``diff`` is up to the
    caller."""
    from infra.store.workspace import now_text

    return RunRecord(
        version=RECORD_VERSION,
        run=workspace.new_run_id(plan.recipe),
        recipe=plan.recipe,
        overrides=tuple(overrides),
        command=pinned.command,
        config=to_json(plan.config),
        stages={s.name: s.id for s in plan.stages},
        code=pinned.code,
        started_at=now_text(),
        provenance={
            **pinned.provenance,
            "folder": str(Path.cwd()),
            "recipe": recipe,
            **more,
        },
    )
