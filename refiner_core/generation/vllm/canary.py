"""Whether a server has the trainer's weights: both score one fixed prompt.

In: the live model and its tokenizer. Out: a prompt and its log-probabilities by the trainer; later,
whether a server's are the same. It finds what a server does not say: an output head that stayed
old, a checkpoint that was read half, another type of numbers. What it cannot find is a change of
weights that is smaller than the tolerance; the version that servers report is for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

_TEXT = (
    "The answer cites only what the search has found: two snippets agree that the bridge was "
    "opened in 1932, and a third one names the engineer."
)
_TOKENS = 32
_FEWEST = 8
#: Largest difference by the type of the weights, where the recipe says none.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass(frozen=True)
class Canary:
    """A prompt and what its tokens but the first should have as log-probabilities."""

    prompt_ids: tuple[int, ...]
    expected: tuple[float, ...]

    def difference(self, scores: Sequence[float]) -> float:
        """The largest difference to the trainer's."""
        return max(abs(a - b) for a, b in zip(self.expected, scores, strict=True))


def tolerance_of(configured: float | None, dtype: Literal["float32", "bfloat16"]) -> float:
    """How large a difference may be."""
    return TOLERANCE[dtype] if configured is None else configured


def make_canary(model: Any, tokenizer: Any) -> Canary:
    """Let the live model score the prompt; it is left in the mode in which it was."""
    prompt_ids = canary_ids(tokenizer, int(model.config.get_text_config().vocab_size))
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids_T = torch.tensor([prompt_ids], device=model.device)
            logits_T_V = model(input_ids=ids_T, use_cache=False).logits[0, :-1].float()
            chosen_T = ids_T[0, 1:, None]
            logprobs_T = logits_T_V.log_softmax(-1).gather(-1, chosen_T)[:, 0]
    finally:
        model.train(training)
    return Canary(prompt_ids, tuple(logprobs_T.cpu().tolist()))


def canary_ids(tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    """A sentence, or numbers where the tokenizer has too few different words for one."""
    ids = [i for i in tokenizer(_TEXT)["input_ids"][:_TOKENS] if i < vocabulary]
    if len(set(ids)) >= _FEWEST:
        return tuple(ids)
    return tuple((7 * place + 5) % vocabulary for place in range(_TOKENS))
