"""`refiner judge`: ask a judge, measure it, and look after the servers of judges.

The commands below it are loaded by name when they are called, like those of `refiner` itself.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

#: Command -> (module below flows.cli, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "ask": ("judge_report", "Ask one question by hand: does the judge answer, and what?"),
    "report": ("judge_report", "Measure a judge: repeats, agreement, bias, hostile answers, cost."),
    "servers": ("judge_servers", "List the servers of judges that refiner has started."),
    "stop": ("judge_servers", "End a server of a judge."),
}


class _Lazy(click.Group):
    """A group that imports a command's module only when that command is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"flows.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from refiner_core.contract.errors import ConfigurationError
            from refiner_core.contract.loading import suggest

            raise ConfigurationError(
                f"There is no command `judge {args[0]}`.{suggest(args[0], COMMANDS)}",
                expected="one of: " + ", ".join(COMMANDS),
                fix="see `refiner judge --help`",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group("judge", cls=_Lazy)
def judge_command() -> None:
    """Ask a judge, measure it, see and end the servers of judges.

    A judge is named by fields of the recipe: judge.base_url=http://127.0.0.1:8000/v1
    judge.model=NAME. Without any, it is the lexical one, which needs no server.
    """
