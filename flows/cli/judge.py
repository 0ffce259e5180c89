"""`refiner judge`: ask a judge, measure it, and look after the servers of judges.

The commands below it are loaded by name when they are called, like those of `refiner` itself.
"""

from __future__ import annotations

import click

from flows.cli.lazy import LazyGroup

#: Command -> (module below flows.cli, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "ask": ("judge_report", "Ask one question by hand: does the judge answer, and what?"),
    "report": ("judge_report", "Measure a judge: repeats, agreement, bias, hostile answers, cost."),
    "servers": ("judge_servers", "List the servers of judges that refiner has started."),
    "stop": ("judge_servers", "End a server of a judge."),
}


@click.group("judge", cls=LazyGroup, commands=COMMANDS)
def judge_command() -> None:
    """Ask a judge, measure it, see and end the servers of judges.

    A judge is named by fields of the recipe: judge.base_url=http://127.0.0.1:8000/v1
    judge.model=NAME. Without any, it is the lexical one, which needs no server.
    """
