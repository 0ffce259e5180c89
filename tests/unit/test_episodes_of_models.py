"""Episodes of a real model: what it was conditioned on, turn by turn, is what a completion says.

Where this is wrong, training weighs tokens by probabilities that they never had.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.sections.environment import EnvironmentConfig, ShapingConfig
from refiner_core.contract.types import Completion, Generator, SamplingParams, TurnGenerator
from refiner_core.environments.conversation import demonstration, prompt_ids
from refiner_core.environments.episode_runner import EpisodeRequest, EpisodeSettings
from refiner_core.environments.episodes import run_episodes
from refiner_core.environments.protocol import Message, ToolCall, record_from_json
from refiner_core.generation.completions import LockstepTurns
from refiner_core.generation.transformers_backend import TransformersGenerator
from tests.support.counting import RULES, TOOLS, Counting, call, task_of
from tests.support.qwen_like import qwen_like
from tests.support.tiny_training import tiny_model

TEMPERATURE = 1.1
GOALS = (1, 2, 3)
SETTINGS = EpisodeSettings(
    section=EnvironmentConfig(
        max_turns=4,
        repairs=1,
        max_argument_bytes=1000,
        workers=3,
        turn_timeout_s=60.0,
        episode_timeout_s=600.0,
        shaping=ShapingConfig(weights=("action=1",)),
    ),
    context_tokens=700,
    sampling=SamplingParams(TEMPERATURE, max_new_tokens=40, stop_strings=("</tool_call>",)),
    ordered=True,
)
#: Knows the words of the game, so that an episode is some hundred tokens.
TOKENIZER = qwen_like(
    [RULES, json.dumps([tool.as_json() for tool in TOOLS]), call(by=1), call("finish")] * 20, 450
)
PROMPT = prompt_ids(TOKENIZER, RULES, TOOLS)


def shown(goal: int, seed: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """How an episode of a goal is played."""
    add, finish = ToolCall("add", {"by": 1}), ToolCall("finish", {})
    turns = [(add, [Message("tool", str(n + 1))]) for n in range(goal)]
    first = [Message("user", f"Count to {goal} ({seed}).")]
    return demonstration(TOKENIZER, PROMPT, first, [*turns, (finish, [])])


@pytest.fixture(scope="module")
def model() -> Any:
    """Has seen the game often enough to make calls, and not often enough to make no mistakes."""
    model = tiny_model(
        0, vocab_size=len(TOKENIZER), hidden_size=64, max_position_embeddings=1024,
        eos_token_id=TOKENIZER.eos_token_id, initializer_range=0.05,
    ).train()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    examples = [shown(goal, 0) for goal in GOALS]
    longest = max(len(ids) for ids, _ in examples)
    ids = torch.zeros((len(examples), longest), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (tokens, mask) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens)] = torch.where(torch.tensor(mask), torch.tensor(tokens), -100)
    for _ in range(50):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def played(generator: Generator | TurnGenerator, seed: int, **changes: Any) -> list[Completion]:
    """Six episodes, their tools as slow as the seed says."""
    draw = random.Random(seed)
    tasks = [task_of(n, goal=GOALS[n % 3], sleep=draw.random() * 0.01) for n in range(6)]
    requests = [EpisodeRequest(task, PROMPT, derive_seed(5, n)) for n, task in enumerate(tasks)]
    ended: dict[int, Completion] = {}
    run_episodes(
        generator, Counting(), TOKENIZER, requests, replace(SETTINGS, **changes), ended.__setitem__
    )
    return [ended[n] for n in range(len(tasks))]


def bits(completions: list[Completion]) -> str:
    """All of them but the seconds that tools took."""
    values = []
    for completion in completions:
        episode = json.loads(json.dumps(completion.episode))
        for turn in episode["turns"]:
            del turn["seconds"]
        values.append([completion.token_ids, completion.logprobs, completion.own, episode])
    return json.dumps(values)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "turns": lambda model: TransformersGenerator(model, TOKENIZER, batch_size=3),
    "lockstep": lambda model: LockstepTurns(TransformersGenerator(model, TOKENIZER), room=3),
}


@pytest.fixture(scope="module")
def ordered(model: Any) -> dict[str, list[Completion]]:
    return {name: played(make(model), 1) for name, make in MAKERS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MAKERS))
def test_ordered_episodes_repeat_bitwise_with_slow_tools(
    model: Any, ordered: dict[str, list[Completion]], name: str
) -> None:
    assert bits(ordered[name]) == bits(played(MAKERS[name](model), 2))


@pytest.mark.parametrize("name", ["eager turns", "turns", "lockstep"])
def test_log_probabilities_are_those_of_the_completion_s_own_tokens(
    model: Any, ordered: dict[str, list[Completion]], name: str
) -> None:
    """One pass over prompt and completion gives every own token the probability that it was
    sampled with: nothing else was in its context, and nothing of it is missing."""
    completions = ordered.get(name) or played(MAKERS["turns"](model), 3, ordered=False)
    records = [record_from_json(dict(c.episode or {})) for c in completions]
    turns = [turn for record in records for turn in record.turns]
    assert len(turns) > 2 * len(records), "or this shows little"
    assert any(turn.repaired is not None for turn in turns)
    for completion, record in zip(completions, records, strict=True):
        whole = torch.tensor([PROMPT + completion.token_ids])
        with torch.no_grad():
            logits = model(input_ids=whole).logits[0, len(PROMPT) - 1 : -1]
        for turn in record.turns:
            heat = 1.0 if turn.repaired is not None else TEMPERATURE
            rows = slice(turn.start, turn.end)
            chosen = torch.tensor(completion.token_ids[rows])
            expected = (logits[rows] / heat).log_softmax(-1)
            expected = expected.gather(-1, chosen[:, None])[:, 0]
            found = torch.tensor(completion.logprobs[rows])
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        assert completion.own is not None
        own = [n for turn in record.turns for n in range(turn.start, turn.end)]
        assert own == [n for n, value in enumerate(completion.own) if value]
        assert own == [n for n, value in enumerate(completion.logprobs) if not math.isnan(value)]
