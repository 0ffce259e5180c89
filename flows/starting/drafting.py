"""From answers to the files of a folder that `refiner init` makes.

In: the answers to all questions. Out: :class:`Draft` (the shipped recipe to include, and fields
with their values, each with the reason why it is there), and file name -> text.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.starting.questions import TAU2, Asked, look_at_rows
from refiner_core.contract.field_facts import EDITOR_LINE, SCHEMA_FILE, recipe_schema
from refiner_core.contract.fields import field_info
from refiner_core.contract.kinds import TRAINED_HERE, kinds_of
from refiner_core.contract.loading import load_recipe, override_text
from refiner_core.data.sources import SYNTHETIC

#: Sizes for rows of one's own where the shipped recipe is made for made-up ones.
_OWN_SIZES = {
    "data.max_prompt_token_length": 8192,
    "sft.pack_length": 10240,
    "grpo.response_length": 1024,
    "grpo.max_token_length": 9216,
    "grpo.pack_length": 9216,
}


@dataclass
class Draft:
    """A recipe that is being written."""

    include: str
    fields: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def set(self, path: str, value: Any, why: str = "") -> None:
        """Set a field, unless the included recipe has that value already."""
        included: Any = load_recipe(self.include)
        for part in path.split("."):
            included = getattr(included, part)
        if value == (list(included) if isinstance(included, tuple) else included):
            self.fields.pop(path, None)
            return
        self.fields[path] = (value, why or field_info(path).doc)


def drafted(asked: Asked) -> Draft:
    """The recipe that the answers ask for."""
    draft = Draft(_included(asked))
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", asked.folder.name).strip("-.")
    draft.fields["recipe"] = (name or "mine", "its name in tables, runs and cards")
    draft.fields["description"] = (f"Made from {draft.include}.", "one paragraph for people")
    draft.set("workspace", asked["workspace"], "where runs lie; on a cluster all nodes see it")
    _model(draft, asked)
    _stages(draft, asked)
    if asked["task"] == "agent":
        _environment(draft, asked)
    _rows(draft, asked)
    if asked.of_refiner:
        _reward(draft, asked)
    if asked["task"] == "command":
        draft.set("command.run", asked["run"], "the shell command that trains")
    if not asked.tiny or asked["task"] == "command":
        _sizes(draft, asked, int(asked["gpus"]))
    if asked["publish"] not in ("", "folder"):
        draft.set("publish.target", "hub")
        draft.set("publish.repo_id", asked["publish"], "may use {recipe}, {seed}, {fingerprint}")
    if asked["where"] == "slurm":
        draft.set("dispatch.executor", "slurm", "jobs go to Slurm")
        draft.set("dispatch.profile", "cluster.yaml", "how your cluster wants to be asked")
    return draft


def _included(asked: Asked) -> str:
    if asked["task"] == "command":
        return "own-trainer"
    if asked["task"] == "agent":
        return "tiny-tools" if asked.tiny else TAU2
    return "tiny" if asked.tiny else "refiner-gpt54"


def _model(draft: Draft, asked: Asked) -> None:
    if asked.tiny:
        return
    name, _, revision = asked["base"].partition("@")
    if asked["base"].startswith("/"):
        name, revision = asked["base"], ""
    draft.set("model.name_or_path", name, "the model that it starts from")
    draft.set("model.revision", revision or "main", "pin a commit before you publish numbers")


def _stages(draft: Draft, asked: Asked) -> None:
    if asked["task"] == "command":
        return
    if asked["task"] == "evaluate":
        draft.set("stages", ["data", "evaluate"])
        draft.set("evaluate.models", ["base"], "what is measured: the model itself")
        return
    fine_tunes = asked["sft"] != "none"
    training = [*(["sft"] if fine_tunes else []), "grpo"]
    if asked["task"] == "agent":
        training = ["sft", "rft", "grpo"] if fine_tunes else ["rft", "grpo"]
    draft.set("stages", ["data", *training, "publish", "evaluate"], "what there is to do")
    if not asked.tiny:
        draft.set("evaluate.models", ["base", *training], "models that are measured")


def _environment(draft: Draft, asked: Asked) -> None:
    name = asked["environment"]
    draft.set("environment.name", name)
    if name == TAU2 or asked.tiny:
        return
    draft.set("environment.domains", [], "none is all of them")
    for user in ("environment.user", "evaluate.user"):
        draft.set(f"{user}.model", "", "none: the environment's own user")
        draft.set(f"{user}.base_url", "", "of a user that is a model")
    draft.set("environment.shaping.alpha_by_domain", [])
    draft.set("environment.shaping.weights_by_domain", [])


def _rows(draft: Draft, asked: Asked) -> None:
    if asked["sft"]:
        _demonstrations(draft, asked)
    elif asked["task"] == "evaluate":
        draft.set("data.sft_path", None, "nothing is trained")
    if not asked.of_refiner:
        return
    rows = look_at_rows(asked["rl"], "rl")
    draft.set("data.rl_path", rows.path, "prompts with their rubrics")
    draft.set("data.rl_revision", rows.revision)
    if asked.tiny and (rows.own or asked["sft"] not in ("", "none", SYNTHETIC)):
        for path, value in _OWN_SIZES.items():
            if asked["task"] == "refiner" or path.startswith(("data.", "grpo.")):
                draft.set(path, value)


def _demonstrations(draft: Draft, asked: Asked) -> None:
    rows = look_at_rows(asked["sft"], "sft", of_refiner=asked.of_refiner)
    if asked["task"] == "refiner":
        draft.set("data.sft_path", rows.path, "demonstrations of SFT")
        draft.set("data.sft_revision", rows.revision)
        return
    by_expert = rows.path == SYNTHETIC
    draft.set("data.sft_path", SYNTHETIC if by_expert or not rows.path else rows.path)
    draft.set("data.sft_revision", rows.revision)
    if not by_expert:
        draft.set("environment.demonstrations", 0)
        draft.set("environment.flawed_demonstrations", 0.0)
    elif not asked.tiny:
        draft.set("environment.demonstrations", 1080, "made by the environment's own expert")


def _reward(draft: Draft, asked: Asked) -> None:
    own = asked["rubrics"] == "instance"
    draft.set("reward.rubric_source", "instance" if own else "instance+static")
    if not own:
        draft.set("reward.static_rubrics", asked["rubrics"], "judges every answer, too")
    judge = asked["judge"]
    if judge == "lexical":
        draft.set("judge.kind", "lexical", "word overlap: no server, no meaning")
        draft.set("judge.model", "lexical-1")
        draft.set("judge.revision", None)
        draft.set("judge.serve.engine", "none")
        return
    draft.set("judge.kind", "openai", "any OpenAI-compatible server")
    draft.set("judge.model", asked["judge-model"], "the model that judges")
    if judge == "vllm":
        draft.set("judge.revision", "main", "pin a commit before you publish numbers")
        draft.set("judge.serve.engine", "vllm", "started when it is needed, ended when it is not")
        draft.set("judge.resources.gpus", 2, "of the server")
        return
    draft.set("judge.revision", None)
    draft.set("judge.base_url", judge, "its key: export REFINER_JUDGE_API_KEY")
    draft.set("judge.serve.engine", "none", "a server is there already")


def _sizes(draft: Draft, asked: Asked, gpus: int) -> None:
    """Set what each stage asks for, and how it trains on so many GPUs."""
    if asked["task"] == "command":
        draft.set("command.resources.gpus", gpus)
        return
    if gpus == 0:
        draft.set("model.dtype", "float32", "the CPU's")
    if gpus == 0 or draft.include == "refiner-gpt54":
        draft.set("model.attn_implementation", "sdpa", "flash_attention_2 is quicker, if installed")
    stages, _ = draft.fields.get("stages", (list(load_recipe(draft.include).stages), ""))
    for kind in kinds_of(stages):
        stage = kind.name
        if stage not in TRAINED_HERE and not kind.asks_judge:
            continue
        most = min(gpus, 1) if stage == "evaluate" else gpus
        draft.set(f"{stage}.resources.gpus", most)
        draft.set(f"{stage}.resources.cpus", max(4, 8 * most))
        draft.set(f"{stage}.resources.memory_gb", max(32, 64 * most))
        if stage in TRAINED_HERE:
            zero = 3 if gpus > 1 else None
            draft.set(f"{stage}.deepspeed_stage", zero, "none: plain torch, one process")
        if kind.trains == "demonstrations":
            packs = getattr(load_recipe(draft.include), stage).gradient_accumulation_steps
            why = "packs of a step, spread over the GPUs"
            draft.set(f"{stage}.gradient_accumulation_steps", max(packs, gpus), why)
        if kind.samples_with and gpus < 2:
            draft.set(f"{stage}.generation_backend", "transformers", "no servers beside it")
    if "grpo" in stages and gpus > 1:
        draft.set("grpo.vllm_num_engines", gpus // 2, "half of the GPUs sample")


def sweep_factors(asked: Asked) -> tuple[str, dict[str, Any], str]:
    """Factors of the ablation that goes along: field, levels by label, and the question."""
    if asked["task"] == "agent":
        return (
            "environment.shaping.alpha",
            {"success-alone": 0, "partial-0.25": 0.25, "partial-1": 1},
            "Does partial credit in training make more episodes succeed?",
        )
    return (
        "reward.paper_citation_weight",
        {"citation-0": 0, "citation-0.2": 0.2, "citation-0.5": 0.5},
        "Does the weight of citations in the reward change how good answers are?",
    )


def metric_of(asked: Asked) -> str:
    """Metric that the ablation is decided by."""
    if asked["task"] == "agent":
        return "success"
    return "oracle" if asked["rl"] == SYNTHETIC and asked.tiny else "rubric_score"


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
    return f"{key}: {_yaml(key, value)}" if value else f"# {key}:    # {otherwise}"


def _sweep_text(asked: Asked) -> str:
    path, levels, question = sweep_factors(asked)
    name = "".join(c if c.isalnum() else "-" for c in asked.folder.name.lower()).strip("-")
    stages = ["data", *(["sft"] if asked["sft"] != "none" else []), "grpo", "evaluate"]
    if asked["task"] == "agent":
        stages.insert(-2, "rft")
    labelled = ", ".join(f"{label}: {value}" for label, value in levels.items())
    return "\n".join(
        [
            "# An ablation over recipe.yaml: every level with every seed, all else alike. What it",
            "# would take and can show, before anything runs:  refiner sweep sweep.yaml --dry-run",
            f"name: {name or 'mine'}-sweep",
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
