"""Log-probabilities of a batch's targets under a model.

In: a causal language model of transformers and a :class:`~refiner_core.training.batches.Batch`.
Out: for each of T targets its log-probability in float32 and, if requested, the entropy there.

Only positions that predict a loss token go through the output head, in chunks: the backward pass
recomputes a chunk's logits, so that vocabulary x length logits never exist at once, forward or
backward. If everything fits into one chunk it is kept, which saves the recomputation.

:class:`ScoringModel` is the same computation as one module. ZeRO-3 needs that: it gathers a
module's weights when the module runs, and frees them afterwards.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from refiner_core.training.batches import Batch, block_mask, flex_mask

#: Whether entropies are computed, and whether a gradient flows through them.
Entropy = Literal["off", "metric", "loss"]

#: Logits in memory at once (float32 elements): 256 MiB.
CHUNK_ELEMENTS = 1 << 26


class TokenScores(NamedTuple):
    """Over T targets, float32. ``entropy_T`` is empty if not requested."""

    logprob_T: torch.Tensor
    entropy_T: torch.Tensor


def token_scores(
    model: Any, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
) -> TokenScores:
    """Scores of the targets; logits are divided by ``temperature`` first, as the sampler does."""
    head = model.get_output_embeddings()
    hidden_TD = hidden_states(model, batch)
    return head_scores(hidden_TD, head.weight, batch.target_T, temperature, entropy)


class ScoringModel(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Module form of :func:`token_scores`; its parameters are those of ``model``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.head = _Head(model.get_output_embeddings())

    def forward(
        self, batch: Batch | torch.Tensor, temperature: float = 1.0, entropy: Entropy = "off"
    ) -> Any:
        """The fields of :class:`TokenScores`, as a plain tuple; for token ids, all logits."""
        if isinstance(batch, torch.Tensor):
            output = self.model.base_model(input_ids=batch, use_cache=False)
            return self.head(output.last_hidden_state)
        hidden_TD = hidden_states(self.model, batch)
        scores: tuple[torch.Tensor, torch.Tensor] = self.head(
            hidden_TD, batch.target_T, temperature, entropy
        )
        return scores


class _Head(torch.nn.Module):  # type: ignore[misc]
    """The output head's weights with a forward of this module (tied weights stay tied)."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(
        self,
        hidden_TD: torch.Tensor,
        target_T: torch.Tensor | None = None,
        temperature: float = 1.0,
        entropy: Entropy = "off",
    ) -> Any:
        if target_T is None:
            return hidden_TD @ self.weight.mT
        return tuple(head_scores(hidden_TD, self.weight, target_T, temperature, entropy))


def hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """(T, D): the last hidden state at each position that predicts a target."""
    output = model.base_model(
        input_ids=batch.input_ids_BL,
        position_ids=batch.position_ids_BL,
        attention_mask=_mask_for(model, batch),
        use_cache=False,  # with a cache the blocks of a pack leak into each other
    )
    hidden: torch.Tensor = output.last_hidden_state.flatten(0, 1)[batch.source_T]
    return hidden


def head_scores(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float = 1.0,
    entropy: Entropy = "off",
) -> TokenScores:
    """Scores from hidden states. Logits have the type of the weights, everything else is
    float32."""
    return TokenScores(*_LinearLogprob.apply(hidden_TD, weight_VD, target_T, temperature, entropy))


def _mask_for(model: Any, batch: Batch) -> Any:
    """The mask of shared prompts: sdpa takes booleans; eager attention adds it to the scores;
    FlexAttention takes blocks."""
    kernel = model.config._attn_implementation
    if batch.segments_2BL is None:
        return None
    if kernel not in ("sdpa", "eager"):
        return flex_mask(batch.segments_2BL)
    mask = block_mask(batch.segments_2BL)
    if kernel == "sdpa":
        return mask
    lowest = torch.finfo(model.dtype).min
    return torch.where(mask, 0.0, lowest).to(model.dtype)


