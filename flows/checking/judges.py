"""Notes on judges and rewards before a run: judges that reason before they answer (a score takes a
few tokens, their reasoning thousands, so that every judgement would end by length), and attacks on
the reward that pay.

In: a recipe's configuration. Out: notes for people. Whether a judge reasons is decided by its chat
template, where the model is a folder or in the Hub client's cache; else by the model's name.
Attacks are those that the workspace keeps. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.checking.models import ModelFiles, model_files
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.fingerprint import digest, identity_values
from refiner_core.contract.protocols import all_under
from refiner_core.contract.services import asks_judge
from refiner_core.contract.types import WITHOUT_REASONING

#: Limit of tokens that leaves enough for reasoning.
_ENOUGH_TOKENS = 4096
#: Families that reason unless they are asked not to.
_REASONS = re.compile(
    r"qwen3(?!.*(instruct|coder|base|embedding|reranker))|qwq|deepseek-r1|gpt-oss|magistral|"
    r"glm-(4\.[5-9]|[5-9])|minimax-m|seed-oss|smollm3|thinking|reasoning",
    re.IGNORECASE,
)
#: Arguments of chat templates that switch reasoning.
_SWITCHES = ("enable_thinking", "thinking")


def judge_notes(config: RecipeConfig) -> list[str]:
    """A note for each judge of a recipe and its protocols that reasons first and may not."""
    asked = {
        (under.judge.model, under.judge.extra_body): under.judge
        for under in (config, *all_under(config).values())
        if asks_judge(under)
    }
    return [
        f"{judge.model} (judge.model) reasons before it answers, and judge.max_tokens="
        f"{judge.max_tokens} ends its replies before the score: {WITHOUT_REASONING}."
        for judge in asked.values()
        if _is_cut(judge)
    ]


def _is_cut(judge: JudgeConfig) -> bool:
    if judge.kind != "openai" or judge.max_tokens >= _ENOUGH_TOKENS:
        return False
    body = json.loads(judge.extra_body or "{}")
    if "reasoning_effort" in body or "reasoning" in body:
        return False
    given = body.get("chat_template_kwargs") or {}
    files = model_files(judge.model, judge.revision or "main")
    found = None if files is None else _template_reasons(files, given)
    if found is not None:
        return found
    off = any(given.get(name) is False for name in _SWITCHES) or "reasoning_effort" in given
    return reasons_by_name(judge.model) and not off


def reasons_by_name(model: str) -> bool:
    """Tell whether a model is of a family that reasons unless it is asked not to."""
    return bool(_REASONS.search(model))


def _template_reasons(files: ModelFiles, given: Mapping[str, Any]) -> bool | None:
    """Tell whether a prompt of the model's chat template invites reasoning; None without a
    readable template.

    It does if it opens the reasoning itself, or if a switch would change it, which is not off.
    """
    template = _template_of(files)
    prompt = None if template is None else _prompt(template, given)
    if template is None or prompt is None:
        return None
    if prompt.rpartition("<think>")[1] and "</think>" not in prompt.rpartition("<think>")[2]:
        return True
    for name in _SWITCHES:
        on, off = (_prompt(template, {**given, name: value}) for value in (True, False))
        if prompt == on != off:
            return True
    return False


def _template_of(files: ModelFiles) -> str | None:
    path = files.folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    found = files.json("tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else None


def _prompt(template: str, arguments: Mapping[str, Any]) -> str | None:
    """The prompt for a question, as servers render it; None if the template cannot be rendered."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    rendering = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    messages = [{"role": role, "content": "question"} for role in ("system", "user")]
    values = {"messages": messages, "tools": None, "add_generation_prompt": True, **arguments}
    try:
        return rendering.from_string(template).render(values)
    except (jinja2.TemplateError, TypeError, ValueError):
        return None


# ---------------------------------------------------------------- attacks on the reward


def attacks_file(config: RecipeConfig) -> Path:
    """File of the attacks on a recipe's reward, as its judge scores it."""
    name = digest(identity_values(config, ("reward", "judge")))[:12]
    return Workspace.read_only(config.workspace).layout.attacks / f"{name}.json"


def attack_notes(config: RecipeConfig) -> list[str]:
    """A note on attacks that pay; none if the reward was not attacked, or none of them pays."""
    if config.environment.name or not {"grpo", "sample"} & {*config.stages}:
        return []
    found = atomic.read_json(attacks_file(config))
    paid = [one["name"] for one in found["attacks"] if one["pays"]] if found else []
    if not found or not paid:
        return []
    rows = found["honest"]["n"]
    return [
        f"{len(paid)} of {len(found['attacks'])} attacks on this reward pay ({', '.join(paid)}; "
        f"{rows} rows): training may find them. The fields reward.penalties.* set prices, and "
        "refiner reward attack shows what they close."
    ]
