"""One attempt of an agent as a row; tasks and failures out of rows.

In: what an episode has left. Out: rows of a samples file (one per attempt), the numbers of whole
tasks in them, and what ``results.json`` says of episodes beside its numbers::

    episodes   {DECODING or do_nothing: {"attempts": asked of each task,
                "domains": {DOMAIN: {"tasks", "asked", "passed", "errors": {KIND: n},
                                     "failures": {CLASS: n}}},
                "tasks": {DOMAIN/TASK: [passed, valid]}}}
    users      {"evaluation", "training": {"model", …}, "same"}

asked = passed + errors + failures, per domain. Errors are of the infrastructure: such an attempt
has no value but ``episode_error``. A turn that is no tool call ends an attempt as a failure, with
reward 0 as in training, whatever was done before it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from refiner_core.contract.config import RecipeConfig, UserConfig
from refiner_core.contract.types import Completion, GenerationRequest, OnCompletion, SamplingParams
from refiner_core.environments.protocol import (
    FAILURES,
    Environment,
    EpisodeRecord,
    ToolCall,
    domain_of_id,
    record_from_json,
)
from refiner_core.environments.registry import user_of
from refiner_core.environments.turns import call_text
from refiner_core.evaluation.metric_names import FAILURE, base_of, domain_of, task_passes
from refiner_core.evaluation.metrics import EPISODE_METRICS, FAILURE_METRICS, episode_metrics

#: Columns of text of a samples file of episodes, beside those of every samples file. ``episode`` is
#: the JSON of its record.
TEXTS = ("domain", "failure", "error_kind", "episode")


def attempt_row(sample_id: str, index: int, completion: Completion) -> dict[str, Any]:
    """A finished attempt as a row, without what is told of whole tasks.

    Parameters
    ----------
    sample_id
        ``DOMAIN/TASK``.
    index
        Which attempt at the task, from 0.
    completion
        Of an episode.
    """
    assert completion.episode is not None, "an attempt is an episode"
    record = record_from_json(completion.episode)
    own = len(completion.token_ids) if completion.own is None else sum(completion.own)
    failure = failure_of(record)
    return {
        "sample_id": sample_id,
        "sample_index": index,
        "response_text": transcript_text(record),
        "finish_reason": "stop" if record.ended == "done" else record.ended,
        "status": record.status,
        **_numbers(record, failure, own),
        "judgements": json.dumps([_judged(check) for check in record.checks], ensure_ascii=False),
        "domain": record.domain,
        "failure": failure,
        "error_kind": record.error_kind if record.status == "error" else "",
        "episode": json.dumps(completion.episode, ensure_ascii=False),
    }


def failure_of(record: EpisodeRecord) -> str:
    """Reason why an attempt failed; empty for a success, which the reward alone decides, as in
    training, and for an error of the infrastructure. An environment that gives no reason has left
    it ``incomplete``."""
    if record.status == "error":
        return ""
    if record.ended == "no_call":
        return "no_call"
    return "" if record.success else record.failure or "incomplete"


def _numbers(record: EpisodeRecord, failure: str, own_tokens: int) -> dict[str, float | None]:
    """Every metric of an attempt; only ``episode_error`` has a value where it is one."""
    none = dict.fromkeys((*EPISODE_METRICS, *FAILURE_METRICS))
    if record.status == "error":
        return {**none, "episode_error": 1.0}
    return {
        "success": float(not failure),
        "reward": 0.0 if record.ended == "no_call" else record.reward,
        "partial": record.partial,
        "turns": float(len(record.turns)),
        "length_tokens": float(own_tokens),
        "repairs": float(sum(turn.tried_again for turn in record.turns)),
        "tool_errors": float(sum(bool(turn.tool_error) for turn in record.turns)),
        "episode_error": 0.0,
        **{f"{FAILURE}{name}": float(name == failure) for name in FAILURES},
    }


def _judged(check: Mapping[str, Any]) -> dict[str, Any]:
    """A check in the form of a judgement, for whoever reads those."""
    return {
        "kind": "check",
        "title": f"{check['kind']}: {check['name']}",
        "score": float(check["passed"]),
        "detail": check.get("detail", ""),
    }


def transcript_text(record: EpisodeRecord) -> str:
    """An episode as text: who said what, in order. Every line of a message is kept."""
    parts = [f"[{role}]\n{content}" for role, content in record.first_messages]
    for turn in record.turns:
        if turn.repaired is not None:
            parts.append(f"[agent, no call]\n{turn.repaired}")
        parts.append(f"[agent]\n{turn.text}")
        parts += [f"[{role}]\n{content}" for role, content in turn.messages]
    return "\n".join(parts)


# ---------------------------------------------------------------- whole tasks


def with_tasks(
    rows: Sequence[dict[str, Any]], attempts: int, domains: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows, all of a task next to each other in the order of attempts, with the numbers of tasks in
    the first row of each, and both with their domain's name in the rows of that domain."""
    metrics = episode_metrics(attempts, domains)
    passes = {first: task_passes(found, attempts) for first, found in _tasks(rows)}
    made = []
    for place, row in enumerate(rows):
        known = {**row, **passes.get(place, {})}
        own = {
            metric: known.get(base_of(metric))
            for metric in metrics
            if domain_of(metric) in ("", row["domain"])
        }
        made.append({**row, **dict.fromkeys(metrics), **own})
    return made


