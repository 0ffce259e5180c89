"""`refiner doctor`, `certify`, `prove-resume`, `disk` and `track`.

Checks and proofs of this machine; disk use of a workspace, and what may be deleted; offline W&B
runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.aliases import former_option
from flows.cli.options import (
    argument,
    at_most_one,
    command_line,
    json_option,
    misuse,
    overrides_argument,
    print_json,
    print_line,
    print_next,
    progress,
    recipe_argument,
    show,
    split_overrides,
    split_workspace,
)
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import picked
from refiner_core.report.printing import size, table_lines

if TYPE_CHECKING:
    from flows.disk import ReclaimResult
    from flows.tracking import SyncResult
    from infra.disk.usage import UsageRow
    from infra.doctor.check import CheckResult
    from refiner_core.contract.proofs import CertifiedCheck

_MARKS = {"ok": "ok", "missing": "--", "warning": "WARN", "broken": "BROKEN"}
_FINDING_COLOURS = {"ok": "green", "missing": "bright_black", "warning": "yellow", "broken": "red"}
#: Runs in a list of the largest.
_LARGEST = 5
_BROKEN = 8  # as for every command that finds this machine lacking


@click.command("doctor")
@argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@click.option("--only", multiple=True, metavar="AREA", help="check this area; repeatable")
@click.option("--offline", is_flag=True, help="no requests outside this machine and its cluster")
@former_option("--job", "`srun refiner doctor` checks a compute node.", flag=True)
@former_option("--wait", "`srun refiner doctor` waits for its node.")
@click.option("--limit", "limit_s", type=click.FloatRange(min=0.1), metavar="SECONDS",
              help="time limit of each check")  # fmt: skip
@json_option
def doctor_command(
    words: tuple[str, ...], only: tuple[str, ...], as_json: bool, **options: Any
) -> int:
    """Check this machine: what works, what does not, and the command that fixes it.

    With RECIPE, a requirement of it that does not work is `broken`, and the exit code is 8; without
    one, what is absent is only `missing`. Nothing is changed: files are tried in a scratch folder,
    jobs with `sbatch --test-only`. AREAs: recipe, python, machine, gpu, workspace, slurm,
    prefect, hub, wandb, judge, vllm, network.
    """
    from flows.doctor import examine, findings_json

    names, overrides = split_overrides(words)
    recipe = at_most_one(names, "recipe")
    areas = [area for text in only for area in text.split(",")]
    findings = examine(recipe, overrides, only=areas, tell=progress("checks"), **options)
    show(
        as_json,
        lambda: findings_json(findings),
        lambda: [*_finding_lines(findings), *_what_next(recipe, words, findings)],
    )
    return _BROKEN if any(f.state == "broken" for f in findings) else 0


def _finding_lines(findings: Sequence[CheckResult]) -> Iterator[str]:
    width = max(len(mark) for mark in _MARKS.values())
    indent = " " * (width + 4)
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            yield click.style(f"{'' if finding is findings[0] else chr(10)}{area}", bold=True)
        mark = click.style(_MARKS[finding.state].ljust(width), fg=_FINDING_COLOURS[finding.state])
        yield f"  {mark}  {finding.name}: {finding.what}"
        if finding.state == "ok":
            continue
        if finding.why:
            yield f"{indent}for: {finding.why}"
        if finding.fix:
            yield f"{indent}fix: {finding.fix}"


def _what_next(
    recipe: str | None, words: Sequence[str], findings: Sequence[CheckResult]
) -> Iterator[str]:
    from infra.tracking import masked_address

    count = {state: sum(f.state == state for f in findings) for state in _MARKS}
    yield (
        f"\n{count['ok']} ok, {count['warning']} with a warning, {count['missing']} missing, "
        f"{count['broken']} broken."
    )
    broken = next((f for f in findings if f.state == "broken" and f.fix), None)
    if broken is not None:
        yield f"Next: fix {broken.area} ({broken.name}):\n  {broken.fix}"
    elif count["broken"]:
        yield "Next: fix what is broken, then run this again."
    elif recipe is None:
        yield "Next, for a recipe:\n  refiner doctor tiny"
    else:
        yield f"Next:\n  {masked_address(command_line('run', *words))}"


_VERDICT_COLOURS = {"pass": "green", "fail": "red", "absent": "yellow"}


@click.command("certify")
@argument("recipe", metavar="[RECIPE]", required=False)
@overrides_argument
@click.option(
    "--model",
    metavar="SHAPE",
    help="shape for the speed test: tiny, 0.6B, 1.7B or 4B, random weights (default: the "
    "largest that fits on a GPU; tiny on a CPU)",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PART",
    help="only this part (repeatable; without a record): numerics, ranks, speed, servers, faults, "
    "judge",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=900.0,
    show_default=True,
    metavar="SECONDS",
    help="time limit: later checks are absent, unfinished ones have failed",
)
@json_option
def certify_command(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    only: tuple[str, ...],
    time_limit: float,
    as_json: bool,
) -> int:
    """Test on this node what training relies on, and record a certificate in the workspace.

    Attention kernels, bfloat16, ranks and ZeRO, all_reduce, speed and memory, vLLM if an
    environment is given, a kill -9, and the recipe's judge if it has a server; on all GPUs that
    torch sees, or on the CPU. Run it on a compute node, e.g. `srun --gpus-per-node=1 refiner
    certify workspace=DIR`. RECIPE or KEY=VALUE words set the workspace, the type of weights, the
    environment of vLLM and the judge.

    Exit code 0: nothing failed; 1: a check failed.
    """
    from flows.certify.node import certificate_json, certify_node

    def tell(check: CertifiedCheck) -> None:
        mark = click.style(check.verdict.ljust(6), fg=_VERDICT_COLOURS[check.verdict])
        click.echo(f"{mark}  {check.name}: {check.why}", err=as_json)

    words = list(overrides)
    if recipe is not None and "=" in recipe:
        words, recipe = [recipe, *words], None
    made = certify_node(recipe, words, model=model, only=only, time_limit_s=time_limit, tell=tell)
    if as_json:
        print_json(certificate_json(made))
    where = f"{len(made.gpus)} x {made.gpus[0]}" if made.gpus else "the CPU"
    counts = ", ".join(f"{made.count(v)} {v}" for v in ("pass", "fail", "absent"))
    print_line(f"\n{where}, {made.seconds:.0f} s: {counts}.")
    if made.count("fail"):
        print_line("Next: see the failed checks, then\n  refiner doctor --only gpu")
    elif not only:
        print_line("Recorded for doctor and cards. Next:\n  refiner plan tiny")
    return 0 if made.passed or not made.count("fail") else 1


@click.command("prove-resume")
@recipe_argument
@overrides_argument
@click.option(
    "--stage",
    type=click.Choice(["sft", "grpo", "all"]),
    default="all",
    show_default=True,
    help="training to prove; earlier ones run once (`rft` trains as `sft` does and is left out)",
)
@click.option(
    "--steps", type=int, default=12, show_default=True, metavar="N", help="steps of each training"
)
@click.option(
    "--interruptions", type=int, default=4, show_default=True, metavar="K", help="of each training"
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="S", help="seed of steps and phases"
)
@former_option("--how", "Both are used in turn.")
@former_option("--processes", "Set sft.nproc_per_node or grpo.nproc_per_node.")
@former_option("--resume-processes", "Resume a run itself on another number.")
@former_option("--tolerance", "It follows from device and number type.")
@click.option("--keep", is_flag=True, help="keep both runs (diverged ones always stay)")
@json_option
def prove_resume_command(
    recipe: str, overrides: tuple[str, ...], keep: bool, as_json: bool, **options: Any
) -> int:
    """Prove that the training of RECIPE resumes exactly.

    Runs its training stages shortened, once straight and once interrupted at random steps and
    phases (while it generates, judges, updates or saves), through the same orchestrator and workers
    as `refiner run`, on this machine in separate folders. Then compares the loss trace, rollouts,
    exported weights, optimiser, random states and data cursor. The verdict is `bitwise`, `within
    tolerance` or `diverged`; it replaces an earlier one in the workspace, and cards of the stage
    show it.

    Exit code 0: bitwise or within tolerance; 1: diverged, or a stage failed; 6: stopped.
    """
    from flows.cli.run import stop_on_signals
    from flows.proving.runs import (
        exit_code,
        next_line,
        plan_lines,
        plan_resume_proofs,
        proof_lines,
        proofs_json,
        prove_resume,
    )

    plans = plan_resume_proofs(recipe, overrides, **options)
    for line in plan_lines(plans):
        print_line(line)
    stop_on_signals()
    proofs = prove_resume(plans, print_line, keep=keep)
    show(
        as_json,
        lambda: proofs_json(proofs),
        lambda: [line for proof in proofs for line in proof_lines(proof)],
    )
    print_line(next_line(proofs, plans))
    return exit_code(proofs)


# ---------------------------------------------------------------- disk use

_SHOWN = 12  # most runs and pins listed one by one; the JSON has all


@click.command("disk")
@argument("words", nargs=-1, metavar="[pin|unpin STAGE] [workspace=DIR] [disk.KEY=VALUE]...")
@json_option
@click.option("--reclaim", is_flag=True, help="delete all that the policy allows")
@click.option("--dry-run", is_flag=True, help="with --reclaim: only list candidates")
@former_option("--caches", "Caches are for their own tools: `hf cache prune`.", flag=True)
@click.option("--judgements", is_flag=True, help="with --reclaim: judgements, too")
def disk_command(
    words: tuple[str, ...], as_json: bool, reclaim: bool, dry_run: bool, judgements: bool
) -> None:
    """Show disk use of a workspace by run and kind, free space, and what may be deleted.

    Anything pinned, read by a running job, needed by an unfinished run, or not verified as
    published elsewhere, is never deleted. `refiner disk pin STAGE` keeps everything of a stage.
    """
    from flows.disk import disk_report, pin_stage, reclaim_disk, unpin_stage

    where, rest = split_workspace(words)
    overrides = [w for w in rest if w.startswith("disk.") and "=" in w]
    verbs = [w for w in rest if w not in overrides]
    if verbs and not (len(verbs) == 2 and verbs[0] in ("pin", "unpin")):
        raise misuse(f"`refiner disk` has no action {shlex.join(verbs)!r}.")
    if (dry_run or judgements) and not reclaim:
        raise misuse("--dry-run and --judgements need --reclaim.")
    again = ["--reclaim", *["--judgements"] * judgements]
    if verbs:
        kept = verbs[0] == "pin"
        stage_id, changed = (pin_stage if kept else unpin_stage)(verbs[1], where)
        value = {"version": 1, "stage_id": stage_id, "pinned": kept, "changed": changed}
        said = f"{stage_id} is {'' if kept else 'not '}pinned{'' if changed else ' (as before)'}."
        show(as_json, lambda: value, lambda: [said])
        return
    if reclaim:
        done = reclaim_disk(where, overrides, judgements=judgements, dry_run=dry_run)
        show(as_json, lambda: _reclaimed_json(done, dry_run), lambda: _reclaimed(done, dry_run))
    else:
        rows, value = disk_report(where, overrides)
        show(as_json, lambda: value, lambda: _lines(rows, value))
        again.append("--dry-run")
    if not as_json and (dry_run or not reclaim):
        place = [] if where == RecipeConfig.workspace else [f"workspace={where}"]
        print_next(command_line("disk", *place, *again))


def _reclaimed_json(done: ReclaimResult, dry_run: bool) -> dict[str, Any]:
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


def _reclaimed(done: ReclaimResult, dry_run: bool) -> Iterator[str]:
    for hold in done.holds:
        verb = "would be" if dry_run else "was"
        yield (
            f"The hold on step {hold.step} of {hold.stage_id} {verb} released ({hold.idle}; "
            f"{hold.waiting} waited for it)."
        )
    found = done.candidates
    if not found:
        yield "There is nothing that may be deleted."
    else:
        rows = [(size(c.bytes), c.rank.name.lower(), str(c.path), c.why) for c in found]
        yield from table_lines(rows, ("size", "kind", "path", "why"))
    if dry_run:
        yield f"\n{size(sum(c.bytes for c in found))} would be freed."
        return
    kept = len(found) - len(done.items)
    left = f"; {kept} could not be deleted, see above" if kept else ""
    yield f"\n{size(done.bytes)} reclaimed{left}. {done.status}."


def _lines(used: Sequence[UsageRow], found: dict[str, Any]) -> Iterator[str]:
    space, inodes = found["room"], found["room"]["free_inodes"]
    more = "" if inodes is None else f"; {inodes:,} more files fit"
    yield f"{found['data']}: {found['status']}"
    yield f"  {size(space['free_bytes'])} free, by {space['source']}{more}"
    total = found["total"]
    yield (
        f"  {size(total['bytes'])} in this workspace, {total['inodes']:,} files; of it "
        f"{size(total['shared_bytes'])} in stages that several runs share"
    )
    for one in found["reservations"]:
        yield f"  {size(one['bytes'])} reserved by {one['stage_id']}, attempt {one['attempt']}"
    if found["pins"]:
        yield f"  pinned: {', '.join(found['pins'][:_SHOWN])}"
    yield ""
    runs = list(dict.fromkeys(r.run for r in used if r.run))
    rows = [
        (row.run or "(no run)", row.kind, size(row.size.bytes), f"{row.size.inodes:,}")
        for row in used
        if row.run not in runs[_SHOWN:]
    ]
    yield from table_lines(rows or [("", "nothing yet", "", "")], ("run", "kind", "size", "files"))
    largest = sorted(found["unique"].items(), key=lambda pair: -pair[1])[:_LARGEST]
    if len(largest) > 1 and largest[0][1]:
        yield "\nRuns that would free the most (refiner rm RUN):"
        yield from (f"  {size(alone)}  {run}" for run, alone in largest if alone)
    if len(runs) > _SHOWN:
        yield f"({len(runs) - _SHOWN} older runs: --json)"
    yield from _kept(found)
    may_go = found["reclaimable"]
    yield f"\nA reclaim would free {size(sum(c['bytes'] for c in may_go))} ({len(may_go)} items)."


def _kept(report: dict[str, Any]) -> Iterator[str]:
    """Judgements, publications, and checkpoints held for stages."""
    from infra.store.checkpoints import MONITOR_HOLD

    if (store := report["judgements"])["files"]:
        yield f"\n  {store['judgements']:,} judgements are stored ({size(store['bytes'])})"
    for one in report["published"][-_SHOWN:]:
        commit = f" @ {one['commit'][:12]}" if one["commit"] else ""
        here = f"the weights here take {size(one['here_bytes'])}"
        here = here if one["here_bytes"] else one["reclaimed"] or "no weights here"
        yield f"  published: {one['stage_id']} to {one['target']}{commit}; {here}"
    for hold in report["holds"]:
        kept = f"step {hold['step']} of {hold['stage_id']} ({size(hold['bytes'])})"
        due = "the best by gold" if hold["waiting"] == MONITOR_HOLD else "still to come"
        why = f"idle, {hold['idle']}: --reclaim releases it" if hold["idle"] else due
        yield f"  held: {kept} for {hold['waiting']}: {why}"


@click.group("track")
def track_command() -> None:
    """Upload offline W&B runs, from a node with network."""


@track_command.command("sync")
@argument("words", nargs=-1, metavar="[RUN|SWEEP]... [workspace=DIR]")
@click.option("--dry-run", is_flag=True, help="list the runs; send nothing")
@json_option
def sync_command(words: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Upload the offline W&B runs of RUNs or SWEEPs (default: the newest run).

    Compute nodes without internet log offline; run this on a node with network, with WANDB_API_KEY
    set or after `wandb login`. May be repeated at any time, also during training: only new data
    is sent. All attempts at a stage are one W&B run, under the stage's id.
    """
    from flows.tracking import sync_tracking

    where, names = split_workspace(words)
    done = sync_tracking(names, where, dry_run=dry_run, tell=progress("sent"))
    show(as_json, lambda: _synced_json(done), lambda: _synced(done))


def _synced_json(done: SyncResult) -> dict[str, Any]:
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


def _synced(done: SyncResult) -> Iterator[str]:
    runs, new, sent = done
    if not runs:
        yield "Nothing was logged offline: tracking was online or disabled."
    elif not new:
        yield f"All of {len(runs)} offline runs are sent."
    elif sent:
        yield f"Sent {sent} of {len(runs)} offline runs."
    else:
        yield f"{len(new)} of {len(runs)} offline runs have new data:"
        yield from (f"  {run.stage_id} #{run.attempt}  {run.folder}" for run in new)
