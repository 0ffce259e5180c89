"""Sections `model` and `data`: the inputs of training."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.marks import STRICT, added, execution, identity, section
from refiner_core.contract.sections.steering import Resources


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The model that the first training stage starts from."""

    name_or_path: str = identity(
        "builtin:tiny",
        doc="Hub id, local folder, or shipped: `builtin:tiny`, for agents `builtin:tiny-tools`",
    )
    revision: str = identity("main", doc="Hub revision (commit, tag or branch) of the model")
    tokenizer_name_or_path: str | None = identity(
        None, doc="tokenizer, if it is not the model's own"
    )
    chat_template: str | None = identity(
        None, doc="Jinja chat template text that replaces the tokenizer's own"
    )
    dtype: Literal["float32", "bfloat16"] = identity("float32", doc="weights and compute type")
    attn_implementation: Literal["sdpa", "eager", "flex_attention", "flash_attention_2"] = identity(
        "sdpa", doc="attention kernel; part of the identity because it changes the order of sums"
    )
    gradient_checkpointing: bool = execution(False, doc="recompute activations to save memory")
    cpu_threads: int = identity(
        1, ge=1, doc="threads of one CPU process; another number changes the order of sums"
    )


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """From raw rows to tokenised training, validation and held-out sets."""

    sft_path: str | None = identity(
        "builtin:synthetic",
        doc="demonstrations: JSONL, Parquet, `datasets` folder, Hub id, or `builtin:synthetic`",
    )
    sft_split: str = identity("train", doc="split of a `datasets` folder or Hub data set")
    sft_revision: str | None = identity(None, doc="pinned Hub revision; required for a Hub id")
    rl_path: str | None = identity(
        "builtin:synthetic", doc="prompts with rubrics; forms as in `data.sft_path`"
    )
    rl_split: str = identity("train", doc="split of a `datasets` folder or Hub data set")
    rl_revision: str | None = identity(None, doc="pinned Hub revision; required for a Hub id")
    held_out_fraction: float = identity(
        0.1, gt=0, lt=1, doc="share of questions held out for evaluation (0 < x < 1)"
    )
    validation_fraction: float = identity(
        0.05,
        ge=0,
        lt=1,
        doc="share of demonstrations held out for the SFT validation loss (0 <= x < 1)",
    )
    max_prompt_token_length: int = identity(
        6144, ge=1, doc="longer prompts are dropped and counted, never cut (tokens)"
    )
    refiner_mode: str | None = identity(
        None, doc="keep only rows of this mode, e.g. `answer_only`; none keeps all"
    )
    max_sft_rows: int | None = identity(None, ge=1, doc="use at most this many demonstrations")
    max_rl_rows: int | None = identity(None, ge=1, doc="use at most this many prompts")
    synthetic_sft_rows: int = identity(3000, ge=1, doc="rows of `builtin:synthetic` for SFT")
    synthetic_rl_rows: int = identity(1000, ge=1, doc="rows of `builtin:synthetic` for RL")
    split_seed: int = identity(
        0, doc="seed of the split; not the run seed, so that all seeds of an arm share prompts"
    )
    synthetic_seed: int = identity(0, doc="seed of the generated facts (not of the split)")
    all_held_out: bool = added(
        False, doc="hold out every prompt: rows for evaluation only (see `evaluate.protocols`)"
    )
    resources: Resources = section(Resources, doc="resources of the data job")
