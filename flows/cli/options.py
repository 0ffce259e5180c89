"""Arguments shared by several commands, output of results, and groups that load by name."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from infra.host.terminal import raw
from refiner_core.contract.errors import ConfigurationError, no_such
from refiner_core.report.printing import counted, table_lines

F = TypeVar("F", bound=Callable[..., Any])


def _complete(
    context: click.Context, param: click.Parameter, word: str
) -> list[CompletionItem | str]:
    from flows.starting.completion import complete

    return [*complete(context, param, word)]


#: An argument with shell completion.
argument = functools.partial(click.argument, shell_complete=_complete)
recipe_argument = argument("recipe", metavar="RECIPE")
overrides_argument = argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
json_option = click.option("--json", "as_json", is_flag=True, help="print JSON on stdout")


def working_options(command: F) -> F:
    """Options of a command that works on a run or a sweep to its end; most of them become one
    ``launch``."""

    @functools.wraps(command)
    def working(*args: Any, no_server: bool, quiet: bool, **options: Any) -> Any:
        from flows.running.foreground import LaunchOptions

        how = {n: options.pop(n) for n in ("past_canary", "take_over") if n in options}
        return command(*args, launch=LaunchOptions(not no_server, quiet, **how), **options)

    whole: Any = working
    for option in (
        click.option("--quiet", "-q", is_flag=True, help="no progress; warnings and failures only"),
        click.option("--no-server", is_flag=True, help="no Prefect server, no flow run"),
        json_option,
        click.option("--detach", is_flag=False, flag_value="process",
                     type=click.Choice(["process", "job"]), help="continue in a process in the "
                     "background, or with --detach=job to a small Slurm job"),
    ):  # fmt: skip
        whole = option(whole)
    return cast("F", whole)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    click.echo(text.encode("utf-8", "replace").decode())  # lone surrogates: a judge may send them


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout, as they are yielded."""
    for line in lines:
        click.echo(line)


def show(
    as_json: bool,
    value: Callable[[], Any],
    lines: Callable[[], Iterable[str]],
    following: Sequence[str] = (),
    *,
    gap: bool = False,
) -> None:
    """Print a result, as JSON or as lines with suggested commands, until the reader has gone."""
    made = value() if as_json else list(lines())
    with ignore_closed_pipe():
        (print_json if as_json else print_lines)(made)
        sys.stdout.flush()
    if following and not as_json:
        print_next(*following, gap=gap)


def command_line(*words: str) -> str:
    """A `refiner` command, to be typed."""
    return shlex.join(["refiner", *words])


def print_line(text: str) -> None:
    """Print a line on stderr that is not the result."""
    click.echo(text, err=True)


def print_next(*commands: str, gap: bool = False) -> None:
    """Print suggested commands on stderr."""
    print_line("\n" * gap + "\n  ".join(["Next:", *commands]))


@contextlib.contextmanager
def ignore_closed_pipe() -> Iterator[None]:
    """Ignore a reader that has gone (``| head``, a closed terminal): the outcome of the command is
    unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_folder(out: str | Path) -> Path:
    """The folder for results, made before any work.

    Raises
    ------
    ConfigurationError
        It cannot be made or written to.
    NoSpaceError
        There is no space for it.
    """
    from infra.store.atomic import no_space_guard

    folder = Path(out).expanduser().absolute()
    with no_space_guard(folder, "making the folder for the results"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigurationError(
            f"The results cannot be written to {folder}",
            expected="a folder, or a path where one can be made",
            fix="name another one with --out DIR",
        )
    return folder


def split_workspace(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split off ``workspace=DIR`` (default: that of recipes) from the other words.

    Commands that read a workspace take it as recipes do, so that a line can be reused.
    """
    from refiner_core.contract.config import RecipeConfig

    named = [word for word in words if word.startswith("workspace=")]
    workspace = named[-1].removeprefix("workspace=") if named else RecipeConfig.workspace
    return workspace, [word for word in words if word not in named]


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split names, which may be paths of files with such a sign, from ``key=value``."""
    overrides = [
        w for w in words if "=" in w and "/" not in w.partition("=")[0] and not Path(w).is_file()
    ]
    return [w for w in words if w not in overrides], overrides


def misuse(what: str) -> click.UsageError:
    """Usage error for words that do not go together; shown with the usage of the command."""
    return click.UsageError(what, click.get_current_context())


def at_most_one(names: Sequence[str], noun: str, default: str = "") -> str | None:
    """The run or other ``noun`` given to a command, if any; several are refused."""
    if len(names) > 1:
        given = f"{len(names)} {noun}s: {' '.join(names)}"
        raise misuse(f"It was given {given}. It takes one {noun}, or none{default}.")
    return names[0] if names else None


def ask_leave(question: str, what: str, fix: str) -> None:
    """Ask for a confirmation; without a terminal, refuse with ``what`` as the reason."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(what, expected="--yes, or a terminal to ask on", fix=fix)
    click.confirm(question, default=False, abort=True, err=True)


