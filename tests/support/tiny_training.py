"""A model of a few thousand parameters, data for it, and fakes for what GRPO talks to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from refiner_core.contract.config import (
    GrpoConfig,
    ModelConfig,
    MonitorConfig,
    RecipeConfig,
    SftConfig,
)
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.types import (
    Completion,
    DemonstrationRow,
    GenerationRequest,
    Judgement,
    JudgeRequest,
    OnCompletion,
    PromptRow,
    RewardResult,
    SamplingParams,
)
from refiner_core.data.prepared import write_demonstrations, write_prompts
from refiner_core.generation.sampling import processed_logprobs
from tests.support.stage_io import FolderStageIO

VOCABULARY = 48
EOS = 1
#: Sampling from the model's own distribution.
UNCHANGED = SamplingParams()
_TAGS = {3: "<answer>", 4: "</answer>"}


def tiny_model(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Two layers, hidden 32, head_dim 32; weights large enough that sequences differ clearly."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(Qwen3Config(**(settings | changes)))
    return model.eval()


def tiny_tokenizer(*, answers: bool = False) -> PreTrainedTokenizerFast:
    """Token i is the word ``w<i>``; 0 pads and 1 ends. With ``answers``, 3 and 4 are the tags of an
    answer."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    if answers:
        words = {_TAGS.get(i, word): i for word, i in words.items()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w2"
    )


