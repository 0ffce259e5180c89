"""Agents that play by a script through real episodes.

In: an environment with an expert, and a kind of play for each attempt (``expert``, ``flawed``,
``nothing``, ``words``). Out: a generator that samples exactly that, turn by turn, and desks whose
infrastructure fails for given seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    OnCompletion,
    PromptRow,
    SamplingParams,
)
from refiner_core.data.prepared import write_prompts
from refiner_core.environments.conversation import prompt_ids
from refiner_core.environments.desk import DeskEnvironment
from refiner_core.environments.protocol import (
    InfrastructureError,
    Message,
    Task,
    ToolCall,
    row_of_task,
)
from refiner_core.environments.turns import call_text
from refiner_core.models import tiny_tokenizer

#: (decoding, sample_id, attempt) -> what the attempt is.
Plan = Callable[[str, str, int], str]


def agent_config(**changes: Any) -> RecipeConfig:
    """A recipe of an agent on two of the desk's domains; two underscores are a dot."""
    values = {
        "environment.name": "desk",
        "environment.domains": ["bookings", "orders"],
        "evaluate.num_samples": 4,
        "evaluate.bootstrap_samples": 200,
        "evaluate.seed": 11,
        "grpo.response_length": 256,
        "grpo.max_token_length": 8192,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return replace_fields(RecipeConfig(), values)


class Desk(DeskEnvironment):
    """The desk; attempts whose environment's seed is in ``fails`` meet a user who is down, and
    ``deterministic`` may be taken from it."""

    def __init__(
        self,
        config: RecipeConfig,
        fails: frozenset[int] = frozenset(),
        *,
        deterministic: bool = True,
    ) -> None:
        super().__init__(config.environment, config.environment.user)
        self.fails, self.deterministic = fails, deterministic

    def episode(self, task: Task) -> Any:
        episode = super().episode(task)
        reset = episode.reset

        def failing(seed: int) -> tuple[Message, ...]:
            if seed in self.fails:
                raise InfrastructureError("The user does not answer", kind="user_down")
            return reset(seed)

        episode.reset = failing
        return episode


def seed_of(config: RecipeConfig, key: str, sample_id: str, index: int) -> int:
    """Of an attempt, as evaluations derive it."""
    return derive_seed(config.evaluate.seed, "evaluate", key, sample_id, index)


def world_seed(config: RecipeConfig, key: str, sample_id: str, index: int) -> int:
    """What its environment is reset with."""
    return derive_seed(seed_of(config, key, sample_id, index), "environment")


def task_rows(config: RecipeConfig, tokenizer: Any, per_domain: int) -> list[PromptRow]:
    """The first held-out tasks of each domain, as the data stage prepares them."""
    desk = DeskEnvironment(config.environment, config.environment.user)
    rows = []
    for domain in desk.domains():
        ids = prompt_ids(tokenizer, desk.policy(domain), desk.tools(domain))
        tasks = [task for task in desk.tasks("test") if task.domain == domain]
        rows += [row_of_task(task, ids) for task in tasks[:per_domain]]
    return rows


class Player:
    """A generator that plays every attempt as the plan says."""

    def __init__(self, config: RecipeConfig, rows: Sequence[PromptRow], plan: Plan) -> None:
        self.tokenizer = tiny_tokenizer()
        self.config, self.batches = config, 0
        self.texts: dict[int, str] = {}
        #: Seeds of the turns that were sampled, in order.
        self.seeds: list[int] = []
        #: Raised at the batch of this number, for an attempt that does not come to an end.
        self.stop_at: tuple[int, Exception] | None = None
        desk = DeskEnvironment(config.environment, config.environment.user)
        tasks = {f"{t.domain}/{t.id}": t for t in desk.tasks("test")}
        for row in rows:
            for key, attempts in (("greedy", 1), ("sampled", config.evaluate.num_samples)):
                for index in range(attempts):
                    self._write(desk, tasks[row.sample_id], key, row.sample_id, index, plan)

    def _write(
        self, desk: DeskEnvironment, task: Task, key: str, sample_id: str, index: int, plan: Plan
    ) -> None:
        what, seed = plan(key, sample_id, index), seed_of(self.config, key, sample_id, index)
        world = derive_seed(seed, "environment")
        if what == "words":
            texts = ["I would rather talk."]
        elif what == "nothing":
            texts = [call_text(ToolCall("finish", {}))]
        else:
            calls = desk.expert(task, world, flawed=what == "flawed")
            texts = [call_text(call) for call in calls]
        for turn, text in enumerate(texts):
            self.texts[derive_seed(seed, "turn", turn)] = text

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        self.batches += 1
        self.seeds += [request.seed for request in requests]
        if self.stop_at is not None and self.batches == self.stop_at[0]:
            raise self.stop_at[1]
        made = []
        for index, request in enumerate(requests):
            text = self.texts.get(request.seed, call_text(ToolCall("finish", {})))
            ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
            made.append(Completion(ids, (-0.5,) * len(ids), "stop"))
            if on_completion is not None:
                on_completion(index, made[-1])
        return made


def write_tasks(folder: Path, rows: Sequence[PromptRow]) -> Path:
    """A data stage's folder with these held-out tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder / "rl_test.parquet", rows)
    return folder


def by_attempt(table: Mapping[str, Sequence[str]], usual: str = "nothing") -> Plan:
    """A plan from task to what its attempts are, greedy as the first."""

    def plan(key: str, sample_id: str, index: int) -> str:
        played = table.get(sample_id, ())
        return played[index] if index < len(played) else usual

    return plan
