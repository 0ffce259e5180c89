"""Ten rows of real research questions (``tests/data/scholarqa``, with source and licence there)."""

from __future__ import annotations

from pathlib import Path

REAL_ROWS = Path(__file__).resolve().parents[1] / "data" / "scholarqa"
SFT_ROWS, RL_ROWS = REAL_ROWS / "sft.jsonl", REAL_ROWS / "rl.jsonl"
