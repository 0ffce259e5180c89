"""Records of episodes to a results file that tau2-bench's own tools read.

In: episode records of one domain, in order. Out: one JSON file in the form of its ``Results``:
``info`` (user, agent, domain, limits), ``tasks``, and ``simulations`` with their messages, reward
and end. A trial is the number of a record among those of its task.

An episode that the infrastructure ended is there with ``infrastructure_error`` and without a
reward, as tau2-bench itself writes it (its metrics leave such runs out and count them); for a
version that does not know the word it is left out. No address and no key is written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from refiner_core.contract.files import replacing
from refiner_core.environments.record import EpisodeRecord, TurnRecord

INFRASTRUCTURE_ERROR = "infrastructure_error"
#: An agent that broke the form of a conversation.
AGENT_ERROR = "agent_error"


@dataclass(frozen=True)
class ResultsFacts:
    """What a file says beside its episodes. ``tasks`` are its own tasks as JSON, by the ids of the
    records; ``describe`` is :meth:`Environment.describe`; ``reasons`` are the ways to end that the
    installed version knows; ``agent`` names the model."""

    domain: str
    policy: str
    tasks: Mapping[str, Mapping[str, Any]]
    describe: Mapping[str, Any]
    reasons: Sequence[str]
    agent: str = ""


def write_tau2_results(path: Path, records: Sequence[EpisodeRecord], facts: ResultsFacts) -> Path:
    """Write the file, whole or not at all; its path."""
    simulations, trials = [], Counter[str]()
    for record in records:
        trial = trials[record.task_id]
        trials[record.task_id] += 1
        simulation = _simulation(record, trial, facts)
        if simulation is not None:
            simulations.append(simulation)
    values = {
        "timestamp": datetime.now(tz=UTC).isoformat(),
        "info": _info(facts, max(trials.values(), default=0)),
        "tasks": [dict(task) for task in facts.tasks.values()],
        "simulations": simulations,
    }
    with replacing(path) as file:
        file.write(json.dumps(values, ensure_ascii=False, indent=2).encode())
    return path


def _info(facts: ResultsFacts, trials: int) -> dict[str, Any]:
    user = facts.describe["user"]
    return {
        "git_commit": "unknown",
        "num_trials": trials,
        "max_steps": facts.describe["max_steps"],
        "max_errors": facts.describe["max_errors"],
        "user_info": {
            "implementation": "user_simulator",
            "llm": user["model"],
            "llm_args": {key: user[key] for key in ("temperature", "max_tokens")},
        },
        "agent_info": {"implementation": "refiner", "llm": facts.agent or None, "llm_args": {}},
        "environment_info": {"domain_name": facts.domain, "policy": facts.policy},
    }


def _simulation(record: EpisodeRecord, trial: int, facts: ResultsFacts) -> dict[str, Any] | None:
    task = facts.tasks[record.task_id.rpartition("/")[2]]
    if record.status == "error":
        if INFRASTRUCTURE_ERROR not in facts.reasons:
            return None
        return _broken(record, trial, str(task["id"]))
    told = record.info
    simulation = dict(told["simulation"])
    if record.ended == "no_call" and AGENT_ERROR in facts.reasons:
        simulation["termination_reason"] = AGENT_ERROR
    return {
        **simulation,
        "task_id": str(task["id"]),
        "trial": trial,
        "reward_info": told["reward_info"],
        "info": {"excluded": list(record.excluded), "failure": record.failure},
    }


def _broken(record: EpisodeRecord, trial: int, own_id: str) -> dict[str, Any]:
    """A run without an end, with as much of its conversation as the agent has seen."""
    now = datetime.now(tz=UTC).isoformat()
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": text} for role, text in record.first_messages if role == "user"
    ]
    for number, turn in enumerate(record.turns):
        messages += _messages(turn, f"call_{number + 1}")
    return {
        "id": f"error-{own_id}-{trial}-{record.seed}",
        "task_id": own_id,
        "trial": trial,
        "seed": record.seed,
        "start_time": now,
        "end_time": now,
        "duration": sum(turn.seconds for turn in record.turns),
        "termination_reason": INFRASTRUCTURE_ERROR,
        "reward_info": None,
        "messages": messages,
        "info": {"error_kind": record.error_kind, "error": record.error},
    }


def _messages(turn: TurnRecord, call_id: str) -> list[dict[str, Any]]:
    if turn.call is None:
        return []
    name, arguments = str(turn.call["name"]), dict(turn.call["arguments"])
    said = arguments.get("content") if name == "respond" else None
    own: dict[str, Any] = {"role": "assistant"}
    if said is None:
        call = {"id": call_id, "name": name, "arguments": arguments, "requestor": "assistant"}
        own["tool_calls"] = [call]
    else:
        own["content"] = said if isinstance(said, str) else json.dumps(said)
    answers = [
        {"role": "tool", "id": call_id, "content": text, "error": bool(turn.tool_error)}
        if role == "tool"
        else {"role": "user", "content": text}
        for role, text in turn.messages
    ]
    return [own, *answers]
