"""`refiner doctor`, `certify` and `prove-resume`: what of this machine works, tried and proven."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    json_option,
    overrides_argument,
    print_json,
    recipe_argument,
    until_nobody_reads,
)
from infra.host.terminal import raw

if TYPE_CHECKING:
    from infra.doctor.check import Finding
    from refiner_core.contract.proofs import Certificate, CertifiedCheck


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
    words: tuple[str, ...],
    only: tuple[str, ...],
    offline: bool,
    job: bool,
    wait_s: float,
    limit_s: float | None,
    as_json: bool,
) -> int:
    """Look at this machine: what works, what does not, and the one command that mends it.

    With RECIPE, what it needs is `broken` where it does not work, and the exit code is 8; without
    one, what is not there is only `missing`. Nothing is changed: files are tried in a scratch
    folder, jobs with `sbatch --test-only`. AREAs: recipe, python, machine, gpu, workspace, slurm,
    node, prefect, hub, wandb, judge, vllm, network.
    """
    from flows.doctor import examine, findings_json

    recipe, overrides = _split(words)
    findings = examine(
        recipe,
        overrides,
        offline=offline,
        only=[area for text in only for area in text.split(",")],
        job=job,
        wait_s=wait_s,
        limit_s=limit_s,
        tell=_tell,
    )
    broken = [f for f in findings if f.state == "broken"]
    if as_json:
        print_json(findings_json(findings))
    else:
        with until_nobody_reads():
            _show_findings(findings)
            _say_next(recipe, words, findings)
    return _BROKEN if broken else 0


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    from refiner_core.contract.errors import ConfigurationError

    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise ConfigurationError(
            f"`refiner doctor` looks with one recipe in mind, not with {len(names)}.",
            expected="a recipe's name or file, or none",
            fix=f"refiner doctor {names[0]}",
        )
    return (names[0] if names else None), [word for word in words if "=" in word]


def _tell(done: int, total: int) -> None:
    if sys.stderr.isatty():
        text = f"\r{done} of {total} checks" if done < total else "\r" + " " * 30 + "\r"
        click.echo(text, file=raw(sys.stderr), nl=False)


def _show_findings(findings: Sequence[Finding]) -> None:
    width = max(len(mark) for mark in _MARKS.values())
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            click.secho(f"{'' if finding is findings[0] else chr(10)}{area}", bold=True)
        mark = click.style(_MARKS[finding.state].ljust(width), fg=_FINDING_COLOURS[finding.state])
        click.echo(f"  {mark}  {finding.name}: {finding.what}")
        if finding.state == "ok":
            continue
        indent = " " * (width + 4)
        if finding.why:
            click.echo(f"{indent}for: {finding.why}")
        if finding.mend:
            click.echo(f"{indent}mend: {finding.mend}")


def _say_next(recipe: str | None, words: Sequence[str], findings: Sequence[Finding]) -> None:
    import shlex

    from infra.tracking import shown_address

    count = {state: sum(f.state == state for f in findings) for state in _MARKS}
    click.echo(
        f"\n{count['ok']} ok, {count['warning']} with a warning, {count['missing']} not there, "
        f"{count['broken']} broken."
    )
    broken = next((f for f in findings if f.state == "broken" and f.mend), None)
    if broken is not None:
        click.echo(f"Next: mend {broken.area} ({broken.name}):\n  {broken.mend}")
    elif count["broken"]:
        click.echo("Next: mend what is broken, then call this again.")
    elif recipe is None:
        click.echo("Next: with a recipe in mind:\n  refiner doctor tiny")
    else:
        click.echo(f"Next:\n  {shown_address(shlex.join(['refiner', 'run', *words]))}")


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
    "faults, hang",
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

    Attention kernels, bfloat16, ranks and ZeRO, collectives, speed and memory, saves, vLLM where an
    environment is given, and planted faults; on all GPUs that torch sees, or on the CPU. Run it on
    a compute node, e.g. `srun --gpus-per-node=1 refiner certify workspace=DIR`. RECIPE gives the
    workspace, the type of weights and the environment of vLLM; KEY=VALUE words do, too.

    Exit code 0: nothing failed; 1: a check failed.
    """
    from flows.api import certificate_json, certify_node

    words = list(overrides)
    if recipe is not None and "=" in recipe:
        words, recipe = [recipe, *words], None
    tell = _show_check if not as_json else _show_on_stderr
    certificate = certify_node(
        recipe, words, model=model, only=only, time_limit_s=time_limit, tell=tell
    )
    if as_json:
        print_json(certificate_json(certificate))
    _say_end(certificate, recorded=not only)
    return 0 if certificate.passed or not certificate.count("fail") else 1


def _show_check(check: CertifiedCheck, *, err: bool = False) -> None:
    mark = click.style(check.verdict.ljust(6), fg=_VERDICT_COLOURS[check.verdict])
    click.echo(f"{mark}  {check.name}: {check.why}", err=err)


def _show_on_stderr(check: CertifiedCheck) -> None:
    _show_check(check, err=True)


def _say_end(certificate: Certificate, *, recorded: bool) -> None:
    where = f"{len(certificate.gpus)} x {certificate.gpus[0]}" if certificate.gpus else "the CPU"
    counts = ", ".join(f"{certificate.count(v)} {v}" for v in ("pass", "fail", "absent"))
    click.echo(f"\n{where}, {certificate.seconds:.0f} s: {counts}.", err=True)
    if certificate.count("fail"):
        click.echo("Next: see what failed, then\n  refiner doctor --only gpu", err=True)
    elif recorded:
        click.echo("Recorded: doctor, plan and cards use it. Next:\n  refiner plan tiny", err=True)


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
    recipe: str,
    overrides: tuple[str, ...],
    keep: bool,
    as_json: bool,
    **options: Any,
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
    from flows.api import plan_resume_proofs, prove_resume
    from flows.cli.run import stop_on_signals
    from flows.proving.planning import exit_code, next_lines, plan_lines, proof_lines, proofs_json

    plans = plan_resume_proofs(recipe, overrides, **options)
    for line in plan_lines(plans):
        click.echo(line, err=True)
    stop_on_signals()
    proofs = prove_resume(plans, lambda line: click.echo(line, err=True), keep=keep)
    with until_nobody_reads():
        if as_json:
            print_json(proofs_json(proofs))
        else:
            for proof in proofs:
                for line in proof_lines(proof):
                    click.echo(line)
    for line in next_lines(proofs, plans):
        click.echo(line, err=True)
    return exit_code(proofs)
