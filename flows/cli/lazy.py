"""Groups of commands that are loaded by name when they are called, so that `--help` is instant.

In: a table of names, modules and one line of help each. Out: a click group.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

#: Command -> (module below flows.cli, one line of help).
Commands = Mapping[str, tuple[str, str]]


class LazyGroup(click.Group):
    """A group whose commands are imported when one is called. A command of a module is named
    ``NAME_command`` there, with ``_`` for ``-``.

    Parameters
    ----------
    commands
        The table.
    """

    def __init__(self, *args: Any, commands: Commands, **options: Any) -> None:
        super().__init__(*args, **options)
        self._table = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the table's order."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, its module imported."""
        if cmd_name not in self._table:
            return None
        module = importlib.import_module(f"flows.cli.{self._table[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command that ``args`` begin with.

        Raises
        ------
        ConfigurationError
            There is none; names the nearest.
        """
        if args and args[0] not in self._table and not args[0].startswith("-"):
            from refiner_core.contract.errors import ConfigurationError
            from refiner_core.contract.fields import suggest

            raise ConfigurationError(
                f"There is no command `{ctx.command_path} {args[0]}`."
                f"{suggest(args[0], self._table)}",
                expected="one of: " + ", ".join(self._table),
                fix=f"see `{ctx.command_path} --help`",
            )
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands and options that begin so, without importing anything."""
        found = [
            CompletionItem(name, help=line)
            for name, (_, line) in self._table.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._table.items()])