def save_tiny_model(folder: Path, **changes: Any) -> Path:
    """A folder that ``from_pretrained`` takes."""
    tiny_model(**changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def demonstrations(n: int, seed: int = 0) -> list[DemonstrationRow]:
    """Rows of 8 to 20 tokens whose second half counts up, which can be learnt."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(4, 10))).tolist()
        answer = [3 + (prompt[-1] - 3 + k) % (VOCABULARY - 3) for k in range(1, len(prompt))]
        mask = (False,) * len(prompt) + (True,) * (len(answer) + 1)
        rows.append(DemonstrationRow(f"row-{i}", (*prompt, *answer, EOS), mask))
    return rows


def prompts(n: int, seed: int = 0) -> list[PromptRow]:
    """Prompts of 4 to 9 tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        ids = tuple(rng.integers(3, VOCABULARY, int(rng.integers(4, 10))).tolist())
        rows.append(PromptRow(f"prompt-{i}", f"question {i}", "text", ids, rubrics="{}"))
    return rows


def save_data(folder: Path) -> Path:
    """Prepared files of both training stages."""
    write_demonstrations(folder / "sft_train.parquet", demonstrations(30))
    write_demonstrations(folder / "sft_val.parquet", demonstrations(5, seed=1))
    write_prompts(folder / "rl_train.parquet", prompts(7))
    write_prompts(folder / "rl_test.parquet", prompts(52, seed=3))
    return folder


def watched(config: RecipeConfig, **section: Any) -> RecipeConfig:
    """The recipe with a monitor whose gold is called ``gold``."""
    gold = json.dumps({"name": "gold", "judge": {"model": "lexical-loose-1"}})
    monitor = MonitorConfig(**{"gold": (gold,), "rows": 48, **section})
    return replace(config, stages=("data", "grpo"), monitor=monitor)


def low_or_high(one: Any, samples: Sequence[Any]) -> list[float | None]:
    """Scores of a monitor: the proxy's is the share of low words, that of gold of high ones."""
    found: list[float | None] = []
    for sample in samples:
        words = sample.text.split()
        low = sum(int(word[1:]) < 24 for word in words) / max(1, len(words))
        found.append(low if one.name == "proxy" else 1 - low)
    return found


def recipe(**sections: dict[str, Any]) -> RecipeConfig:
    """A recipe for the tiny model: six SFT steps, five GRPO steps."""
    sft = SftConfig(
        learning_rate=0.01,
        muon_learning_rate=0.02,
        optimizer="muon",
        num_train_epochs=2.0,
        pack_length=48,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        warmup_ratio=0.2,
        eval_freq=2,
        save_freq=2,
    )
    grpo = GrpoConfig(
        num_training_steps=5,
        num_unique_prompts_rollout=3,
        num_samples_per_prompt_rollout=4,
        response_length=6,
        max_token_length=64,
        pack_length=64,
        learning_rate=0.01,
        lr_scheduler_type="linear",
        beta=0.05,
        save_freq=2,
    )
    return RecipeConfig(
        seed=7,
        model=replace(ModelConfig(), **sections.get("model", {})),
        sft=replace(sft, **sections.get("sft", {})),
        grpo=replace(grpo, **sections.get("grpo", {})),
    )


def furthest(
    model: Any,
    asked: Sequence[GenerationRequest],
    made: Sequence[Completion],
    params: SamplingParams = UNCHANGED,
) -> float:
    """The largest difference of a log-probability to one plain forward pass, as in training."""
    found = 0.0
    for request, completion in zip(asked, made, strict=True):
        ids, tokens = request.prompt_ids, completion.token_ids
        with torch.no_grad():
            logits_T_V = model(torch.tensor([[*ids, *tokens]]), use_cache=False).logits[0]
        ours_T_V = processed_logprobs(logits_T_V[len(ids) - 1 : -1], params)
        for place, (token, theirs) in enumerate(zip(tokens, completion.logprobs, strict=True)):
            found = max(found, abs(ours_T_V[place, token].item() - theirs))
    return found


class LiveSampler:
    """A generator over a live model: one token at a time, without a cache, seeded per request.

    ``fail_at_call``: the call of this number (from 1) raises half-way.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.calls = 0
        self.fail_at_call: int | None = None

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        self.calls += 1
        completions = []
        for i, request in enumerate(requests):
            if self.calls == self.fail_at_call and i == len(requests) // 2:
                raise RuntimeError("the node went away while generating")
            completions.append(self._one(request, params))
            if on_completion is not None:
                on_completion(i, completions[-1])
        return completions

    @torch.no_grad()
    def _one(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        rng = torch.Generator().manual_seed(request.seed)
        ids, logprobs = list(request.prompt_ids), []
        for _ in range(params.max_new_tokens):
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            logp = torch.log_softmax(logits.float() / params.temperature, -1)
            token = int(torch.multinomial(logp.exp(), 1, generator=rng))
            ids.append(token)
            logprobs.append(float(logp[token]))
            if token == EOS:
                break
        response = tuple(ids[len(request.prompt_ids) :])
        return Completion(response, tuple(logprobs), "stop" if response[-1] == EOS else "length")


class AnsweringSampler(LiveSampler):
    """Puts what the model says between the tags of an answer; some samples lack the end.

    Together with :func:`save_answering_inputs`, rollouts that a judge is asked about. The tags'
    log-probabilities are made up.
    """

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        made: list[Completion] = []

        def tagged(i: int, c: Completion) -> None:
            said = tuple(token for token in c.token_ids if token > 4)
            ids = (3, *said, EOS) if request_is_broken(requests[i]) else (3, *said, 4, EOS)
            made.append(Completion(ids, (-1.0,) * len(ids), "stop"))
            if on_completion is not None:
                on_completion(i, made[i])

        super().generate(requests, params, tagged)
        return made


def request_is_broken(request: GenerationRequest) -> bool:
    """Which samples of :class:`AnsweringSampler` are malformed."""
    return request.seed % 5 == 0


def save_answering_inputs(root: Path) -> Path:
    """``data`` and ``model`` for :class:`AnsweringSampler`: rows with rubrics on words."""
    save_tiny_model(root / "model")
    tiny_tokenizer(answers=True).save_pretrained(root / "model")
    words = " ".join(f"w{i}" for i in range(5, VOCABULARY, 2))
    rubrics = [{"title": "odd", "description": f"{words}"}, {"title": "w7", "description": "w7 w9"}]
    text = json.dumps({"positive_rubrics": rubrics, "negative_rubrics": []})
    rows = [replace(row, rubrics=text) for row in prompts(7)]
    (root / "data").mkdir(parents=True, exist_ok=True)
    write_prompts(root / "data" / "rl_train.parquet", rows)
    return root


class NoJudge:
    """A judge that is never asked."""

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        return [Judgement("scored", 1.0) for _ in requests]


class GivenRewards:
    """A stream of rewards that a function gives for all answers at once."""

    streams = False

    def __init__(self, function: Any, reward: Any, judge: Any, *, patient: bool) -> None:
        self.function, self.beside = function, (reward, judge)
        self.answers: dict[int, Any] = {}

    def add(self, place: int, answer: Any) -> None:
        self.answers.setdefault(place, answer)

    def results(self, on_judged: Any) -> list[RewardResult]:
        answers = [answer for _, answer in sorted(self.answers.items())]
        results: list[RewardResult] = self.function(answers, *self.beside)
        return results


def train_rewarded(rewards: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """A training whose rewards a function gives; None: the real ones."""
    from refiner_core.training.grpo import train_grpo

    if rewards is None:
        return train_grpo(*args, **options)

    given = partial(GivenRewards, rewards)
    with mock.patch("refiner_core.training.rollouts.single_turn.RewardStream", given):
        return train_grpo(*args, **options)


@contextmanager
def following(sampler: LiveSampler | None) -> Iterator[None]:
    """Within it, the sampler has the model that a training loads."""
    from refiner_core.training.model import loading

    load = loading.load_for_training

    def load_and_tell(*args: Any) -> Any:
        loaded = load(*args)
        if sampler is not None:
            sampler.model = loaded.model
        return loaded

    with mock.patch.object(loading, "load_for_training", load_and_tell):
        yield


class TrainRun:
    """A training stage over a folder with ``data`` and ``model``; called again after a fault, it
    resumes. ``sampler`` None is the embedded one."""

    def __init__(self, inputs: Path, root: Path, kind: str = "grpo", **sections: Any) -> None:
        self.inputs, self.root, self.kind = inputs, root, kind
        self.config = recipe(**sections)
        self.io = FolderStageIO(root / "io")
        self.sampler: LiveSampler | None = None
        self.judge: Any = NoJudge()
        self.rewards: Any = count_low_words
        self.open_servers: Any = None
        self.golds: Any = ()

    def __call__(self, name: str = "", **grpo: Any) -> dict[str, Any]:
        """Train; with a name into another folder; keyword arguments change the ``grpo`` section."""
        from refiner_core.training.sft import train_sft

        torch.rand(3)  # a process that resumes has another random state
        if name:
            self.io = FolderStageIO(self.root / name / "io")
        where: dict[str, Any] = {
            "data_dir": self.inputs / "data",
            "model_ref": str(self.inputs / "model"),
            "output_dir": self.root / name / "out",
            "io": self.io,
        }
        if self.kind == "sft":
            return train_sft(self.config, **where)
        config = replace(self.config, grpo=replace(self.config.grpo, **grpo))
        where |= {"judge": self.judge, "open_servers": self.open_servers, "golds": self.golds}
        with following(self.sampler):
            return train_rewarded(self.rewards, config, **where, generator=self.sampler)

    def outcome(self) -> dict[str, Any]:
        """All that must not depend on interruptions."""
        weights = load_file(self.root / "out/model/model.safetensors")
        return {
            "metrics": self.io.comparable_metrics(),
            "rollouts": self.io.rollouts(),
            "weights": {name: value.tolist() for name, value in weights.items()},
        }

    def column(self, name: str) -> list[Any]:
        """A metric by step."""
        return [row.get(name) for row in self.io.metrics()]

    def stopped_after(self, *steps: int) -> dict[str, Any]:
        """The report of a run that was stopped after each of these steps."""
        for step in steps:
            self.io.stop_at = step
            with pytest.raises(Interrupted):
                self()
            assert self.io.checkpoint_steps()[-1] == step
        self.io.stop_at = None
        return self()


def count_low_words(items: Sequence[Any], reward: Any, judge: Any) -> list[RewardResult]:
    """Reward: the share of tokens with a low number."""
    results = []
    for item in items:
        numbers = [int(word[1:]) for word in item.text.split()]
        share = sum(n < 24 for n in numbers) / max(1, len(numbers))
        results.append(RewardResult("scored", share, {"low": share}, ({"kind": "count"},)))
    return results
