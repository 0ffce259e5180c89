"""A folder of one's own from answers: all of its files or none, if its recipe can be planned.

In: what was typed, and the folder's place. Out: :class:`Begun`: the files, and the plan of the
recipe among them. Ctrl-C leaves nothing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flows.running.calls import make_recipe_plan
from flows.starting.questions import QUESTIONS, TAU2, Asked, Question, look_around, look_at_rows
from infra.store.atomic import no_space_guard
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.field_facts import EDITOR_LINE, SCHEMA_FILE, recipe_schema
from refiner_core.contract.loading import load_recipe, override_text
from refiner_core.contract.plan import Plan
from refiner_core.data.sources import SYNTHETIC

RECIPE, CLUSTER, SWEEP = "recipe.yaml", "cluster.yaml", "sweep.yaml"
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
    files = file_texts(asked)
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
            answer = question.check(given[question.name], asked)
        elif take_defaults or ask is None:
            answer = question.proposal(asked)
            if not take_defaults:
                missing.append(question)
        else:
            answer = ask(question, asked)
        asked = replace(asked, answers={**asked.answers, question.name: answer})
    # A flag that nothing comes of is a mistake.
    if idle := [f"--{name}" for name in given if name not in asked.answers]:
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
            expected=f"the flags {' '.join(f'--{q.name} …' for q in missing)}",
            fix="give them, or take the defaults of all of them with --yes",
        )
    return asked


# ---------------------------------------------------------------- its files


def file_texts(asked: Asked) -> dict[str, str]:
    """All files, by name, from the templates that lie beside this module."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["yaml"] = lambda value: override_text("", value).removeprefix("=")
    values = _values(asked)
    made = {
        RECIPE: True,
        CLUSTER: asked["where"] == "slurm",
        SWEEP: asked["sweep"].startswith("y"),
    }
    files = {
        name: templates.get_template(f"{name}.jinja").render(values)
        for name, is_made in made.items()
        if is_made
    }
    files[SCHEMA_FILE] = json.dumps(recipe_schema(), indent=1) + "\n"
    files[".gitignore"] = "/runs/\n*.log\n"
    files["README.md"] = templates.get_template("README.md.jinja").render(values)
    return files


def _values(asked: Asked) -> dict[str, Any]:
    """All that the templates go by."""
    task, tiny, gpus = asked["task"], asked.tiny, int(asked["gpus"] or 0)
    training = ["grpo"] if asked["sft"] == "none" else ["sft", "grpo"]
    if task == "agent":
        training.insert(-1, "rft")
    stages = ["data", *training, "publish", "evaluate"]
    if task == "evaluate":
        stages, training = ["data", "evaluate"], []
    include = {
        "command": "own-trainer",
        "agent": "tiny-tools" if tiny else TAU2,
    }.get(task, "tiny" if tiny else "refiner-gpt54")
    shipped = load_recipe(include)
    sft_path, sft_revision = look_at_rows(
        asked["sft"] or "none", "sft", of_refiner=asked.of_refiner
    )
    rl_path, rl_revision = look_at_rows(asked["rl"] or "none", "rl")
    base, revision = _whole(asked["base"]), ""
    if base == asked["base"]:
        base, _, revision = base.partition("@")
    workspace = str(Path(asked["workspace"]).expanduser().absolute())
    apart = f" {shlex.quote(f'workspace={workspace}')}"
    own = {rl_path, sft_path} - {None, SYNTHETIC}
    return {
        **{q.name.replace("-", "_"): asked[q.name] for q in QUESTIONS},
        **{"include": include, "editor_line": EDITOR_LINE, "synthetic": SYNTHETIC, "tiny": tiny},
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", asked.folder.name).strip("-.") or "mine",
        "folder": asked.folder.name,
        **{"base": base, "revision": revision or "main", "gpus": gpus},
        "environment": _whole(asked["environment"]),
        "rubrics": asked["rubrics"] and _whole(asked["rubrics"]),
        "judge": asked["judge"].rstrip("/"),
        "workspace": workspace,
        "apart": apart * (workspace != str(asked.folder / "runs")),
        **{"stages": stages, "models": ["base", *training]},
        "sized": not tiny and task != "command",
        "packs": {
            stage: max(getattr(getattr(shipped, stage), "gradient_accumulation_steps", 0), gpus)
            for stage in (*training, *["sample"] * (task == "agent"))
        },
        "longer": tiny and asked.of_refiner and bool(own),
        **{"sft_path": sft_path, "sft_revision": sft_revision},
        **{"rl_path": rl_path, "rl_revision": rl_revision},
        "offers": asked.around.partition(asked["partition"]),
    }


def _whole(answer: str) -> str:
    """The answer; of a file that is there (``FILE:NAME``, too) its whole path."""
    file, colon, name = answer.rpartition(":") if ".py:" in answer else (answer, "", "")
    path = Path(file).expanduser()
    return f"{path.resolve()}{colon}{name}" if answer and path.exists() else answer


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
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            (Path(name) / file).rename(folder / file)
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
