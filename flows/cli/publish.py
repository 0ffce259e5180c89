"""`refiner publish`: checkpoints of a recorded run, published by hand."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.options import json_option, split_workspace
from flows.cli.run import detach_option, finish, leave_to, stop_on_signals


@click.command("publish")
@click.argument("words", nargs=-1, metavar="[RUN] [workspace=DIR] [KEY=VALUE]...")
@click.option("--step", "steps", type=int, multiple=True, help="a saved step; may be repeated")
@click.option("--no-evaluate", is_flag=True, help="do not wait for evaluations, nor begin any")
@click.option("--dry-run", is_flag=True, help="print the plan and change nothing")
@detach_option
@json_option
@click.option("--no-server", is_flag=True, help="no Prefect server, no flow run")
@click.option("--quiet", "-q", is_flag=True, help="no progress; warnings and failures only")
def publish_command(
    words: tuple[str, ...],
    steps: tuple[int, ...],
    no_evaluate: bool,
    dry_run: bool,
    detach: str | None,
    as_json: bool,
    no_server: bool,
    quiet: bool,
) -> int:
    """Publish the last checkpoint of RUN (default: the newest that trains), or those of --step.

    The run may still train, have ended, or have died: no training is begun, what is there is
    exported, published with its card, and evaluated for it. Where it goes is as the run has it, or
    as overrides of `publish` say, e.g. publish.target=hub publish.repo_id=me/my-model. What is
    published already is not sent again.
    """
    from flows.api import begin_publication, plan_publication, publish_run
    from flows.cli.plan import show_made_plan

    where, rest = split_workspace(words)
    runs = [w for w in rest if "=" not in w]
    overrides = [w for w in rest if "=" in w]
    if len(runs) > 1:
        from refiner_core.contract.errors import ConfigurationError

        raise ConfigurationError(
            f"publish was given {len(runs)} runs: {' '.join(runs)}.",
            expected="one run, or none for the newest that trains",
            fix="publish them one by one",
        )
    run = runs[0] if runs else None
    asked: dict[str, Any] = {"steps": steps, "overrides": overrides, "evaluate": not no_evaluate}
    if dry_run:
        plan = plan_publication(run, where, **asked)
        show_made_plan(plan, as_json)
        return 0
    begun = begin_publication(run, where, **asked)
    if detach is not None:
        return leave_to(detach, begun[1], begun[2], as_json, use_server=not no_server)
    stop_on_signals()
    return finish(publish_run(*begun, use_server=not no_server, quiet=quiet), as_json)