def _tasks(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[int, list[bool | None]]]:
    """Of each task the place of its first row, and which of its attempts succeeded."""
    found: dict[str, tuple[int, list[bool | None]]] = {}
    for place, row in enumerate(rows):
        success = row["success"]
        _, succeeded = found.setdefault(str(row["sample_id"]), (place, []))
        succeeded.append(None if success is None else bool(success))
    return found.values()


def episodes_told(
    rows: Sequence[Mapping[str, Any]], attempts: int, domains: Sequence[str]
) -> dict[str, Any]:
    """Counts of attempts; see the module."""
    told: dict[str, Any] = {}
    for domain in domains:
        mine = [row for row in rows if row["domain"] == domain]
        failures = Counter(row["failure"] for row in mine if row["failure"])
        told[domain] = {
            "tasks": len({row["sample_id"] for row in mine}),
            "asked": len(mine),
            "passed": sum(row["success"] == 1.0 for row in mine),
            "errors": dict(Counter(row["error_kind"] for row in mine if row["status"] == "error")),
            "failures": {name: failures[name] for name in FAILURES if failures[name]},
        }
    tasks: dict[str, list[int]] = {}
    for row in rows:
        counts = tasks.setdefault(str(row["sample_id"]), [0, 0])
        counts[0] += row["success"] == 1.0
        counts[1] += row["status"] != "error"
    return {"attempts": attempts, "domains": told, "tasks": tasks}


def domains_of(sample_ids: Iterable[str]) -> tuple[str, ...]:
    """The domains of tasks, in their order."""
    return tuple(dict.fromkeys(domain_of_id(one) for one in sample_ids))


def users_told(config: RecipeConfig) -> dict[str, Any]:
    """With whom an agent talks in evaluation and in training, and whether they are the same."""
    users = {
        "evaluation": _user(user_of(config, evaluation=True)),
        "training": _user(user_of(config, evaluation=False)),
    }
    return {**users, "same": users["evaluation"] == users["training"]}


def _user(user: UserConfig) -> dict[str, Any]:
    """What decides what a user says; nothing of where it is asked."""
    if not user.model:
        return {"model": ""}
    values = asdict(user)
    return {name: values[name] for name in ("model", "temperature", "max_tokens")}


DO_NOTHING = "do_nothing"
_GOODBYE = "Goodbye."


class DoNothing:
    """Samples nothing: every turn is the call that ends an episode of a domain."""

    def __init__(self, environment: Environment, domain: str, tokenizer: Any) -> None:
        text = call_text(ending_call(environment, domain))
        self._ids = tuple(int(i) for i in tokenizer.encode(text, add_special_tokens=False))

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """The call, as often as it is asked for; as of a model that is sure of it."""
        made = Completion(self._ids, (0.0,) * len(self._ids), "stop")
        for index in range(len(requests)):
            if on_completion is not None:
                on_completion(index, made)
        return [made] * len(requests)


def ending_call(environment: Environment, domain: str) -> ToolCall:
    """The call that ends an episode, with a text for each argument that its schema asks for."""
    name = environment.finish or environment.speak
    text = "" if environment.finish else _GOODBYE
    schema = next((t.parameters for t in environment.tools(domain) if t.name == name), {})
    return ToolCall(name, dict.fromkeys(schema.get("required") or (), text))
