"""What commands that list have in common: one line each, as wide as the terminal, and what next.

In: rows of short texts whose last one says what a thing is for. Out: an aligned table on stdout.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence

import click

from flows.cli.options import print_table

#: Wide enough to say what something is for, where the terminal does not say how wide it is.
_WIDTH = 100
_LEAST = 40


def show_listing(
    rows: Sequence[Sequence[str]], header: Sequence[str], following: Sequence[str]
) -> None:
    """Print a line for each row, its last text cut to what fits, then the commands that follow."""
    others = zip(*(row[:-1] for row in [header, *rows]), strict=True)
    room = shutil.get_terminal_size((_WIDTH, 24)).columns
    room -= sum(max(map(len, column)) + 2 for column in others)
    print_table([(*row[:-1], in_a_line(row[-1], max(room, _LEAST))) for row in rows], header)
    click.echo("\nNext:\n  " + "\n  ".join(following), err=True)


def in_a_line(text: str, width: int) -> str:
    """The first sentence of a description in ``width`` characters: all of it, else its first
    clauses, else what fits.

    >>> in_a_line("Jobs inside an image. Copy it.", 60)
    'Jobs inside an image'
    >>> in_a_line("A cluster as Slurm comes: its default partition", 30)
    'A cluster as Slurm comes'
    >>> in_a_line("A cluster as Slurm comes", 14)
    'A cluster as …'
    """
    sentence = re.split(r"(?<=\w\w)\.\s", " ".join(text.split()), maxsplit=1)[0].rstrip(".")
    if len(sentence) <= width:
        return sentence
    ends = [found.start() for found in re.finditer(r"[,;:] ", sentence)]
    whole = max((end for end in ends if width // 2 < end <= width), default=0)
    return sentence[:whole] if whole else sentence[: width - 1].rsplit(" ", 1)[0] + " …"
