"""`refiner disk` and `refiner track`: what is used and may go, what waits offline."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flows.cli.options import (
    json_option,
    print_json,
    print_table,
    split_workspace,
    until_nobody_reads,
)

if TYPE_CHECKING:
    from infra.disk.usage import Kind, Row, Size
    from infra.store.workspace import Workspace
    from infra.tracking import OfflineRun


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
    from infra.store.workspace import Workspace
    from refiner_core.contract.errors import ConfigurationError

    where, rest = split_workspace(words)
    overrides = [w for w in rest if w.startswith("disk.") and "=" in w]
    verbs = [w for w in rest if w not in overrides]
    workspace = Workspace.read_only(where)
    if verbs and not (len(verbs) == 2 and verbs[0] in ("pin", "unpin")):
        raise ConfigurationError(
            f"`refiner disk` does not know {shlex.join(verbs)!r}.",
            expected="nothing, `pin STAGE` or `unpin STAGE`",
            fix="see `refiner disk --help`",
        )
    if (dry_run or caches or judgements) and not reclaim:
        raise ConfigurationError(
            "--dry-run, --caches and --judgements say how to reclaim.",
            expected="--reclaim with them",
            fix="add it",
        )
    if verbs:
        _pin(where, verbs[0], verbs[1], as_json)
        return
    if reclaim:
        _reclaim(where, overrides, _How(caches, judgements, dry_run, as_json))
    else:
        _show(workspace, overrides, where, as_json)


def _pin(where: str, verb: str, name: str, as_json: bool) -> None:
    from flows.api import pin_stage, unpin_stage

    stage_id, changed = (pin_stage if verb == "pin" else unpin_stage)(name, where)
    if as_json:
        print_json(
            {"version": 1, "stage_id": stage_id, "pinned": verb == "pin", "changed": changed}
        )
        return
    state = "pinned" if verb == "pin" else "not pinned"
    click.echo(f"{stage_id} is {state}{'' if changed else ' (as before)'}.")


class _How(NamedTuple):
    """How to reclaim."""

    caches: bool
    judgements: bool
    dry_run: bool
    as_json: bool

    @property
    def options(self) -> list[str]:
        """The command that does so."""
        more = {"--caches": self.caches, "--judgements": self.judgements}
        return ["--reclaim", *(name for name, given in more.items() if given)]


def _reclaim(where: str, overrides: Sequence[str], how: _How) -> None:
    from flows.api import reclaim_disk
    from flows.disk import candidate_json, hold_json
    from infra.disk.keeper import gib

    dry_run = how.dry_run
    done = reclaim_disk(
        where, overrides, caches=how.caches, judgements=how.judgements, dry_run=dry_run
    )
    holds, stock, candidates = done.holds, done.stock, done.candidates
    gone, freed = done.items, done.bytes
    total = sum(c.bytes for c in candidates)
    if how.as_json:
        print_json(
            {
                "version": 1,
                "dry_run": dry_run,
                "holds": [hold_json(h, stock) for h in holds],
                "candidates": [candidate_json(c) for c in candidates],
                "reclaimed_bytes": freed,
                "reclaimed": list(gone),
                "status": done.status,
            }
        )
        return
    for hold in holds:
        verb = "would be" if dry_run else "was"
        click.echo(
            f"The hold on step {hold.step} of {hold.stage_id} {verb} let go ({hold.idle}; "
            f"{hold.waiting} waited for it)."
        )
    if not candidates:
        click.echo("There is nothing that may be deleted.")
    else:
        rows = [(gib(c.bytes), c.rank.name.lower(), str(c.path), c.why) for c in candidates]
        print_table(rows, ("size", "kind", "path", "why"))
    if dry_run:
        click.echo(f"\n{gib(total)} would be free again.")
        click.echo(f"Next:\n  {_command(where, *how.options)}", err=True)
        return
    kept = len(candidates) - len(gone)
    left = f"; {kept} could not be deleted, see above" if kept else ""
    click.echo(f"\n{gib(freed)} reclaimed{left}. {done.status}.")


def _show(workspace: Workspace, overrides: Sequence[str], where: str, as_json: bool) -> None:
    from flows.api import disk_report
    from infra.disk.keeper import gib

    report = disk_report(where, overrides)
    if as_json:
        print_json(report.json)
        return
    room = report.json["room"]
    click.echo(f"{workspace.layout.data}: {report.json['status']}")
    click.echo(f"  {gib(room['free_bytes'])} free, by {room['source']}{_inodes(room)}")
    if room["note"]:
        click.echo(f"  {room['note']}")
    for entry in report.json["reservations"]:
        click.echo(
            f"  {gib(entry['bytes'])} reserved by {entry['stage_id']}, attempt {entry['attempt']}"
        )
    if report.json["pins"]:
        click.echo(f"  pinned: {', '.join(report.json['pins'][:_SHOWN])}")
    click.echo("")
    rows = [
        (row.run or "(no run)", row.kind, gib(row.size.bytes), f"{row.size.inodes:,}")
        for row in _newest_runs(report.rows)
    ]
    print_table(rows or [("", "nothing yet", "", "")], ("run", "kind", "size", "files"))
    _show_judgements(report.json["judgements"])
    _show_publications(report.json)
    may_go = report.json["reclaimable"]
    total = sum(c["bytes"] for c in may_go)
    click.echo(f"\nA reclaim would free {gib(total)} ({len(may_go)} things).")
    click.echo(f"Next:\n  {_command(where, '--reclaim', '--dry-run')}", err=True)


def _show_judgements(store: dict[str, Any]) -> None:
    """What judges have said, and how often they were not asked again."""
    from infra.disk.keeper import gib

    if not store["files"]:
        return
    tokens = store["saved_prompt_tokens"] + store["saved_completion_tokens"]
    saved = ""
    if store["saved_judgements"]:
        count = store["saved_judgements"]
        saved = f"; {count:,} times one was not asked again ({tokens:,} tokens)"
    click.echo(
        f"\n  {store['judgements']:,} judgements are stored ({gib(store['bytes'])} in "
        f"{store['files']:,} files){saved}"
    )


def _show_publications(report: dict[str, Any]) -> None:
    """What is published where, what waits for checkpoints, and exports that nobody will read."""
    from infra.disk.keeper import gib

    if published := report["published"]:
        click.echo("")
        rows = [
            (p["stage_id"], _where(p), p["revision"] or "", _here(p), gib(p["here_bytes"]))
            for p in published[-_SHOWN:]
        ]
        print_table(rows, ("weights of", "published to", "revision", "weights here", "gives back"))
        if len(published) > _SHOWN:
            click.echo(f"({len(published) - _SHOWN} more: --json)")
    for hold in report["holds"]:
        kept = f"step {hold['step']} of {hold['stage_id']} ({gib(hold['bytes'])})"
        why = f"idle, {hold['idle']}: --reclaim lets it go" if hold["idle"] else "still to come"
        click.echo(f"  held: {kept} for {hold['waiting']}: {why}")
    for export in report["idle_exports"]:
        click.echo(
            "  export that nothing will read again, published on no other quota: "
            f"{export['stage_id']} ({gib(export['bytes'])}); it is yours to publish or to delete: "
            f"{export['path']}"
        )


def _where(published: dict[str, Any]) -> str:
    commit = f" @ {published['commit'][:12]}" if published["commit"] else ""
    return f"{published['target']}{commit}"


def _here(published: dict[str, Any]) -> str:
    if published["elsewhere"] is None:
        return "reclaimed" if published["reclaimed"] else "gone"
    return "too" if published["elsewhere"] else "too, on the same quota"


def _newest_runs(rows: Sequence[Row]) -> list[Row]:
    """Rows of the newest runs one by one, those of older ones summed up by kind."""
    from infra.disk.usage import Row, Size

    runs = list(dict.fromkeys(r.run for r in rows if r.run))
    if len(runs) <= _SHOWN:
        return list(rows)
    shown, older = {*runs[:_SHOWN], ""}, f"({len(runs) - _SHOWN} older runs)"
    sums: dict[Kind, Size] = {}
    for row in rows:
        if row.run not in shown:
            sums[row.kind] = row.size.plus(sums.get(row.kind, Size()))
    return [r for r in rows if r.run in shown] + [Row(older, k, s) for k, s in sums.items()]


def _inodes(room: dict[str, Any]) -> str:
    if room["free_inodes"] is None:
        return ""
    return f"; room for {room['free_inodes']:,} more files"


def _command(where: str, *options: str) -> str:
    from refiner_core.contract.config import RecipeConfig

    words = [] if where == RecipeConfig().workspace else [f"workspace={where}"]
    return shlex.join(["refiner", "disk", *words, *options])


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
    from flows.api import sync_tracking

    where, names = split_workspace(words)
    done = sync_tracking(names, where, dry_run=dry_run, tell=_tell_sent)
    _show_offline(done.runs, done.new, as_json, sent=done.sent)


def _tell_sent(done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total:
        click.echo(f"{done} of {total} sent", err=True)


def _show_offline(
    runs: Sequence[OfflineRun], new: Sequence[OfflineRun], as_json: bool, *, sent: int
) -> None:
    if as_json:
        print_json(
            {
                "version": 1,
                "offline": len(runs),
                "new": len(new),
                "sent": sent,
                "runs": [_run_json(run) for run in runs],
            }
        )
        return
    with until_nobody_reads():
        if not runs:
            click.echo("Nothing was logged offline: tracking was online or disabled.")
        elif not new:
            click.echo(f"All of {len(runs)} offline runs are sent.")
        elif sent:
            click.echo(f"Sent {sent} of {len(runs)} offline runs.")
        else:
            click.echo(f"{len(new)} of {len(runs)} offline runs have something new:")
            for run in new:
                click.echo(f"  {run.stage_id} #{run.attempt}  {run.folder}")


def _run_json(run: OfflineRun) -> dict[str, Any]:
    return {
        "stage_id": run.stage_id,
        "attempt": run.attempt,
        "folder": str(run.folder),
        "bytes": run.bytes,
        "new": run.is_new,
    }
