"""The files of a folder that `refiner init` makes, as texts.

In: answers and the recipe drafted from them. Out: file name -> text.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.starting.questions import Asked
from flows.starting.settings import Draft, metric_of, sweep_factors
from refiner_core.contract.overrides import override_text
from refiner_core.contract.schema import EDITOR_LINE, SCHEMA_FILE, recipe_schema

RECIPE, CLUSTER, SWEEP = "recipe.yaml", "cluster.yaml", "sweep.yaml"
_COMMENT = 62


def file_texts(draft: Draft, asked: Asked) -> dict[str, str]:
    """All files, by name."""
    files = {RECIPE: recipe_text(draft)}
    if asked["where"] == "slurm":
        files[CLUSTER] = _cluster_text(asked)
    if asked["sweep"] == "yes":
        files[SWEEP] = _sweep_text(asked)
    files[SCHEMA_FILE] = json.dumps(recipe_schema(), indent=1) + "\n"
    files[".gitignore"] = "/runs/\n*.log\n"
    files["README.md"] = _readme_text(draft, asked, files)
    return files


def recipe_text(draft: Draft) -> str:
    """The recipe, with a comment on each line."""
    lines = [
        EDITOR_LINE,
        f"# What differs from the shipped recipe {draft.include}; all else is as there. For any",
        "# field, what it is, which stages it concerns, its value here and where that comes from:",
        "#   refiner show FIELD recipe.yaml",
        f"include: {draft.include}",
    ]
    nested: dict[str, Any] = {}
    for path, (value, why) in draft.fields.items():
        *sections, leaf = path.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = (path, value, why)
    written = list(_written(nested, ""))
    width = min(max((len(text) for text, _ in written), default=0), 44)
    lines += [f"{text:<{width}}  # {said}" if said else text for text, said in written]
    return "\n".join(lines) + "\n"


def _written(nested: Mapping[str, Any], indent: str) -> Iterator[tuple[str, str]]:
    """Lines with their comments; single fields before sections."""
    for key, value in sorted(nested.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            yield f"{indent}{key}:", ""
            yield from _written(value, f"{indent}  ")
            continue
        path, what, why = value
        said = textwrap.shorten(why.partition(";")[0], _COMMENT, placeholder=" …")
        yield f"{indent}{key}: {_yaml(path, what)}", f"{said} (refiner show {path})"


def _yaml(path: str, value: Any) -> str:
    return override_text(path, value).partition("=")[2]


def _cluster_text(asked: Asked) -> str:
    partition = asked.around.partition(asked["partition"])
    lines = [
        "# How your cluster wants to be asked for what stages need; recipes name this file in",
        "# dispatch.profile. All it may say: infra/README.md, and `refiner profiles`.",
        f"description: made for {asked.folder.name} by refiner init",
        _line("partition", asked["partition"], "none is the cluster's default"),
        _line("account", asked["account"], "none is your default"),
    ]
    if partition and partition.gpus:
        lines.append(f"max_gpus: {partition.gpus}    # of one node: more is refused when planning")
    if partition and partition.gpu_type:
        lines.append(f"# gpu_type: {partition.gpu_type}    # asks for GPUs of that type only")
    if partition and partition.max_time_min:
        lines.append(f"max_time_min: {partition.max_time_min}    # the partition's time limit")
    on_cpu = asked.tiny or asked["gpus"] == "0"
    where = "slurm" if on_cpu else "local"
    lines += [
        f"cpu_stages: {where}    # stages without GPUs: jobs too (slurm), or where refiner runs",
        "network: false    # whether compute nodes reach the internet",
        "# modules: [cuda/12.8]    # loaded before a stage starts",
        "# gpu_option: gres    # if GPUs are asked for by --gres=gpu:N",
    ]
    return "\n".join(lines) + "\n"


def _line(key: str, value: str, otherwise: str) -> str:
    text = override_text(key, value).partition("=")[2]
    return f"{key}: {text}" if value else f"# {key}:    # {otherwise}"


def _sweep_text(asked: Asked) -> str:
    path, levels, question = sweep_factors(asked)
    stages = ["data", *(["sft"] if asked["sft"] != "none" else []), "grpo", "evaluate"]
    if asked["task"] == "agent":
        stages.insert(-2, "rft")
    labelled = ", ".join(f"{label}: {value}" for label, value in levels.items())
    return "\n".join(
        [
            "# An ablation over recipe.yaml: every level with every seed, all else alike. What it",
            "# would take and can show, before anything runs:  refiner sweep sweep.yaml --dry-run",
            f"name: {_sweep_name(asked)}",
            f"recipe: {RECIPE}",
            "overrides:",
            f"  stages: [{', '.join(stages)}]    # arms publish nothing",
            "  evaluate.models: [grpo]",
            "factors:",
            f"  {path}: {{{labelled}}}    # refiner show {path}",
            "seeds: 3",
            "question:",
            f"  text: {question}",
            f"  metric: {metric_of(asked)}",
            "  decoding: sampled",
            "  smallest_effect: 0.05    # what would matter to you; says how many seeds it takes",
        ]
    ) + "\n"  # fmt: skip


def _sweep_name(asked: Asked) -> str:
    name = "".join(c if c.isalnum() else "-" for c in asked.folder.name.lower()).strip("-")
    return f"{name or 'mine'}-sweep"


def _readme_text(draft: Draft, asked: Asked, files: Mapping[str, str]) -> str:
    recipe, _ = draft.fields["recipe"]
    workspace = asked["workspace"]
    apart = [] if Path(workspace) == asked.folder / "runs" else [f"workspace={workspace}"]
    where = shlex.join(apart)
    training = "grpo" if asked.of_refiner or asked["task"] == "agent" else "command"
    commands = {
        f"refiner doctor {RECIPE}": "does this machine have what it needs?",
        f"refiner plan {RECIPE}": "which stages would run, and why; changes nothing",
        f"refiner plan {RECIPE} seed=2": "any field can be set for one call",
        f"refiner run {RECIPE}": "do it; the same command goes on after any interruption",
        f"refiner status {where}".rstrip(): "how it stands",
        f"refiner report {where}".rstrip(): "a page about it",
        f"refiner show {training} {RECIPE}": "what fields mean, their values, where they come from",
    }
    width = max(map(len, commands))
    lines = [
        f"# {recipe}",
        "",
        f"`{RECIPE}` is the shipped recipe `{draft.include}` with what differs. In this folder:",
        "",
        "```bash",
        *(f"{command:<{width}}  # {said}" for command, said in commands.items()),
        "```",
        "",
    ]
    if CLUSTER in files:
        lines += [f"`{CLUSTER}` says how the cluster wants to be asked; jobs go there.", ""]
    if SWEEP in files:
        lines += [f"`{SWEEP}` is an ablation: `refiner sweep {SWEEP} --dry-run`.", ""]
    if asked["judge"] == "vllm" or (int(asked["gpus"] or 0) > 1 and asked["sft"]):
        lines += [
            "vLLM lives in an environment of its own: say which in `grpo.rollout_server.python` or",
            "`.setup`, of a judge in `judge.serve.python` or `.setup`; `refiner doctor` looks.",
            "",
        ]
    if asked["task"] == "command":
        lines += ["Your script trains; see `refiner show command`.", ""]
    return "\n".join(lines)
