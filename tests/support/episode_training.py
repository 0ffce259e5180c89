"""Training on episodes of the counting game, with a tiny model that is lent the grammar of calls.

The model chooses which call to make (a token of its own distribution); the call's text is given. So
random weights play episodes that end well, badly, broken, or by the turn limit, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from refiner_core.contract.config import EnvironmentConfig, GrpoConfig, RecipeConfig
from refiner_core.contract.types import Completion, GenerationRequest, OnCompletion, SamplingParams
from refiner_core.data.prepared import write_prompts
from refiner_core.environments.conversation import prompt_ids
from refiner_core.environments.protocol import InfrastructureError, Message, Task, row_of_task
from refiner_core.training.grpo import train_grpo
from tests.support.counting import TOOLS, Counting, CountingEpisode, call
from tests.support.qwen_like import qwen_like
from tests.support.tiny_training import TrainRun, tiny_model

#: What the model may say: a step, a wide one, an end, an unknown tool, words.
SAYINGS = (call(by=1), call(by=2), call("finish"), call("shout"), "well")
LEANING = torch.tensor([1.5, 1.5, 0.5, 0.0, -0.5])


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with tools whose calls are short."""
    words = "add Add to the counter finish End object properties by integer required parameters"
    return qwen_like([*SAYINGS, "Count to 2. You are near. You are far.", words], 400)


class CallingSampler:
    """A generator that says one of :data:`SAYINGS`: which one, the model decides by the tokens 10,
    11 ... that come next; log-probabilities are its own of the text said.

    ``fail_at``: the number of samples after which it breaks off.
    """

    fail_at: int | None = None

    def __init__(self, model: Any, tokenizer: Any, **_: Any) -> None:
        self.model, self.made = model, 0
        self._ids = [
            tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in SAYINGS
        ]

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        completions = []
        for i, request in enumerate(requests):
            self.made += 1
            if self.made == CallingSampler.fail_at:
                raise RuntimeError("the node went away while generating")
            completions.append(self._one(request, params))
            if on_completion is not None:
                on_completion(i, completions[-1])
        return completions

    @torch.no_grad()
    def _one(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        rng = torch.Generator().manual_seed(request.seed)
        temperature = params.temperature or 1.0
        context = list(request.prompt_ids)
        logits = self.model(torch.tensor([context]), use_cache=False).logits[0, -1].float()
        leaning = logits[10 : 10 + len(SAYINGS)] / 4 + LEANING
        choices = torch.softmax(leaning / temperature, -1)
        chosen = int(torch.multinomial(choices, 1, generator=rng))
        if params.temperature == 0:
            chosen = int(choices.argmax())
        ids = self._ids[chosen][: params.max_new_tokens]
        logits = self.model(torch.tensor([[*context, *ids]]), use_cache=False).logits[0]
        every = torch.log_softmax(logits[len(context) - 1 : -1].float() / temperature, -1)
        logprobs = every[torch.arange(len(ids)), list(ids)].tolist()
        cut = len(ids) < len(self._ids[chosen])
        return Completion(ids, tuple(logprobs), "length" if cut else "stop")


class Troubled(Counting):
    """The counting game. ``down``: tasks whose user is gone; they may come back."""

    name = "troubled"

    def __init__(self) -> None:
        super().__init__()
        self.down: set[int] = set()

    def episode(self, task: Task) -> CountingEpisode:
        super().episode(task)  # counts it
        return _TroubledEpisode(self, task)


class _TroubledEpisode(CountingEpisode):
    def reset(self, seed: int) -> tuple[Message, ...]:
        assert isinstance(self.environment, Troubled)
        if self.data["name"] in self.environment.down:
            raise InfrastructureError("The user is gone", kind="user_down")
        return super().reset(seed)


def tasks() -> list[Task]:
    """Five tasks in two domains."""
    return [
        Task(
            *(f"t{n}", ("near", "far")[n % 2], "train", f"count to {goal}"),
            {"goal": goal, "name": n, "as_it_stands": True},
        )
        for n, goal in enumerate((4, 5, 4, 5, 4))
    ]


def save_inputs(root: Path) -> Path:
    """``data`` and ``model``."""
    tokenizer = tool_tokenizer()
    tiny_model(vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    rows = [
        row_of_task(task, prompt_ids(tokenizer, f"Count. You are {task.domain}.", TOOLS))
        for task in tasks()
    ]
    (root / "data").mkdir(parents=True, exist_ok=True)
    write_prompts(root / "data" / "rl_train.parquet", rows)
    return root


def recipe(environment: dict[str, Any] | None = None, **grpo: Any) -> RecipeConfig:
    """Three steps of 2 tasks x 3 episodes of at most 3 turns."""
    settings: dict[str, Any] = {
        "num_training_steps": 3,
        "num_unique_prompts_rollout": 2,
        "num_samples_per_prompt_rollout": 3,
        "response_length": 40,
        "max_token_length": 400,
        "pack_length": 400,
        "learning_rate": 0.003,
        "beta": 0.05,
        "save_freq": 1,
    }
    section = {"name": "troubled", "max_turns": 3}
    return replace(
        RecipeConfig(),
        seed=7,
        grpo=replace(GrpoConfig(), **(settings | grpo)),
        environment=replace(EnvironmentConfig(), **(section | (environment or {}))),
    )


class EpisodeRun(TrainRun):
    """A GRPO stage on episodes."""

    def __init__(self, inputs: Path, root: Path, config: RecipeConfig) -> None:
        super().__init__(inputs, root)
        self.config = config
        self.environment = Troubled()

    def __call__(self, name: str = "", **grpo: Any) -> dict[str, Any]:
        torch.rand(3)  # a process that resumes has another random state
        return train_grpo(
            self.config,
            data_dir=self.inputs / "data",
            model_ref=str(self.inputs / "model"),
            output_dir=self.root / "out",
            io=self.io,
            judge=None,
            environment=self.environment,
        )
