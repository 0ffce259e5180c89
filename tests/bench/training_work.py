"""What both sides of the training benchmarks work on: model, prompts, lengths, reward, clock.

In: a :class:`Work`. Out: a folder with a random model, prompts in prepared form, and lengths that
each sample is made to have, so that both sides train on exactly as many tokens.

Random weights do not know when to stop. So a script says how long every response is, and the
end-of-text logit is set accordingly where either side samples (in a `LogitsProcessor` there, at the
same place here): -inf before the last token, alone at the last. Everything else is the real thing.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refiner_core.contract.config import ModelConfig, RecipeConfig
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Generator,
    OnCompletion,
    PromptRow,
    RewardResult,
    SamplingParams,
)
from refiner_core.data.prepared import write_prompts
from refiner_core.generation import transformers_backend
from refiner_core.models import tiny_tokenizer
from refiner_core.models.random_model import save_random_model
from tests.bench.__main__ import TINY_SHAPE
from tests.support.real_rows import RL_ROWS, SFT_ROWS
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import NoJudge, train_rewarded

ALL_ROWS = Path(__file__).parents[3] / "shared" / "data" / "scholarqa"
#: The embedded model's shape (about 1M parameters), and one of 4 layers of 256 (about 4M).
SHAPES: dict[str, dict[str, int]] = {
    "tiny": TINY_SHAPE,
    "small": TINY_SHAPE | {"hidden_size": 256, "intermediate_size": 768},
    "wide": {  # the vocabulary of Qwen3 on a model that is next to nothing
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 151_936,
    },
}
#: Four characters are about a token in a large vocabulary; real lengths are scaled down by this.
CHARACTERS_PER_TOKEN, SCALE = 4, 8
RESPONSE_LENGTH = 1024
ROUNDS, STEPS = 3, 3


@dataclass(frozen=True)
class Work:
    """One GRPO step: prompts of these lengths, and the lengths of every prompt's samples."""

    name: str
    shape: str
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> int:
        """Samples per prompt."""
        return len(self.response_lengths[0])

    @property
    def response_limit(self) -> int:
        """The longest response."""
        return max(map(max, self.response_lengths))

    @property
    def response_tokens(self) -> int:
        """Sampled tokens of a step."""
        return sum(map(sum, self.response_lengths))

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of a step, prompts counted once per sample."""
        return self.response_tokens + self.samples * sum(self.prompt_lengths)


def fixed_work(shape: str, prompts: int = 4, samples: int = 8) -> Work:
    """Prompts of 180 tokens, responses of 64."""
    return Work("fixed lengths", shape, (180,) * prompts, ((64,) * samples,) * prompts)


def long_responses(shape: str, prompts: int = 4, samples: int = 8) -> Work:
    """Nearly all tokens are responses of 256: what a trainer gains by sharing prompts is little."""
    return Work("long responses", shape, (8,) * prompts, ((256,) * samples,) * prompts)


def real_mix(shape: str, prompts: int = 8, samples: int = 8) -> Work:
    """Lengths of real prompts and expert answers, a characters/4 estimate scaled down to 1/8, cut
    at an eighth of the shipped response length."""
    pools = []
    for own, role in ((RL_ROWS, "user"), (SFT_ROWS, "assistant")):
        file = (
            ALL_ROWS / f"scholarqa_{own.name}" if ALL_ROWS.is_dir() else own
        )  # the READMEs' figures: all rows
        turns = [
            t for line in file.read_text().splitlines() for t in json.loads(line)["conversations"]
        ]
        texts = [turn["content"] for turn in turns if turn["role"] == role]
        pools.append([max(8, len(text) // CHARACTERS_PER_TOKEN // SCALE) for text in texts])
    rng = np.random.default_rng(0)
    drawn = rng.choice(pools[1], (prompts, samples)).clip(max=RESPONSE_LENGTH // SCALE)
    lengths = tuple(rng.choice(pools[0], prompts).tolist())
    return Work("real length mix", shape, lengths, tuple(map(tuple, drawn.tolist())))


def make_inputs(work: Work, root: Path, **shape: int) -> list[PromptRow]:
    """``root/model`` and ``root/data``; returns the prompts, whose text gives their ids back.

    ``shape`` stands in for the one that the work names.
    """
    from transformers import AutoTokenizer

    save_random_model(root / "model", **(shape or SHAPES[work.shape]), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    rng = np.random.default_rng(0)
    plain = [i for i in range(len(tokenizer)) if _is_word(tokenizer, i)]
    rows = []
    for number, length in enumerate(work.prompt_lengths):
        ids = tuple(int(i) for i in rng.choice(plain, length))
        text = tokenizer.decode(ids)
        assert tuple(tokenizer(text)["input_ids"]) == ids, "prompts are the same on both sides"
        rows.append(PromptRow(f"prompt-{number}", "?", text, ids, rubrics="{}"))
    (root / "data").mkdir()
    write_prompts(root / "data" / "rl_train.parquet", rows)
    return rows


def _is_word(tokenizer: Any, token: int) -> bool:
    """Whether the text of this token is tokenised to it, next to any other."""
    text = tokenizer.decode([token])
    return text.startswith(" ") and tokenizer(text * 2)["input_ids"] == [token, token]


def score_text(text: str) -> float:
    """A cheap reward with spread; the same on both sides."""
    return sum(map(ord, text)) % 97 / 97


def score_items(items: Sequence[Any], reward: Any, judge: Any) -> list[RewardResult]:
    """:func:`score_text` as a reward function of ours."""
    return [RewardResult("scored", score_text(item.text), {}) for item in items]


def stop_logits(logits_NV: torch.Tensor, last_N: torch.Tensor, eos: int) -> torch.Tensor:
    """End-of-text is impossible inside a response, and certain at its last token."""
    logits_NV = logits_NV.clone()
    logits_NV[..., eos] = -torch.inf
    logits_NV[last_N] = -torch.inf
    logits_NV[last_N, eos] = 0.0
    return logits_NV


# ---------------------------------------------------------------- our side

CPU_RECIPE = RecipeConfig(seed=0, model=ModelConfig(cpu_threads=1, dtype="float32"))


@dataclass
class Steps:
    """Times of consecutive steps of one side: wall and CPU seconds, and where they went."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    parts: list[Mapping[str, float]] = field(default_factory=list)
    response_tokens: list[int] = field(default_factory=list)
    #: The most GPU memory.
    gib: float = 0.0


