"""A new folder from flags: all of its files or none, if its recipe can be planned.

In: values of flags, and the folder. Out: :class:`InitFolder`: the files, and the plan of the
recipe. Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flows.checking.models import reasons_by_name
from flows.running.calls import make_recipe_plan
from flows.starting.flags import OF_REFINER, TAU2, TINY, all_answers, inspect_rows
from infra.store.atomic import no_space_guard
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.field_facts import EDITOR_LINE, SCHEMA_FILE, recipe_schema
from refiner_core.contract.loading import load_recipe, override_text
from refiner_core.contract.plan import Plan
from refiner_core.data.sources import SYNTHETIC

RECIPE, CLUSTER = "recipe.yaml", "cluster.yaml"
#: All files that can be made.
NAMES = (RECIPE, SCHEMA_FILE, CLUSTER, ".gitignore", "README.md")


class InitFolder(NamedTuple):
    """A new folder: its plan, and its files by name."""

    folder: Path
    plan: Plan
    files: dict[str, str]


def init_folder(folder: str | Path = ".", answers: Mapping[str, str] | None = None) -> InitFolder:
    """Make a folder with a new recipe, ready to plan. Nothing is overwritten.

    Parameters
    ----------
    folder
        The folder; it may exist and be empty.
    answers
        Values by the long flags of `refiner init`; others have their defaults.

    Returns
    -------
    InitFolder
        The new folder.

    Raises
    ------
    RefinerError
        A value is invalid, a file exists already, or the recipe could not be planned: nothing was
        made.
    """
    place = Path(folder).expanduser().absolute().resolve()
    there = [name for name in NAMES if os.path.lexists(place / name)]
    if there or (place.exists() and not place.is_dir()):
        said = f"has {', '.join(there)} already; nothing is overwritten" if there else "is a file"
        raise ConfigurationError(
            f"{place} {said}.",
            expected="a folder without them, or a name for a new one",
            fix="name a new folder, e.g. `refiner init my-run`",
        )
    files = _file_texts(place, *all_answers(answers or {}, place))
    return InitFolder(place, _make_folder(place, files), files)


def _file_texts(
    folder: Path, answers: Mapping[str, str], partitions: Mapping[str, int]
) -> dict[str, str]:
    """All files, by name, from the templates beside this module."""
    task, tiny, gpus = answers["task"], answers["base"] == TINY, int(answers["gpus"] or 0)
    training = ["grpo"] if answers["sft"] == "none" else ["sft", "grpo"]
    include = "tiny" if tiny else "refiner-gpt54"
    if task == "agent":
        include = "tiny-tools" if tiny else TAU2
        training.insert(-1, "rft")
    elif task == "command":
        include = "own-trainer"
    stages = ["data", *training, "publish", "evaluate"]
    if task == "evaluate":
        stages, training = ["data", "evaluate"], []
    shipped, of_refiner = load_recipe(include), task in OF_REFINER
    sft_path, sft_revision = inspect_rows(answers["sft"], "sft", parse=of_refiner)
    rl_path, rl_revision = inspect_rows(answers["rl"], "rl", parse=True)
    base, revision = _whole(answers["base"]), ""
    if base == answers["base"]:
        base, _, revision = base.partition("@")
    workspace = str(Path(answers["workspace"]).expanduser().absolute())
    apart = f" {shlex.quote(f'workspace={workspace}')}"
    values = {
        **{name.replace("-", "_"): value for name, value in answers.items()},
        **{"include": include, "editor_line": EDITOR_LINE, "synthetic": SYNTHETIC, "tiny": tiny},
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.name).strip("-.") or "mine",
        **{"folder": folder.name, "base": base, "revision": revision or "main", "gpus": gpus},
        "environment": _whole(answers["environment"]),
        "rubrics": _whole(answers["rubrics"]),
        "judge": answers["judge"].rstrip("/"),
        "reasons": reasons_by_name(answers["judge-model"]),
        **{"workspace": workspace, "apart": apart * (workspace != str(folder / "runs"))},
        **{"stages": stages, "models": ["base", *training]},
        "sized": not tiny and task != "command",
        "packs": {
            stage: max(getattr(getattr(shipped, stage), "gradient_accumulation_steps", 0), gpus)
            for stage in (*training, *["sample"] * (task == "agent"))
        },
        "longer": tiny and of_refiner and bool({rl_path, sft_path} - {None, SYNTHETIC}),
        **{"sft_path": sft_path, "sft_revision": sft_revision},
        **{"rl_path": rl_path, "rl_revision": rl_revision},
        "max_gpus": partitions.get(answers["partition"], 0),
    }
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["yaml"] = lambda value: override_text("", value).removeprefix("=")
    rendered = [RECIPE, *[CLUSTER] * (answers["where"] == "slurm")]
    files = {n: templates.get_template(f"{n}.jinja").render(values) for n in rendered}
    files[SCHEMA_FILE] = json.dumps(recipe_schema(), indent=1) + "\n"
    files[".gitignore"] = "/runs/\n*.log\n"
    files["README.md"] = templates.get_template("README.md.jinja").render(values)
    return files


def _whole(answer: str) -> str:
    """The answer; for an existing file (also ``FILE:NAME``) its absolute path."""
    file, colon, name = answer.rpartition(":") if ".py:" in answer else (answer, "", "")
    path = Path(file).expanduser()
    return f"{path.resolve()}{colon}{name}" if answer and path.exists() else answer


def _make_folder(folder: Path, files: Mapping[str, str]) -> Plan:
    """Write the files to a scratch folder, plan the recipe, then move them into place."""
    nearest = next(p for p in (folder, *folder.parents) if p.is_dir())
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
    """Plan of the new recipe; everything in it must work."""
    plan = make_recipe_plan(str(scratch / RECIPE))
    if CLUSTER in files:
        from infra.slurm.profiles import load_profile

        profile = load_profile(str(scratch / CLUSTER))
        for stage in plan.stages:
            if profile.executor_for(stage) == "slurm":
                profile.check(stage.resources, stage.name, needs_network=stage.needs_network)
    return plan
