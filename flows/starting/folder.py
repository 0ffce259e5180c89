"""A folder of one's own from answers: all of its files or none, if its recipe can be planned.

In: what was typed; a folder and the texts of its files. Out: :class:`Asked` with an answer to every
question that applies; the files, and the plan of the recipe among them. Ctrl-C leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from flows.running.calls import make_recipe_plan
from flows.starting.drafting import CLUSTER, RECIPE, SWEEP
from flows.starting.questions import QUESTIONS, Asked, Question, Surroundings
from infra.store.atomic import no_space_guard
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.field_facts import SCHEMA_FILE
from refiner_core.contract.plan import Plan

#: Asks one question; ``None`` where nobody can be asked.
Ask = Callable[[Question, Asked], str] | None


def all_answers(
    given: Mapping[str, str],
    around: Surroundings,
    folder: Path,
    ask: Ask,
    *,
    take_defaults: bool,
) -> Asked:
    """An answer to every question that applies.

    Raises
    ------
    RefinerError
        A flag's value does not fit, or belongs to another kind of recipe; or nobody can be asked
        what no flag says.
    """
    asked = Asked({}, around, folder)
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
    _refuse_idle(given, asked)
    if missing:
        raise _nobody_to_ask(missing)
    return asked


def _checked(question: Question, answer: str, asked: Asked) -> str:
    try:
        return question.check(answer, asked)
    except RefinerError as error:
        error.what = f"{question.flag}: {error.what}"
        error.fix = f"correct {question.flag}" if error.fix == "answer again" else error.fix
        error.args = (error.paragraph(),)
        raise


def _refuse_idle(given: Mapping[str, str], asked: Asked) -> None:
    """A flag that nothing comes of is a mistake."""
    idle = [q for q in QUESTIONS if q.name in given and q.name not in asked.answers]
    if idle:
        kind = ", ".join(f"--{name} {value}" for name, value in asked.answers.items() if value)
        raise ConfigurationError(
            f"{', '.join(q.flag for q in idle)} would change nothing here.",
            expected=f"flags that go with {kind}",
            fix="leave it out, or change the others",
        )


def _nobody_to_ask(missing: list[Question]) -> ConfigurationError:
    flags = " ".join(f"{q.flag} …" for q in missing)
    return ConfigurationError(
        f"There is no terminal to ask on, and no answer to: {'; '.join(q.text for q in missing)}",
        expected=f"the flags {flags}",
        fix="give them, or take the defaults of all of them with --yes",
    )


#: Whatever may be made.
NAMES = (RECIPE, SCHEMA_FILE, CLUSTER, SWEEP, ".gitignore", "README.md")


def refuse_what_is_there(folder: Path) -> None:
    """Nothing is ever overwritten.

    Raises
    ------
    ConfigurationError
        The folder is none, or has a file of a name that is going to be made.
    """
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


def make_folder(folder: Path, files: Mapping[str, str]) -> Plan:
    """Write the files beside their place, plan the recipe, then put them there.

    Raises
    ------
    RefinerError
        The recipe cannot be planned, or the folder not be written; then nothing is left.
    """
    refuse_what_is_there(folder)
    nearest = next(p for p in (folder, *folder.parents) if p.is_dir())
    if not os.access(nearest, os.W_OK):
        raise ConfigurationError(
            f"{nearest} cannot be written.",
            expected="a place where a folder can be made",
            fix="name another one: `refiner init FOLDER`",
        )
    with no_space_guard(nearest, "making the folder"), _scratch(nearest) as scratch:
        for name, text in files.items():
            (scratch / name).write_text(text, encoding="utf-8")
        plan = _planned(scratch, files)
        _put(scratch, folder, files)
    return plan


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=".refiner-init-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


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


def _put(scratch: Path, folder: Path, files: Mapping[str, str]) -> None:
    """One by one, each only where nothing is; what was put is taken away again if one fails."""
    made_folders = [p for p in (folder, *folder.parents) if not p.exists()]
    put: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            with (folder / name).open("x", encoding="utf-8") as file:
                put.append(folder / name)
                file.write((scratch / name).read_text(encoding="utf-8"))
    except BaseException:
        for path in put:
            path.unlink(missing_ok=True)
        for path in made_folders:
            with contextlib.suppress(OSError):  # somebody else has put something there
                path.rmdir()
        raise