def median_of(runs: Sequence[Steps], clock: str) -> float:
    """The median of a clock over all steps of all runs."""
    return statistics.median(value for steps in runs for value in getattr(steps, clock))


def parts_of(runs: Sequence[Steps]) -> dict[str, float]:
    """Median wall seconds of generate, score and update."""
    parts = [part for steps in runs for part in steps.parts]
    return {name: round(statistics.median(p[name] for p in parts), 3) for name in parts[0]}


class FixedRollouts:
    """A generator that costs nothing: the same made-up tokens at every step."""

    def __init__(self, completions: Mapping[tuple[int, ...], Sequence[Completion]]) -> None:
        self.completions = completions

    def began(self) -> None:
        """Called when a step asks for its rollouts."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        self.began()
        place: Counter[tuple[int, ...]] = Counter()
        made = []
        for i, request in enumerate(requests):
            made.append(self.completions[request.prompt_ids][place[request.prompt_ids]])
            place[request.prompt_ids] += 1
            if on_completion is not None:
                on_completion(i, made[-1])
        return made


def fixed_rollouts(work: Work, rows: Sequence[PromptRow]) -> FixedRollouts:
    """Random tokens of the scripted lengths, none of them special."""
    vocabulary = len(tiny_tokenizer())
    rng = np.random.default_rng(1)
    return FixedRollouts(
        {
            row.prompt_ids: [
                Completion(
                    tuple(int(i) for i in rng.integers(300, vocabulary, length)),
                    (-float(np.log(vocabulary)),) * length,
                    "length",
                )
                for length in lengths
            ]
            for row, lengths in zip(rows, work.response_lengths, strict=True)
        }
    )


class ClockedIO(FolderStageIO):
    """Reads the clocks at the end of every step."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.marks: list[tuple[float, float]] = []

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log_metrics(step, metrics)
        self.marks.append((time.perf_counter(), time.process_time()))


