"""Gets answers: from flags, from a terminal, from defaults.

In: what was typed. Out: :class:`Asked` with an answer to every question that applies. Nothing is
written; Ctrl-C leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flows.starting.questions import QUESTIONS, Asked, Question
from flows.starting.surroundings import Surroundings
from refiner_core.contract.errors import ConfigurationError, RefinerError

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
