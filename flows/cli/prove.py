"""`refiner prove-resume`: straight and interrupted, and whether anybody can tell."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.options import (
    json_option,
    overrides_argument,
    print_json,
    recipe_argument,
    until_nobody_reads,
)


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
    from flows.proving.text import exit_code, next_lines, plan_lines, proof_lines, proofs_json

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
