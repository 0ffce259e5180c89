"""The rival of the training benchmarks: TRL's GRPOTrainer on the same work.

In: a :class:`~tests.bench.training_work.Work` and its inputs. Out: times of steps, split into
generate, score (decode, reward, advantages) and update.

Options that are not TRL's defaults, so that like is compared with like: fp32, no gradient
checkpointing, a constant learning rate, no shuffling (the script of lengths goes by row), no
reports. ``beta`` 0, ``loss_type`` dapo (a mean over the step's tokens), no second evaluation of
old log-probabilities: these are its defaults. Generation is transformers' `generate`, one batch.
"""

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PrinterCallback,
    TrainerCallback,
)
from transformers.utils import logging as transformers_logging
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from refiner_core.contract.types import PromptRow
from tests.bench.training_work import (
    FixedRollouts,
    Steps,
    Work,
    laps,
    peak_gib,
    reset_gib,
    score_text,
    stop_logits,
)


class ScriptedStop(LogitsProcessor):
    """Row i of the batch ends at its scripted length."""

    def __init__(self, work: Work, eos: int) -> None:
        self.last_N = torch.tensor([n for row in work.response_lengths for n in row]) - 1
        self.eos = eos
        self.prompt_length = max(work.prompt_lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.prompt_length
        return stop_logits(scores, self.last_N.to(scores.device) == step, self.eos)


class _Clocks(TrainerCallback):
    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes how long generating and scoring take, and how much was sampled.

    ``fixed``: completions to take at every step instead of generating.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.generate_s: list[float] = []
        self.rollout_s: list[float] = []
        self.sampled: list[int] = []
        self.fixed: FixedRollouts | None = None
        self.completions: list[list[int]] = []
        super().__init__(*arguments, **options)

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        if self.fixed is None:
            completion_ids, logprobs = super()._generate_single_turn(*arguments, **options)
        else:
            self.fixed.began()
            completion_ids, logprobs = self.completions, None
        self.generate_s.append(time.perf_counter() - begun)
        self.sampled.append(sum(map(len, completion_ids)))
        return completion_ids, logprobs

    def _generate_and_score_completions(self, *arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        batch = super()._generate_and_score_completions(*arguments, **options)
        self.rollout_s.append(time.perf_counter() - begun)
        return batch


def run_trl(
    work: Work,
    rows: list[PromptRow],
    inputs: Path,
    root: Path,
    steps: int,
    *,
    micro_batch: int,
    fixed: FixedRollouts | None = None,
) -> Steps:
    """``steps`` + 1 steps; the first is warm-up and not counted. ``micro_batch`` samples are in one
    forward pass of the update.

    On a GPU in bfloat16: weights in float32 under autocast, as its default is.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model", padding_side="left")
    scripted = LogitsProcessorList([ScriptedStop(work, tokenizer.eos_token_id)])
    generate = model.generate
    model.generate = lambda *a, **k: generate(*a, logits_processor=scripted, **k)
    samples = len(work.prompt_lengths) * work.samples
    arguments = GRPOConfig(
        output_dir=str(root),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=steps + 1,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=work.samples,
        max_completion_length=work.response_limit,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        use_bias_correction_kl=False,
        shuffle_dataset=False,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = TimedTrainer(
        model=model,
        reward_funcs=_reward,
        args=arguments,
        train_dataset=Dataset.from_dict(
            {"prompt": [row.prompt_text for row in rows] * (steps + 1)}
        ),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    if fixed is not None:
        trainer.fixed = fixed
        trainer.completions = [
            list(c.token_ids) for row in rows for c in fixed.completions[row.prompt_ids]
        ]
    clocks = _Clocks()
    trainer.add_callback(clocks)
    reset_gib()
    trainer.train()
    walls, cpu_s = laps(clocks.marks)
    assert len(trainer.generate_s) == steps + 1, "one generation per step"
    return Steps(
        wall_s=walls,
        cpu_s=cpu_s,
        parts=[
            {"generate": made, "score": rolled - made, "update": wall - rolled}
            for wall, made, rolled in zip(
                walls, trainer.generate_s[1:], trainer.rollout_s[1:], strict=True
            )
        ],
        response_tokens=trainer.sampled[1:],
        gib=peak_gib(),
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [score_text(text) for text in completions]
