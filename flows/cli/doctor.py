"""`refiner doctor`, `certify` and `prove-resume`: what of this machine works, tried and proven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    at_most_one,
    command_line,
    json_option,
    overrides_argument,
    print_json,
    progress,
    recipe_argument,
    say,
    show,
    split_overrides,
)

if TYPE_CHECKING:
    from infra.doctor.check import Finding
    from refiner_core.contract.proofs import CertifiedCheck

_MARKS = {"ok": "ok", "missing": "--", "warning": "WARN", "broken": "BROKEN"}
_FINDING_COLOURS = {"ok": "green", "missing": "bright_black", "warning": "yellow", "broken": "red"}
_BROKEN = 8  # as for every call that finds this machine lacking


@click.command("doctor")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@click.option("--only", multiple=True, metavar="AREA", help="look at this area; may be repeated")
@click.option("--offline", is_flag=True, help="ask nobody outside this machine and its cluster")
@click.option("--job", is_flag=True, help="submit a tiny job to Slurm, and report from its node")
@click.option("--wait", "wait_s", type=click.FloatRange(min=1), default=120, show_default=True,
              metavar="SECONDS", help="with --job: how long to wait for it")  # fmt: skip
@click.option("--limit", "limit_s", type=click.FloatRange(min=0.1), metavar="SECONDS",
              help="give no check longer than this")  # fmt: skip
@json_option
def doctor_command(
    words: tuple[str, ...], only: tuple[str, ...], as_json: bool, **options: Any
) -> int:
    """Look at this machine: what works, what does not, and the one command that mends it.

    With RECIPE, what it needs is `broken` where it does not work, and the exit code is 8; without
    one, what is not there is only `missing`. Nothing is changed: files are tried in a scratch
    folder, jobs with `sbatch --test-only`. AREAs: recipe, python, machine, gpu, workspace, slurm,
    node, prefect, hub, wandb, judge, vllm, network.
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


def _finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
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
        if finding.mend:
            yield f"{indent}mend: {finding.mend}"


def _what_next(
    recipe: str | None, words: Sequence[str], findings: Sequence[Finding]
) -> Iterator[str]:
    from infra.tracking import shown_address

    count = {state: sum(f.state == state for f in findings) for state in _MARKS}
    yield (
        f"\n{count['ok']} ok, {count['warning']} with a warning, {count['missing']} not there, "
        f"{count['broken']} broken."
    )
    broken = next((f for f in findings if f.state == "broken" and f.mend), None)
    if broken is not None:
        yield f"Next: mend {broken.area} ({broken.name}):\n  {broken.mend}"
    elif count["broken"]:
        yield "Next: mend what is broken, then call this again."
    elif recipe is None:
        yield "Next: with a recipe in mind:\n  refiner doctor tiny"
    else:
        yield f"Next:\n  {shown_address(command_line('run', *words))}"


_VERDICT_COLOURS = {"pass": "green", "fail": "red", "absent": "yellow"}


@click.command("certify")
@click.argument("recipe", metavar="[RECIPE]", required=False)
@overrides_argument
@click.option(
    "--model",
    metavar="SHAPE",
    help="shape to measure speed with: tiny, 0.6B, 1.7B or 4B, with random weights (default: the "
    "largest that fits on a GPU; tiny on a CPU)",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PART",
    help="only this part (repeatable; nothing is recorded then): numerics, ranks, speed, servers, "
    "faults",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=900.0,
    show_default=True,
    metavar="SECONDS",
    help="what is not begun by then is absent, and what is not done by then has failed",
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
    """Try on this node what training relies on, and record a certificate in the workspace.

    Attention kernels, bfloat16, ranks and ZeRO, all_reduce, speed and memory, vLLM where an
    environment is given, and a kill -9; on all GPUs that torch sees, or on the CPU. Run it on
    a compute node, e.g. `srun --gpus-per-node=1 refiner certify workspace=DIR`. RECIPE gives the
    workspace, the type of weights and the environment of vLLM; KEY=VALUE words do, too.

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
    say(f"\n{where}, {made.seconds:.0f} s: {counts}.")
    if made.count("fail"):
        say("Next: see what failed, then\n  refiner doctor --only gpu")
    elif not only:
        say("Recorded: doctor and cards use it. Next:\n  refiner plan tiny")
    return 0 if made.passed or not made.count("fail") else 1


@click.command("prove-resume")
@recipe_argument
@overrides_argument
@click.option(
    "--stage",
    type=click.Choice(["sft", "grpo", "all"]),
    default="all",
    show_default=True,
    help="which training is proven; those before it run once (`rft` trains as `sft` does and is "
    "left out)",
)
@click.option(
    "--steps", type=int, default=12, show_default=True, metavar="N", help="steps of each training"
)
@click.option(
    "--interruptions", type=int, default=4, show_default=True, metavar="K", help="of each training"
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="S", help="draws steps and phases"
)
@click.option(
    "--how",
    type=click.Choice(["kill", "stop", "both"]),
    default="both",
    show_default=True,
    help="kill -9 of the worker, requests to stop, or in turn",
)
@click.option("--processes", type=int, metavar="N", help="training processes (default: the recipe)")
@click.option(
    "--resume-processes",
    type=int,
    metavar="N",
    help="training processes after the first interruption: resumed on another number, the verdict "
    "is at best `within tolerance` of float sums",
)
@click.option(
    "--tolerance",
    type=float,
    metavar="X",
    help="largest difference that counts as none (default: 0 on the CPU; on GPUs and on another "
    "number of processes 0.01 in float32, 0.05 in bfloat16)",
)
@click.option("--keep", is_flag=True, help="keep both runs (those that diverge always stay)")
@json_option
def prove_resume_command(
    recipe: str, overrides: tuple[str, ...], keep: bool, as_json: bool, **options: Any
) -> int:
    """Prove that the training of RECIPE resumes exactly.

    Runs its training stages shortened, once straight and once interrupted at random steps and
    phases (while it generates, judges, updates or saves), through the same orchestrator and workers
    as `refiner run`, on this machine and in folders of its own. Then it compares the loss trace,
    rollouts, exported weights, optimiser, random states and data cursor. The verdict is `bitwise`,
    `within tolerance` or `diverged`; it is recorded in the workspace, in place of an earlier one,
    and cards of the stage show it.

    Exit code 0: bitwise or within tolerance; 1: diverged, or a stage failed; 6: stopped.
    """
    from flows.cli.run import stop_on_signals
    from flows.proving.planning import (
        exit_code,
        next_lines,
        plan_lines,
        plan_resume_proofs,
        proof_lines,
        proofs_json,
    )
    from flows.proving.runs import prove_resume

    plans = plan_resume_proofs(recipe, overrides, **options)
    for line in plan_lines(plans):
        say(line)
    stop_on_signals()
    proofs = prove_resume(plans, say, keep=keep)
    show(
        as_json,
        lambda: proofs_json(proofs),
        lambda: [line for proof in proofs for line in proof_lines(proof)],
    )
    for line in next_lines(proofs, plans):
        say(line)
    return exit_code(proofs)
