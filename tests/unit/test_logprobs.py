"""The output head in chunks: the numbers of a plain head, and never all logits at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refiner_core.training.model import logprobs
from refiner_core.training.model.logprobs import head_scores

VOCABULARY, WIDTH = 60, 8


def plain(hidden, weight, target, temperature):
    """Log-probabilities and entropies in one go, in float64."""
    logits = hidden.double() @ weight.double().mT
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(-1, target[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def inputs(rows: int, dtype=torch.float32):
    torch.manual_seed(rows)
    shapes = [(rows, WIDTH), (VOCABULARY, WIDTH)]
    made = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return (*made, torch.randint(0, VOCABULARY, (rows,)))


@pytest.mark.parametrize("entropy", ["off", "metric", "loss"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("rows", "chunk"), [(0, 1000), (1, 1), (17, 5 * VOCABULARY), (17, 10**9)])
def test_it_is_a_plain_head(monkeypatch, rows, chunk, temperature, entropy):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    hidden, weight, target = inputs(rows)
    wanted = [hidden, weight]
    got = head_scores(hidden, weight, target, temperature, entropy)
    expected = plain(hidden, weight, target, temperature)
    torch.testing.assert_close(got.logprob_T, expected[0].float(), rtol=1e-5, atol=1e-5)
    weights_T = torch.linspace(-1, 1, rows)
    loss, loss_64 = ((scores[0] * weights_T).sum() for scores in (got, expected))
    if entropy == "off":
        assert got.entropy_T.numel() == 0
    else:
        torch.testing.assert_close(got.entropy_T, expected[1].float(), rtol=1e-5, atol=1e-5)
        assert got.entropy_T.requires_grad == (entropy == "loss")
    if entropy == "loss":
        loss, loss_64 = loss + 0.3 * got.entropy_T.sum(), loss_64 + 0.3 * expected[1].sum()
    for mine, right in zip(
        torch.autograd.grad(loss, wanted), torch.autograd.grad(loss_64, wanted), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_bfloat16_weights_get_gradients_that_were_added_up_in_float32(monkeypatch):
    hidden, weight, target = inputs(400, torch.bfloat16)
    right = torch.autograd.grad(plain(hidden, weight, target, 1.0)[0].sum(), weight)[0]
    errors = {}
    for chunk in (10**9, 2 * VOCABULARY):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
        scores = head_scores(hidden, weight, target)
        [mine] = torch.autograd.grad(scores.logprob_T.sum(), weight)
        assert mine.dtype == torch.bfloat16
        errors[chunk] = float((mine.double() - right.double()).norm() / right.double().norm())
    assert errors[2 * VOCABULARY] < 2 * max(errors[10**9], 2**-9), errors


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("entropy", ["off", "metric", "loss"])
def test_logits_of_all_positions_never_stand_in_memory_at_once(monkeypatch, entropy):
    rows, chunk = 200, 7 * VOCABULARY
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    hidden, weight, target = inputs(rows)
    with _Largest() as largest:
        scores = head_scores(hidden, weight, target, 0.9, entropy)
        loss = scores.logprob_T.sum() + (scores.entropy_T.sum() if entropy == "loss" else 0)
        loss.backward()
    assert largest.elements <= max(chunk, rows * WIDTH, VOCABULARY * WIDTH)
    assert largest.elements < rows * VOCABULARY
    assert math.isfinite(float(weight.grad.norm()))
