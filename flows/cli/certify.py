"""`refiner certify`: what a node can do, tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flows.cli.options import json_option, overrides_argument, print_json

if TYPE_CHECKING:
    from refiner_core.contract.certificates import Certificate, CertifiedCheck

_COLOURS = {"pass": "green", "fail": "red", "absent": "yellow"}


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
    tell = _show if not as_json else _show_on_stderr
    certificate = certify_node(
        recipe, words, model=model, only=only, time_limit_s=time_limit, tell=tell
    )
    if as_json:
        print_json(certificate_json(certificate))
    _say_end(certificate, recorded=not only)
    return 0 if certificate.passed or not certificate.count("fail") else 1


def _show(check: CertifiedCheck, *, err: bool = False) -> None:
    mark = click.style(check.verdict.ljust(6), fg=_COLOURS[check.verdict])
    click.echo(f"{mark}  {check.name}: {check.why}", err=err)


def _show_on_stderr(check: CertifiedCheck) -> None:
    _show(check, err=True)


def _say_end(certificate: Certificate, *, recorded: bool) -> None:
    where = f"{len(certificate.gpus)} x {certificate.gpus[0]}" if certificate.gpus else "the CPU"
    counts = ", ".join(f"{certificate.count(v)} {v}" for v in ("pass", "fail", "absent"))
    click.echo(f"\n{where}, {certificate.seconds:.0f} s: {counts}.", err=True)
    if certificate.count("fail"):
        click.echo("Next: see what failed, then\n  refiner doctor --only gpu", err=True)
    elif recorded:
        click.echo("Recorded: doctor, plan and cards use it. Next:\n  refiner plan tiny", err=True)
