"""Entry point of `refiner`: one group with commands that are imported by name when called.

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

from flows.cli.options import LazyGroup, print_json, print_line
from infra.host.terminal import printed_plainly
from refiner_core.contract.errors import ConfigurationError, RefinerError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Heading of `--help` -> command -> (module below flows.cli, one line of help). The help is here so
#: that `--help` imports nothing.
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Every day": {
        "init": ("own", "Start a recipe of your own, ready to plan."),
        "doctor": ("machine", "Check this machine; print how to fix what does not work."),
        "plan": ("plan", "Show what a recipe would do, without changes."),
        "run": ("run", "Run a recipe; finished stages are skipped."),
        "runs": ("runs", "List and filter runs."),
        "ui": ("runs", "Show all runs in a browser."),
        "status": ("status", "Show the state of a run or sweep."),
        "logs": ("run", "Print or follow the log of a stage."),
        "cancel": ("run", "Cancel a run, or some of its stages."),
        "resume": ("run", "Resume a recorded run."),
        "report": ("status", "Write the report of a run or sweep."),
        "diff": ("plan", "Compare two runs."),
        "sweep": ("run", "Plan, launch and extend an ablation."),
    },
    "Prefect and nightly evaluations": {
        "serve": ("serve", "Serve deployments, so that Prefect can launch runs."),
        "deploy": ("serve", "Create the deployments for a work pool."),
        "server": ("serve", "Show or stop the local Prefect server."),
        "nightly": ("serve", "Evaluate checkpoints every night."),
        "notify": ("serve", "Test notifications."),
    },
    "Publishing": {
        "publish": ("publish", "Publish checkpoints of a run."),
        "card": ("publish", "Check or print a model card."),
        "adopt": ("publish", "Import a checkpoint of another trainer."),
    },
    "Judges and measuring": {
        "judge": ("judge", "Ask and measure judges; list and stop their servers."),
        "reward": ("judge", "Attack a reward; compare its judge with people."),
        "rescore": ("judge", "Score stored rollouts under other judges, rubrics, weights."),
        "rubrics": ("sets", "Show and check rubric sets; report what criteria teach."),
        "protocols": ("sets", "Show and check evaluation protocols."),
        "data": ("own", "Check and convert rows of your own."),
        "environments": ("sets", "Show, check and play environments of agents."),
    },
    "Details": {
        "why": ("plan", "Trace a number to its samples and judgements."),
        "explain": ("plan", "Explain why a stage would run or be skipped."),
        "show": ("sets", "Explain a configuration field."),
        "list": ("sets", "List recipes, profiles, rubric sets and more."),
    },
    "Machine and workspace": {
        "tag": ("runs", "Give a run tags and a note."),
        "rm": ("runs", "Remove runs and sweeps."),
        "prune": ("runs", "Remove old runs, but the best."),
        "bundle": ("runs", "Write a run to one file."),
        "unbundle": ("runs", "Put the run of a bundle into a workspace."),
        "disk": ("machine", "Show disk usage; pin and reclaim."),
        "certify": ("machine", "Test what a node can do: kernels, ranks, speed, memory."),
        "prove-resume": ("machine", "Prove that training resumes exactly."),
        "track": ("machine", "Upload offline W&B runs."),
        "completion": ("sets", "Print the completion script of a shell."),
    },
}


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
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
    """Run the command line; returns the exit code. Prints tracebacks only with ``--debug``."""
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
        _handle_ctrl_c()
        _check_text(args)
        code = cli.main(args=args, prog_name="refiner", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        return _print_line(_usage_error(error), 2, as_json)
    except (KeyboardInterrupt, click.Abort):
        return _print_line("Stopped.", 6, as_json)
    except SystemExit:  # click's exit when the reader has closed the pipe, as in `| head -1`
        return 0
    except Exception as error:
        if debug:
            raise
        return _print_line(*_said(error), as_json)


def _said(error: Exception) -> tuple[str, int]:
    """Message and exit code of an error."""
    if isinstance(error, RefinerError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        said = (
            f"The system refused: {error.strerror or error}{where}. Expected to read and "
            "write there. To fix it: check the path, its permissions and the free disk space, "
            "then run the same command again."
        )
        return said, 5 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 4
    said = (
        f"A bug in refiner: {type(error).__name__}: {error}. Finished work is not lost. To fix it: "
        "run the same command with --debug and report the traceback."
    )
    return said, 70


def _detach_in_full(args: list[str]) -> list[str]:
    """``--detach`` without a method means the first one: the next word, such as an override, is not
    its value."""
    follows = [*args[1:], ""]
    return [
        "--detach=process" if a == "--detach" and b not in ("process", "job") else a
        for a, b in zip(args, follows, strict=True)
    ]


def _print_line(message: str, code: int, as_json: bool) -> int:
    """Print a message for people, and with ``--json`` also as JSON on stdout."""
    # If even that cannot be written, the exit code remains.
    with contextlib.suppress(OSError):
        print_line(f"refiner: {message}")
    if as_json:
        with contextlib.suppress(OSError):
            print_json({"version": 1, "error": message, "exit_code": code})
    return code


def _handle_ctrl_c() -> None:
    """Turn Ctrl-C into an exception from here on; during imports (see :mod:`flows.cli`) it ended
    the
    process."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_what_is_closed() -> None:
    """Open the null device for a standard stream that the caller has closed (``>&-``, some
    daemons): else the next opened file takes its number, and receives what is printed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _check_text(args: Sequence[str]) -> None:
    """Refuse arguments that no record can hold: bytes that are not text."""
    for text in args:
        if (plain := text.encode(errors="replace").decode()) != text:
            raise ConfigurationError(
                f"The argument {plain!r} is not UTF-8.",
                expected="text in UTF-8",
                fix="rename the file, or set a UTF-8 locale (e.g. LC_ALL=C.UTF-8)",
            )


def _usage_error(error: click.ClickException) -> str:
    """Click's message on a command line, with what was expected and how to get help."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "refiner"
    what, expected = error.format_message(), "valid options and arguments"
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and context is not None:
        what = f"`{path}` was given no command."
        expected = "one of: " + ", ".join(context.command.list_commands(context))
    elif context is not None:
        expected = " ".join([path, *context.command.collect_usage_pieces(context)])
    fix = f"see `{path} --help`"
    return ConfigurationError(what, expected=expected, fix=fix).paragraph()


if __name__ == "__main__":
    sys.exit(main())