def run_ours(
    work: Work,
    inputs: Path,
    root: Path,
    steps: int,
    *,
    generator: Generator | None = None,
    base: RecipeConfig | None = None,
    **grpo: Any,
) -> Steps:
    """``steps`` + 1 steps of training; the first is warm-up and not counted."""
    config = our_config(work, steps + 1, base or CPU_RECIPE, **grpo)
    root.mkdir(parents=True)
    io = ClockedIO(root)
    reset_gib()
    with scripted_lengths(work, inputs):
        train_rewarded(
            score_items,
            config,
            data_dir=inputs / "data",
            model_ref=str(inputs / "model"),
            output_dir=root,
            io=io,
            judge=NoJudge(),
            generator=generator,
        )
    rows = io.metrics()[1:]
    everything = len(work.prompt_lengths) * work.samples
    assert all(row["samples/trained"] == everything for row in rows), "some group had no spread"
    wall_s, cpu_s = laps(io.marks)
    return Steps(
        wall_s=wall_s,
        cpu_s=cpu_s,
        parts=[
            {
                "generate": row["time/generate_s"],
                "score": row.get("time/judge_s", 0.0),
                "update": row["time/update_s"],
            }
            for row in rows
        ],
        response_tokens=[round(row["val/sequence_lengths"] * everything) for row in rows],
        gib=peak_gib(),
    )


def laps(marks: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Wall and CPU seconds between readings of both clocks."""
    wall_s, cpu_s = ([b - a for a, b in pairwise(clock)] for clock in zip(*marks, strict=True))
    return wall_s, cpu_s


def reset_gib() -> None:
    """Forget the peak of GPU memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """The most GPU memory since then."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def both_sides(
    work: Work,
    rows: list[PromptRow],
    root: Path,
    micro_batch: int,
    *,
    given: FixedRollouts | None = None,
    base: RecipeConfig | None = None,
    **grpo: Any,
) -> dict[str, list[Steps]]:
    """Rounds of ours and of TRL's trainer, in turn; ``given`` rollouts cost nothing."""
    from tests.bench.trl_side import run_trl

    done: dict[str, list[Steps]] = {"ours": [], "rival": []}
    for number in range(ROUNDS):
        folder = root / f"{'given' if given else 'sampled'}-{number}"
        ours = run_ours(*(work, root, folder / "ours", STEPS), generator=given, base=base, **grpo)
        rival = run_trl(
            *(work, rows, root, folder / "rival", STEPS), micro_batch=micro_batch, fixed=given
        )
        for side, steps in (("ours", ours), ("rival", rival)):
            assert steps.response_tokens == [work.response_tokens] * STEPS, "equal work"
            done[side].append(steps)
    return done


def our_config(work: Work, steps: int, base: RecipeConfig, **grpo: Any) -> RecipeConfig:
    """The recipe of our side; what is not said here or in ``base`` is as shipped."""
    settings: dict[str, Any] = {
        "num_training_steps": steps,
        "num_unique_prompts_rollout": len(work.prompt_lengths),
        "num_samples_per_prompt_rollout": work.samples,
        "response_length": work.response_limit,
        "max_token_length": max(work.prompt_lengths) + work.response_limit,
        "beta": 0.0,
        "learning_rate": 1e-5,
        "advantage_normalization_type": "sample_std",
        "save_freq": 10**6,
    }
    return replace(base, grpo=replace(base.grpo, **(settings | grpo)))


@contextmanager
def scripted_lengths(work: Work, inputs: Path) -> Iterator[None]:
    """Within it, samples of our backend have the scripted lengths."""
    from refiner_core.data.prepared import load_prompts

    rows = load_prompts(inputs / "data" / "rl_train.parquet")
    script = {
        row.prompt_ids: lengths for row, lengths in zip(rows, work.response_lengths, strict=True)
    }
    plain = transformers_backend._Decoding

    class Scripted(plain):  # type: ignore[valid-type]
        """A batch whose samples end as told; a row of the batch holds a whole group."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            assert all(len(row.requests) == work.samples for row in self.batch)
            self.last_N = np.concatenate([script[row.prompt_ids] for row in self.batch]) - 1

        def _sample(self, logits_P_G_V: torch.Tensor, step: int) -> list[int]:
            last_P_G = torch.from_numpy((self.grid_P_G >= 0) & (self.last_N[self.grid_P_G] == step))
            last_P_G = last_P_G.to(logits_P_G_V.device)
            eos = int(self.stop_ids[0])
            return super()._sample(stop_logits(logits_P_G_V, last_P_G, eos), step)

    transformers_backend._Decoding = Scripted
    try:
        yield
    finally:
        transformers_backend._Decoding = plain
