"""`refiner disk` and `refiner track`: what is used and may go, what waits offline."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    command_line,
    json_option,
    misuse,
    progress,
    say_next,
    show,
    split_workspace,
)
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import picked
from refiner_core.report.printing import table_lines

if TYPE_CHECKING:
    from flows.disk import Reclaimed
    from flows.tracking import Synced
    from infra.disk.usage import Row

_SHOWN = 12  # runs and pins that are listed one by one; the JSON has all


@click.command("disk")
@click.argument("words", nargs=-1, metavar="[pin|unpin STAGE] [workspace=DIR] [disk.KEY=VALUE]...")
@json_option
@click.option("--reclaim", is_flag=True, help="delete all that the policy allows")
@click.option("--dry-run", is_flag=True, help="with --reclaim: only list what would go")
@click.option("--caches", is_flag=True, help="with --reclaim: the caches too (`disk.watch_caches`)")
@click.option("--judgements", is_flag=True, help="with --reclaim: what judges have said, too")
def disk_command(
    words: tuple[str, ...],
    as_json: bool,
    reclaim: bool,
    dry_run: bool,
    caches: bool,
    judgements: bool,
) -> None:
    """Show what a workspace uses by run and kind, the room that is left, and what may be deleted.

    What is pinned, read by a running job, needed by an unfinished run, or not published and
    verified elsewhere, is never deleted. `refiner disk pin STAGE` keeps everything of a stage.
    """
    from flows.disk import disk_report, pin_stage, reclaim_disk, unpin_stage

    where, rest = split_workspace(words)
    overrides = [w for w in rest if w.startswith("disk.") and "=" in w]
    verbs = [w for w in rest if w not in overrides]
    if verbs and not (len(verbs) == 2 and verbs[0] in ("pin", "unpin")):
        raise misuse(f"`refiner disk` does not know {shlex.join(verbs)!r}.")
    if (dry_run or caches or judgements) and not reclaim:
        raise misuse("--dry-run, --caches and --judgements say how to reclaim: add --reclaim.")
    again = ["--reclaim", *["--caches"] * caches, *["--judgements"] * judgements]
    if verbs:
        kept = verbs[0] == "pin"
        stage_id, changed = (pin_stage if kept else unpin_stage)(verbs[1], where)
        value = {"version": 1, "stage_id": stage_id, "pinned": kept, "changed": changed}
        said = f"{stage_id} is {'' if kept else 'not '}pinned{'' if changed else ' (as before)'}."
        show(as_json, lambda: value, lambda: [said])
        return
    if reclaim:
        done = reclaim_disk(where, overrides, caches=caches, judgements=judgements, dry_run=dry_run)
        show(as_json, lambda: _reclaimed_json(done, dry_run), lambda: _reclaimed(done, dry_run))
    else:
        rows, value = disk_report(where, overrides)
        show(as_json, lambda: value, lambda: _lines(rows, value))
        again.append("--dry-run")
    if not as_json and (dry_run or not reclaim):
        place = [] if where == RecipeConfig.workspace else [f"workspace={where}"]
        say_next(command_line("disk", *place, *again))


def _reclaimed_json(done: Reclaimed, dry_run: bool) -> dict[str, Any]:
    from flows.disk import candidate_json, hold_json

    return {
        "version": 1,
        "dry_run": dry_run,
        "holds": [hold_json(h, done.stock) for h in done.holds],
        "candidates": [candidate_json(c) for c in done.candidates],
        "reclaimed_bytes": done.bytes,
        "reclaimed": list(done.items),
        "status": done.status,
    }


def _reclaimed(done: Reclaimed, dry_run: bool) -> Iterator[str]:
    from infra.disk.keeper import gib

    for hold in done.holds:
        verb = "would be" if dry_run else "was"
        yield (
            f"The hold on step {hold.step} of {hold.stage_id} {verb} let go ({hold.idle}; "
            f"{hold.waiting} waited for it)."
        )
    found = done.candidates
    if not found:
        yield "There is nothing that may be deleted."
    else:
        rows = [(gib(c.bytes), c.rank.name.lower(), str(c.path), c.why) for c in found]
        yield from table_lines(rows, ("size", "kind", "path", "why"))
    if dry_run:
        yield f"\n{gib(sum(c.bytes for c in found))} would be free again."
        return
    kept = len(found) - len(done.items)
    left = f"; {kept} could not be deleted, see above" if kept else ""
    yield f"\n{gib(done.bytes)} reclaimed{left}. {done.status}."


def _lines(used: Sequence[Row], found: dict[str, Any]) -> Iterator[str]:
    from infra.disk.keeper import gib

    room, inodes = found["room"], found["room"]["free_inodes"]
    more = "" if inodes is None else f"; room for {inodes:,} more files"
    yield f"{found['data']}: {found['status']}"
    yield f"  {gib(room['free_bytes'])} free, by {room['source']}{more}"
    if room["note"]:
        yield f"  {room['note']}"
    for entry in found["reservations"]:
        yield f"  {gib(entry['bytes'])} reserved by {entry['stage_id']}, attempt {entry['attempt']}"
    if found["pins"]:
        yield f"  pinned: {', '.join(found['pins'][:_SHOWN])}"
    yield ""
    runs = list(dict.fromkeys(r.run for r in used if r.run))
    rows = [
        (row.run or "(no run)", row.kind, gib(row.size.bytes), f"{row.size.inodes:,}")
        for row in used
        if row.run not in runs[_SHOWN:]
    ]
    yield from table_lines(rows or [("", "nothing yet", "", "")], ("run", "kind", "size", "files"))
    if len(runs) > _SHOWN:
        yield f"({len(runs) - _SHOWN} older runs: --json)"
    yield from _kept(found)
    may_go = found["reclaimable"]
    yield f"\nA reclaim would free {gib(sum(c['bytes'] for c in may_go))} ({len(may_go)} things)."


def _kept(report: dict[str, Any]) -> Iterator[str]:
    """Stored judgements, checkpoints that stages wait for, and exports that nobody will read."""
    from infra.disk.keeper import gib

    if (store := report["judgements"])["files"]:
        yield f"\n  {store['judgements']:,} judgements are stored ({gib(store['bytes'])})"
    for hold in report["holds"]:
        kept = f"step {hold['step']} of {hold['stage_id']} ({gib(hold['bytes'])})"
        why = f"idle, {hold['idle']}: --reclaim lets it go" if hold["idle"] else "still to come"
        yield f"  held: {kept} for {hold['waiting']}: {why}"
    for export in report["idle_exports"]:
        yield (
            "  export that nothing will read again, published on no other quota: "
            f"{export['stage_id']} ({gib(export['bytes'])}); it is yours to publish or to delete: "
            f"{export['path']}"
        )


@click.group("track")
def track_command() -> None:
    """Send what W&B has logged offline, from a node with network."""


@track_command.command("sync")
@click.argument("words", nargs=-1, metavar="[RUN|SWEEP]... [workspace=DIR]")
@click.option("--dry-run", is_flag=True, help="say what would be sent; send nothing")
@json_option
def sync_command(words: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Send the offline W&B runs of RUNs or SWEEPs (default: the newest run) to the W&B server.

    Compute nodes without internet log offline; run this where the network is, with WANDB_API_KEY
    set or after `wandb login`. It may be run again at any time, also while training goes on: only
    what is new is sent. All attempts at a stage are one W&B run, under the stage's id.
    """
    from flows.tracking import sync_tracking

    where, names = split_workspace(words)
    done = sync_tracking(names, where, dry_run=dry_run, tell=progress("sent"))
    show(as_json, lambda: _synced_json(done), lambda: _synced(done))


def _synced_json(done: Synced) -> dict[str, Any]:
    return {
        **{"version": 1, "offline": len(done.runs), "new": len(done.new), "sent": done.sent},
        "runs": [
            {
                **picked(run, "stage_id", "attempt", "bytes"),
                **{"folder": str(run.folder), "new": run.is_new},
            }
            for run in done.runs
        ],
    }


def _synced(done: Synced) -> Iterator[str]:
    runs, new, sent = done
    if not runs:
        yield "Nothing was logged offline: tracking was online or disabled."
    elif not new:
        yield f"All of {len(runs)} offline runs are sent."
    elif sent:
        yield f"Sent {sent} of {len(runs)} offline runs."
    else:
        yield f"{len(new)} of {len(runs)} offline runs have something new:"
        yield from (f"  {run.stage_id} #{run.attempt}  {run.folder}" for run in new)
