"""Hugging Face's own Trainer on a small model: checkpoints of 12 MiB, no limit on their number.

    python hf_trainer.py --output_dir out --seed 3 [--resume_from_checkpoint out/checkpoint-20]

``--die_in_save N`` kills it in its N-th save, between the weights and the optimizer, unless it has
resumed.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """Sixty-four rows that depend on nothing."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = (torch.arange(16) * 7 + index * 13) % 200
        return {"input_ids": row, "labels": row}


class Steps(TrainerCallback):
    """Says which step was taken, and pauses."""

    def __init__(self, step_s):
        self.step_s = step_s

    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}/{state.max_steps}", flush=True)
        time.sleep(self.step_s)


class Dying(Trainer):
    """Dies in a save."""

    saves, die_at = 0, 0

    def _save_optimizer_and_scheduler(self, output_dir):
        self.saves += 1
        if self.saves == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(output_dir)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--step_s", type=float, help="pause after each step, and name it")
    parser.add_argument("--die_in_save", type=int, default=0)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 512}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    settings = TrainingArguments(
        output_dir=args.output_dir,
        seed=args.seed,
        max_steps=args.steps,
        save_steps=args.save_steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Dying(model=model, args=settings, train_dataset=Rows())
    if args.step_s:
        trainer.add_callback(Steps(args.step_s))
    trainer.die_at = 0 if args.resume_from_checkpoint else args.die_in_save
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
