"""A folder of one's own from answers: all of its files or none, if its recipe can be planned.

In: what was typed, and the folder's place. Out: :class:`Begun`: the files, and the plan of the
recipe among them. Ctrl-C leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flows.running.calls import make_recipe_plan
from flows.starting.drafting import CLUSTER, RECIPE, SWEEP, drafted, file_texts
from flows.starting.questions import QUESTIONS, Asked, Question, look_around
from infra.store.atomic import no_space_guard
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.field_facts import SCHEMA_FILE
from refiner_core.contract.plan import Plan

#: Whatever may be made.
NAMES = (RECIPE, SCHEMA_FILE, CLUSTER, SWEEP, ".gitignore", "README.md")


class Begun(NamedTuple):
    """A folder that was made: its plan, and its files by name."""

    folder: Path
    plan: Plan
    files: dict[str, str]


def init_folder(
    folder: str | Path = ".",
    answers: Mapping[str, str] | None = None,
    *,
    ask: Callable[[Question, Asked], str] | None = None,
    take_defaults: bool = True,
) -> Begun:
    """Make a folder with a recipe of one's own, ready to plan. Nothing is overwritten.

    Parameters
    ----------
    folder
        Where; it may be there and empty.
    answers
        By the names of the questions, which are the long flags of `refiner init`.
    ask
        Asked for what no answer says, where defaults are not taken.
    take_defaults
        Take the default of whatever no answer says.

    Returns
    -------
    Begun
        What was made.

    Raises
    ------
    RefinerError
        An answer does not fit, something is there already, or the recipe could not be planned:
        nothing was made.
    """
    place = Path(folder).expanduser().absolute().resolve()
    _refuse_what_is_there(place)
    asked = _all_answers(answers or {}, Asked({}, look_around(), place), ask, take_defaults)
    draft = drafted(asked)
    files = file_texts(draft, asked)
    return Begun(place, _make_folder(place, files), files)


def _all_answers(
    given: Mapping[str, str],
    asked: Asked,
    ask: Callable[[Question, Asked], str] | None,
    take_defaults: bool,
) -> Asked:
    """An answer to every question that applies."""
    missing: list[Question] = []
    for question in QUESTIONS:
        if not question.applies(asked):
            continue
        if question.name in given:
            answer = _checked(question, given[question.name], asked)
        elif take_defaults or ask is None:
            answer = question.default(asked)
            if not take_defaults:
                missing.append(question)
        else:
            answer = ask(question, asked)
        asked = replace(asked, answers={**asked.answers, question.name: answer})
    # A flag that nothing comes of is a mistake.
    if idle := [q.flag for q in QUESTIONS if q.name in given and q.name not in asked.answers]:
        kind = ", ".join(f"--{name} {value}" for name, value in asked.answers.items() if value)
        raise ConfigurationError(
            f"{', '.join(idle)} would change nothing here.",
            expected=f"flags that go with {kind}",
            fix="leave it out, or change the others",
        )
    if missing:
        texts = "; ".join(q.text for q in missing)
        raise ConfigurationError(
            f"There is no terminal to ask on, and no answer to: {texts}",
            expected=f"the flags {' '.join(f'{q.flag} …' for q in missing)}",
            fix="give them, or take the defaults of all of them with --yes",
        )
    return asked


def _checked(question: Question, answer: str, asked: Asked) -> str:
    try:
        return question.check(answer, asked)
    except RefinerError as error:
        error.what = f"{question.flag}: {error.what}"
        error.fix = f"correct {question.flag}" if error.fix == "answer again" else error.fix
        error.args = (error.paragraph(),)
        raise


def _refuse_what_is_there(folder: Path) -> None:
    """Nothing is ever overwritten."""
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is a file.",
            expected="a folder, or a name for a new one",
            fix="name another one: `refiner init FOLDER`",
        )
    there = [name for name in NAMES if os.path.lexists(folder / name)]
    if there:
        raise ConfigurationError(
            f"{folder} has {', '.join(there)} already; nothing is overwritten.",
            expected="a folder without them, or a name for a new one",
            fix="name a new folder, e.g. `refiner init my-run`",
        )


def _make_folder(folder: Path, files: Mapping[str, str]) -> Plan:
    """Write the files beside their place, plan the recipe, then put them there."""
    _refuse_what_is_there(folder)
    nearest = next(p for p in (folder, *folder.parents) if p.is_dir())
    if not os.access(nearest, os.W_OK):
        raise ConfigurationError(
            f"{nearest} cannot be written.",
            expected="a place where a folder can be made",
            fix="name another one: `refiner init FOLDER`",
        )
    scratch = tempfile.TemporaryDirectory(
        prefix=".refiner-init-", dir=nearest, ignore_cleanup_errors=True
    )
    with no_space_guard(nearest, "making the folder"), scratch as name:
        for file, text in files.items():
            (Path(name) / file).write_text(text, encoding="utf-8")
        plan = _planned(Path(name), files)
        _put(folder, files)
    return plan


def _planned(scratch: Path, files: Mapping[str, str]) -> Plan:
    """Everything in it has to work, too."""
    plan = make_recipe_plan(str(scratch / RECIPE))
    if CLUSTER in files:
        from infra.slurm.profiles import load_profile

        profile = load_profile(str(scratch / CLUSTER))
        for stage in plan.stages:
            if profile.executor_for(stage) == "slurm":
                profile.check(stage.resources, stage.name, needs_network=stage.needs_network)
    if SWEEP in files:
        from flows.sweeping.planning import make_sweep_plan

        make_sweep_plan(str(scratch / SWEEP))
    return plan


def _put(folder: Path, files: Mapping[str, str]) -> None:
    """One by one, each only where nothing is; what was put is taken away again if one fails."""
    made_folders = [p for p in (folder, *folder.parents) if not p.exists()]
    put: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                put.append(folder / name)
                file.write(text)
    except BaseException:
        for path in put:
            path.unlink(missing_ok=True)
        for path in made_folders:
            with contextlib.suppress(OSError):  # somebody else has put something there
                path.rmdir()
        raise
