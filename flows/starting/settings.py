"""From answers to what a recipe of one's own says beyond the shipped one that it includes.

In: the answers to all questions. Out: :class:`Draft`: the shipped recipe to include, and fields
with their values, each with the reason why it is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from flows.starting.questions import SYNTHETIC, TAU2, Asked
from flows.starting.rows import look_at_rows
from refiner_core.contract.fields import field_info
from refiner_core.contract.kinds import TRAINED_HERE, kinds_of
from refiner_core.contract.loading import load_recipe

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
    draft.fields["recipe"] = (_named(asked.folder.name), "its name in tables, runs and cards")
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


def _named(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "mine"


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
    """What each stage asks for, and how it trains on so many GPUs."""
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
    """What the ablation that goes along varies: field, levels by label, and the question."""
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
    """What the ablation is decided by."""
    if asked["task"] == "agent":
        return "success"
    return "oracle" if asked["rl"] == SYNTHETIC and asked.tiny else "rubric_score"
