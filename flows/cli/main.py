"""Entry point of `refiner`: one group, commands loaded by name when they are called.

Exit codes are those of :data:`refiner_core.contract.errors.EXIT_CODES`. Results go to stdout (as
JSON with ``--json``); progress, warnings and errors go to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import click

from flows.cli.options import LazyGroup, print_json, say
from infra.host.terminal import printed_plainly
from refiner_core.contract.errors import ConfigurationError, RefinerError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Command -> (module below flows.cli, one line of help). The line stands here so that `--help`
#: imports nothing.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("init", "Begin: a folder with a recipe and a profile of your own, ready to plan."),
    "doctor": ("machine", "Look at this machine: what works, what does not, what mends it."),
    "run": ("run", "Carry out a recipe: what is done is skipped, what runs is waited for."),
    "plan": ("plan", "Show what a recipe would do; changes nothing."),
    "explain": ("plan", "Say why a stage would run or be skipped, field by field."),
    "status": ("status", "Show how a run stands: stages, jobs, progress, disk, what went wrong."),
    "logs": ("run", "Print or follow the log of a stage, from attempt to attempt."),
    "cancel": ("run", "End a run or some of its stages; what is saved is kept."),
    "resume": ("run", "Go on with a recorded run, from any shell."),
    "sweep": ("run", "Plan, launch and amend an ablation: arms by factors, each with seeds."),
    "report": ("status", "Make the page of a run or a sweep: what it did, what it has shown."),
    "prove-resume": (
        "machine",
        "Prove that training resumes exactly: straight and interrupted runs.",
    ),
    "certify": ("machine", "Try what this node can do: kernels, ranks, speed, memory, faults."),
    "diff": ("plan", "Compare two runs: configuration, data, code, judge, metrics, first step."),
    "nightly": ("serve", "Evaluate checkpoints every night, and tell change from noise."),
    "notify": ("serve", "Try how somebody is told when a run finishes, pauses or fails."),
    "track": ("machine", "Send what W&B has logged offline, from a node with network."),
    "disk": ("machine", "Show what a workspace uses and what may go; pin and reclaim."),
    "adopt": ("publish", "Take over a dead run of anybody's: go on with it, or publish it."),
    "publish": ("publish", "Publish checkpoints of a run, by hand."),
    "card": ("publish", "Check a model card, show it again from records, print the template."),
    "why": ("plan", "Follow a number to its protocol, samples, answers and judgements."),
    "rescore": ("judge", "Score stored rollouts of runs under another judge, rubrics, weights."),
    "judge": ("judge", "Ask a judge one question, measure it, see and end the servers of judges."),
    "rubrics": ("sets", "Show and check rubric sets."),
    "protocols": ("sets", "Show and check protocols: fixed ways of measuring."),
    "environments": ("sets", "Show, check and play what agents with tools work in."),
    "show": ("sets", "Explain a configuration field: its mark, type, default and source."),
    "list": ("sets", "List what is shipped: recipes, profiles, rubrics, and more."),
    "serve": ("serve", "Carry out what is launched from Prefect: runs, sweeps, nights."),
    "deploy": ("serve", "Put the same deployments on a Prefect server, for a work pool."),
    "server": ("serve", "Show or stop the local Prefect server."),
    "completion": ("sets", "Print what a shell needs to complete commands and fields."),
}


@click.group(
    cls=LazyGroup,
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: refiner plan tiny, then refiner run tiny.",
)
@click.version_option(package_name="refiner", message="refiner %(version)s")
def cli() -> None:
    """Post-training experiments from one recipe.

    RECIPE is a shipped name (`refiner list recipes`) or a YAML file; fields are overridden as
    key=value, e.g. grpo.beta=0.01 workspace=/scratch/me/runs.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Tracebacks only with ``--debug``."""
    _open_what_is_closed()
    out, err = printed_plainly(sys.stdout), printed_plainly(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = "--debug" in args or os.environ.get("REFINER_DEBUG") == "1"
    args = [a for a in args if a != "--debug"]
    args = _detach_in_full(args)
    as_json = "--json" in args
    try:
        _hear_ctrl_c()
        _check_text(args)
        code = cli.main(args=args, prog_name="refiner", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except RefinerError as error:
        if debug:
            raise
        return _say(str(error), error.exit_code, as_json)
    except click.ClickException as error:
        return _say(_usage_error(error), 2, as_json)
    except (KeyboardInterrupt, click.Abort):
        return _say("Stopped.", 6, as_json)
    except SystemExit:  # click's answer to a reader that has seen enough, as in `| head -1`
        return 0
    except OSError as error:
        if debug:
            raise
        where = f" {error.filename}" if error.filename else ""
        said = (
            f"The system refused: {error.strerror or error}{where}. Expected to read and write "
            "there. To mend it: check the path, its permissions and the room left on its disk, "
            "then run the same command again."
        )
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return _say(said, 5 if full else 4, as_json)
    except Exception as error:
        if debug:
            raise
        return _say(
            f"A bug in refiner: {type(error).__name__}: {error}. Nothing that was finished is "
            "lost. To mend it: run the same command with --debug and report the traceback.",
            70,
            as_json,
        )


def _detach_in_full(args: list[str]) -> list[str]:
    """``--detach`` where no way follows is the first way: what stands behind it, such as an
    override, is not its value."""
    follows = [*args[1:], ""]
    return [
        "--detach=process" if a == "--detach" and b not in ("process", "job") else a
        for a, b in zip(args, follows, strict=True)
    ]


def _say(message: str, code: int, as_json: bool) -> int:
    """Say it to a person, and with ``--json`` to a script too: its stdout is always JSON."""
    # Where not even that can be written, the exit code says it.
    with contextlib.suppress(OSError):
        say(f"refiner: {message}")
    if as_json:
        with contextlib.suppress(OSError):
            print_json({"version": 1, "error": message, "exit_code": code})
    return code


def _hear_ctrl_c() -> None:
    """From here on Ctrl-C is an exception; while modules were imported (see :mod:`flows.cli`) it
    ended the process."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_what_is_closed() -> None:
    """Put the null device where a caller has closed a standard stream (``>&-``, some daemons):
    else the next file that is opened takes its number, and is written to by whoever prints."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _check_text(args: Sequence[str]) -> None:
    """Refuse what no record can hold: bytes that are no text."""
    for text in args:
        if (plain := text.encode(errors="replace").decode()) != text:
            raise ConfigurationError(
                f"The argument {plain!r} is not UTF-8.",
                expected="text in UTF-8",
                fix="rename the file, or set a UTF-8 locale (e.g. LC_ALL=C.UTF-8)",
            )


def _usage_error(error: click.ClickException) -> str:
    """Message of click on a command line, with what was expected and where to read more."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "refiner"
    what, expected = error.format_message(), "options and arguments that the command has"
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and context is not None:
        what = f"`{path}` was given no command."
        expected = "one of: " + ", ".join(context.command.list_commands(context))
    elif context is not None:
        expected = " ".join([path, *context.command.collect_usage_pieces(context)])
    fix = f"see `{path} --help`"
    return ConfigurationError(what, expected=expected, fix=fix).paragraph()


if __name__ == "__main__":
    sys.exit(main())
