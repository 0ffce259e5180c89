"""Whether a server has the trainer's weights: both score one fixed prompt.

In: the live model and its tokenizer. Out: a prompt and its log-probabilities by the trainer; later,
whether a server's are the same. It finds what a server does not say: an output head that stayed
old, a checkpoint that was read half, another type of numbers, log-probabilities from before the
temperature. What it cannot find is a change of
weights that is smaller than the tolerance; the version that servers report is for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from refiner_core.generation.vllm.wire import SCORING_TEMPERATURE, Scores

_TEXT = (
    "The answer cites only what the search has found: two snippets agree that the bridge was "
    "opened in 1932, and a third one names the engineer."
)
_TOKENS = 32
_FEWEST = 8
#: Largest difference by the type of the weights, where the recipe says none.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass(frozen=True, eq=False)
class Canary:
    """A prompt and how the trainer scores it.

    ``expected`` are log-probabilities of its tokens but the first; ``next_logprobs_V`` those of
    all tokens that may come next, at the temperature of the canary.
    """

    prompt_ids: tuple[int, ...]
    expected: tuple[float, ...]
    next_logprobs_V: Tensor

    def difference(self, scores: Scores) -> float:
        """The largest difference to the trainer's; that of the next token in terms of logits."""
        prompt = max(abs(a - b) for a, b in zip(self.expected, scores.prompt, strict=True))
        sampled = abs(float(self.next_logprobs_V[scores.token]) - scores.logprob)
        return max(prompt, sampled * SCORING_TEMPERATURE)


def tolerance_of(configured: float | None, dtype: Literal["float32", "bfloat16"]) -> float:
    """How large a difference may be."""
    return TOLERANCE[dtype] if configured is None else configured


def make_canary(model: Any, tokenizer: Any, window: int) -> Canary:
    """Let the live model score the prompt, which leaves room for one token in ``window``; the model
    is left in the mode in which it was."""
    known = int(model.config.get_text_config().vocab_size)
    prompt_ids = canary_ids(tokenizer, known)[: window - 1]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids_T = torch.tensor([prompt_ids], device=model.device)
            logits_T_V = model(input_ids=ids_T, use_cache=False).logits[0].float()
            chosen_T = ids_T[0, 1:, None]
            logprobs_T = logits_T_V[:-1].log_softmax(-1).gather(-1, chosen_T)[:, 0]
            next_V = (logits_T_V[-1] / SCORING_TEMPERATURE).log_softmax(-1)
    finally:
        model.train(training)
    return Canary(prompt_ids, tuple(logprobs_T.cpu().tolist()), next_V.cpu())


def canary_ids(tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    """A sentence, or numbers where the tokenizer has too few different words for one."""
    ids = [i for i in tokenizer(_TEXT)["input_ids"][:_TOKENS] if i < vocabulary]
    if len(set(ids)) >= _FEWEST:
        return tuple(ids)
    return tuple((7 * place + 5) % vocabulary for place in range(_TOKENS))
