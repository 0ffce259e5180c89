"""Every refusal says what happened, what was expected and what mends it; all are read here.

The messages come out of the source (:mod:`tests.support.refusals`; run it as a module to read them
all). What a fix names must be there: commands, their options, fields of the configuration.
"""

from __future__ import annotations

import functools
import re
import shlex

import click
import pytest

from flows.cli.main import cli
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import walk
from tests.support.refusals import Refusal, refusals, texts_of

#: Kinds that refuse no value: nothing that a user gave was unexpected, somebody asked for it or
#: something ended it. What they need is what happened and what is next.
NOTHING_REFUSED = {
    "Interrupted": "somebody asked for it",
    "AttemptClosed": "another attempt took over; its worker goes quietly",
    "KilledError": "something was ended from outside",
}
#: Refusals without a part, by place and words, each with the reason why no user reads it.
INCOMPLETE = {
    ("flows/cli/options.py", "{…}"): "a misuse, with which click prints how the command is called",
    ("infra/ranks/bridge.py", "Rank 0 ended before"): "closes a store's context; nobody is told",
    ("refiner_core/rubrics/lint.py", "the row"): "a line in the table of `rubrics check`",
    ("refiner_core/rubrics/lint.py", "`ground_truth`"): "as above",
}


@functools.cache
def found() -> list[Refusal]:
    """All of them; read once."""
    return refusals()


@functools.cache
def fields() -> tuple[set[str], set[str]]:
    """Dotted fields, and their sections."""
    known = {path for path, _ in walk(RecipeConfig)}
    sections = {
        ".".join(path.split(".")[:n]) for path in known for n in range(1, path.count(".") + 1)
    }
    return known, sections


def test_every_refusal_says_what_was_expected_and_what_mends_it() -> None:
    """A message without its way out leaves a user to read the source."""
    lacking = []
    for refusal in found():
        if any(
            refusal.path == path and any(text.startswith(words) for text in refusal.what)
            for path, words in INCOMPLETE
        ):
            continue
        asked = ["what", "fix"] + ([] if refusal.kind in NOTHING_REFUSED else ["expected"])
        without = [name for name in asked if not all(getattr(refusal, name))]
        if without:
            lacking.append(f"{refusal.where} {refusal.kind} {refusal.what[0]!r}: no {without}")
    assert not lacking, "\n".join(lacking)


def test_refusals_read_as_one_paragraph() -> None:
    """`WHAT. Expected EXPECTED. To fix it: FIX.`: each part must fit where it is put."""
    wrong = []
    for refusal in found():
        for text in refusal.expected:
            if re.match(r"(?i)expected\b|to fix", text):
                wrong.append(f"{refusal.where} says Expected twice: {text!r}")
            elif re.match(r"[A-Z][a-z]+ [a-z]", text) and not re.match(_NAMES, text):
                wrong.append(f"{refusal.where} begins a sentence in a sentence: {text!r}")
        for text in refusal.fix:
            if re.match(r"(?i)to fix|fix\b|please", text):
                wrong.append(f"{refusal.where} says To fix it twice: {text!r}")
            elif re.match(r"[A-Z][a-z]+ [a-z]", text) and not re.match(_NAMES, text):
                wrong.append(f"{refusal.where} begins a sentence in a sentence: {text!r}")
            elif re.fullmatch(r"`?[a-z_.]+`?", text) and text != "nothing":
                wrong.append(f"{refusal.where} names a field and not what to do: {text!r}")
        for text in refusal.texts():
            if text.endswith((",", ":", ";", "..")) or "  " in text.split("\n")[0]:
                wrong.append(f"{refusal.where} ends or runs badly: {text!r}")
            if re.search(r"/(work|root|home)/|\.\./shared", text):
                wrong.append(f"{refusal.where} names a path of ours: {text!r}")
    assert not wrong, "\n".join(wrong)


_NAMES = r"W&B|Slurm|Prefect|Python|Jinja|DeepSpeed|Parquet|YAML|Muon|Hub|SHA"


def commands_in(text: str) -> list[str]:
    """What stands in backticks, or after a colon, and begins with `refiner `."""
    return re.findall(r"`(refiner [^`]*)`", text)


def wrong_command(text: str) -> str | None:
    """Why the command line cannot be meant, or None. Words in capitals and braces stand for any."""
    try:
        words = shlex.split(text)[1:]
    except ValueError:
        return None  # cut from a longer text
    command: click.Command | None = cli
    context = click.Context(cli, info_name="refiner")
    while words and isinstance(command, click.Group):
        if not re.fullmatch(r"[a-z][a-z-]*", words[0]):
            return None if words[0].startswith("-") or not words[0][0].islower() else words[0]
        found_command = command.get_command(context, words[0])
        if found_command is None:
            return f"there is no `{words[0]}` below `{command.name}`"
        command, words = found_command, words[1:]
    assert command is not None
    choices = [
        p.type.choices
        for p in command.params
        if isinstance(p.type, click.Choice) and isinstance(p, click.Argument)
    ]
    if choices and words and re.fullmatch(r"[a-z-]+", words[0]) and words[0] not in choices[0]:
        return f"`{command.name}` does not know {words[0]}"
    options = {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)}
    for word in words:
        option = word.split("=")[0].rstrip(".,;…")
        if option.startswith("--") and option not in options | {"--help", "--debug"}:
            return f"`{command.name}` has no option {option}"
    return None


def test_commands_that_texts_name_exist() -> None:
    """A fix that names a command which is not there is worse than none. Docstrings count: they are
    what `--help` prints."""
    wrong = {
        f"{where}: `{line}`: {why}"
        for where, text in texts_of()
        for line in commands_in(text)
        if (why := wrong_command(line))
    }
    assert not wrong, "\n".join(sorted(wrong))


def wrong_fields(text: str) -> list[str]:
    """Words such as grpo.betta that begin with a section and go on with no field of it."""
    known, sections = fields()
    wrong = []
    for match in re.finditer(r"(?<![\w./{}…-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w(/-])", text):
        word = match.group(1)
        if word.split(".")[0] not in sections or word.rsplit(".", 1)[1] in _ENDINGS:
            continue
        if word not in known and word not in sections:
            wrong.append(word)
    return wrong


_ENDINGS = {"json", "yaml", "py", "md", "jsonl", "parquet", "csv"}


def test_fields_that_refusals_name_exist() -> None:
    """`correct grpo.betta` sends a user to a field that is refused next."""
    wrong = [
        f"{refusal.where}: {word}: {text!r}"
        for refusal in found()
        for text in refusal.texts()
        for word in wrong_fields(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("refiner plan tiny --json", True),
        ("refiner evaluate", False),
        ("refiner server start", False),
        ("refiner status --al", False),
        ("refiner nightly check FILE", True),
    ],
)
def test_the_check_of_commands_can_tell(line: str, right: bool) -> None:
    """The checks above would say nothing if everything passed."""
    assert (wrong_command(line) is None) is right


def test_the_check_of_fields_can_tell() -> None:
    """As above."""
    assert wrong_fields("set grpo.betta=1 or grpo.beta") == ["grpo.betta"]


def test_reasons_excuse_something() -> None:
    """An entry that excuses nothing any more would excuse the next mistake."""
    for path, words in INCOMPLETE:
        texts = [text for r in found() if r.path == path for text in r.what]
        assert any(text.startswith(words) for text in texts), f"{path} {words}"