class _LinearLogprob(torch.autograd.Function):  # type: ignore[misc]
    """Head and log-softmax in one, a chunk of T rows at a time.

    With p = softmax(z) and H its entropy: d logp_target / d z = onehot - p, and
    d H / d z = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_T: torch.Tensor,
        temperature: float,
        entropy: Entropy,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprob_T = hidden_TD.new_empty(len(hidden_TD), dtype=torch.float32)
        entropy_T = logprob_T.new_empty(0 if entropy == "off" else len(logprob_T))
        logp_TV: torch.Tensor | None = None
        chunks = _chunks(len(hidden_TD), weight_VD.shape[0])
        for rows in chunks:
            logp_TV = _log_softmax(hidden_TD[rows], weight_VD, temperature)
            logprob_T[rows] = logp_TV.gather(-1, target_T[rows, None]).squeeze(-1)
            if entropy != "off":
                entropy_T[rows] = _entropy(logp_TV)
        if entropy != "loss":
            ctx.mark_non_differentiable(entropy_T)
        wanted = any(ctx.needs_input_grad[:2])
        kept = logp_TV if wanted and len(chunks) == 1 else None
        ctx.save_for_backward(hidden_TD, weight_VD, target_T, entropy_T, kept)
        ctx.temperature, ctx.entropy = temperature, entropy
        return logprob_T, entropy_T

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, grad_logprob_T: torch.Tensor, grad_entropy_T: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD, target_T, entropy_T, kept_TV = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        chunks = _chunks(len(hidden_TD), weight_VD.shape[0])
        grad_TD = torch.empty_like(hidden_TD) if of_hidden else None
        # One chunk's gradient may stay in the type of the weights; sums of several may not.
        several = torch.float32 if len(chunks) > 1 else weight_VD.dtype
        grad_VD = torch.zeros_like(weight_VD, dtype=several) if of_weight else None
        for rows in chunks:
            logp_TV = kept_TV
            if logp_TV is None:
                logp_TV = _log_softmax(hidden_TD[rows], weight_VD, ctx.temperature)
            logit_TV = _grad_of_logits(
                *(logp_TV, target_T[rows], grad_logprob_T[rows]),
                *((entropy_T[rows], grad_entropy_T[rows]) if ctx.entropy == "loss" else ()),
            )
            del logp_TV
            if ctx.temperature != 1.0:
                logit_TV.div_(ctx.temperature)
            logit_TV = logit_TV.to(weight_VD.dtype)
            if grad_TD is not None:
                torch.mm(logit_TV, weight_VD, out=grad_TD[rows])
            if grad_VD is not None and len(chunks) == 1:
                torch.mm(logit_TV.mT, hidden_TD, out=grad_VD)
            elif grad_VD is not None and grad_VD.dtype == logit_TV.dtype:
                grad_VD.addmm_(logit_TV.mT, hidden_TD[rows])
            elif grad_VD is not None:
                grad_VD.add_(logit_TV.mT @ hidden_TD[rows])
        return (
            grad_TD,
            None if grad_VD is None else grad_VD.to(weight_VD.dtype),
            *(None, None, None),
        )


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    """Slices of at most :data:`CHUNK_ELEMENTS` logits, at least one, of nearly equal length."""
    count = max(1, -(-rows * vocabulary // CHUNK_ELEMENTS))
    size = max(1, -(-rows // count))
    return [slice(start, start + size) for start in range(0, max(1, rows), size)]


def _log_softmax(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, temperature: float
) -> torch.Tensor:
    logits_TV = (hidden_TD @ weight_VD.mT).float()
    if temperature != 1.0:
        logits_TV.div_(temperature)
    return torch.log_softmax(logits_TV, dim=-1)


def _entropy(logp_TV: torch.Tensor) -> torch.Tensor:
    """Entropy without a third T x V tensor: a batch of inner products."""
    if logp_TV.shape[0] == 0:
        return logp_TV.new_empty(0)
    return -torch.bmm(logp_TV.exp()[:, None, :], logp_TV[:, :, None]).flatten()


def _grad_of_logits(
    logp_TV: torch.Tensor,
    target_T: torch.Tensor,
    grad_logprob_T: torch.Tensor,
    entropy_T: torch.Tensor | None = None,
    grad_entropy_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, V), before temperature; a new tensor."""
    p_TV = logp_TV.exp()
    if entropy_T is None or grad_entropy_T is None:
        grad_TV = p_TV.mul_(-grad_logprob_T[:, None])
    else:
        # -g p - h p (log p + H) = -p (h log p + h H + g)
        factor_TV = logp_TV * grad_entropy_T[:, None]
        factor_TV += (grad_entropy_T * entropy_T + grad_logprob_T)[:, None]
        grad_TV = p_TV.mul_(factor_TV).neg_()
    grad_TV.scatter_add_(-1, target_T[:, None], grad_logprob_T[:, None])
    return grad_TV
