"""`refiner notify`: try the ways in which a recipe tells somebody."""

from __future__ import annotations

import shlex
from dataclasses import asdict

import click

from flows.cli.options import json_option, print_json, print_table


@click.group("notify")
def notify_command() -> None:
    """Try how somebody is told of runs and sweeps (section `notify` of a recipe)."""


@notify_command.command("test")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@json_option
def notify_test(words: tuple[str, ...], as_json: bool) -> int:
    """Send a test message by each channel that RECIPE (default: tiny) names, and say what came of
    it.

    What a command prints is shown on standard error. Exit code 0 when every channel has taken the
    message, else 1.
    """
    from flows.notifying.trying import notify_settings, try_channels
    from refiner_core.contract.errors import ConfigurationError

    names = [w for w in words if "=" not in w]
    if len(names) > 1:
        raise ConfigurationError(
            f"notify test was given {len(names)} recipes: {' '.join(names)}.",
            expected="one recipe, or none",
            fix="try them one by one",
        )
    recipe, overrides = (names or ["tiny"])[0], [w for w in words if "=" in w]
    config = notify_settings(recipe, overrides)
    tried = try_channels(config, started=lambda name: click.echo(f"{name}: sending …", err=True))
    worked = not any(t.why for t in tried)
    if as_json:
        channels = [{**asdict(t), "delivered": not t.why} for t in tried]
        print_json({"version": 1, "recipe": config.recipe, "channels": channels})
    else:
        rows = [(t.channel, f"{t.seconds:.1f} s", t.why or "has taken it") for t in tried]
        print_table(rows, ("channel", "took", "what came of it"))
    following = ["run"] if worked else ["notify", "test"]
    click.echo(f"Next:\n  {shlex.join(['refiner', *following, recipe, *overrides])}", err=True)
    return 0 if worked else 1