def wrong_text(errors: int, warnings: int) -> str:
    """``1 error and 2 warnings``; empty if there are none."""
    counts = [(errors, "error"), (warnings, "warning")]
    return " and ".join(counted(n, word) for n, word in counts if n)


def progress(what: str) -> Callable[[int, int], None]:
    """Progress callback (done, total): on a terminal, one line that disappears at the end."""

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            text = f"{done} of {total} {what}" if done < total else ""
            click.echo(f"\r\x1b[K{text}", file=raw(sys.stderr), nl=False)

    return tell


#: Width of the text if the terminal does not report its width.
_WIDTH = 100
_LEAST = 40


def show_listing(
    as_json: bool,
    value: Callable[[], Any],
    rows: Sequence[Sequence[str]],
    header: Sequence[str],
    following: Sequence[str],
) -> None:
    """Print a line per row, its last text cut to the width, then suggested commands."""
    others = zip(*(row[:-1] for row in [header, *rows]), strict=True)
    left = shutil.get_terminal_size((_WIDTH, 24)).columns
    left -= sum(max(map(len, column)) + 2 for column in others)
    width = max(left, _LEAST)
    cut = [(*row[:-1], textwrap.shorten(row[-1], width, placeholder=" …")) for row in rows]
    show(as_json, value, lambda: table_lines(cut, header), following, gap=True)


#: The JSON, the rows, their header, and suggested commands.
Listing = tuple[dict[str, Any], Sequence[Sequence[str]], Sequence[str], Sequence[str]]


class LazyGroup(click.Group):
    """A group whose commands are imported when called. A command is ``NAME_command`` in its module,
    with ``_`` for ``-``.

    Parameters
    ----------
    sections
        Heading -> command -> (module below flows.cli, one line of help).
    """

    def __init__(
        self, *args: Any, sections: Mapping[str, Mapping[str, tuple[str, str]]], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._sections = sections
        self._table = {name: entry for part in sections.values() for name, entry in part.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the sections."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, after importing its module."""
        if cmd_name not in self._table:
            from flows.cli.aliases import former_listing
            from flows.former import COMMANDS

            kind = COMMANDS.get(cmd_name, "").removeprefix("list ")
            return former_listing(kind, cmd_name) if kind else None
        module = importlib.import_module(f"flows.cli.{self._table[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command at the beginning of ``args``.

        Raises
        ------
        ConfigurationError
            There is no such command; the message names the nearest.
        """
        completing = ctx.resilient_parsing or not args or args[0].startswith("-")
        if not completing and self.get_command(ctx, args[0]) is None:
            path, known = ctx.command_path, self._table
            fix = f"see `{path} --help`"
            raise no_such(f"`{path}` has no command", args[0], known, fix)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands and options with this beginning, without importing anything."""
        found = [
            CompletionItem(name, help=line)
            for name, (_, line) in self._table.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections, without importing anything."""
        for heading, commands in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])
