"""Formulas of the loss and of advantages, by hand; the output head in chunks is a plain one."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refiner_core.training.model import logprobs
from refiner_core.training.model.logprobs import head_scores
from refiner_core.training.rollouts.rollout import group_advantages
from refiner_core.training.updates import (
    importance_weights,
    kl_estimates,
    packs_in_order,
    policy_terms,
    token_weights,
)


def estimates(d: float, ratio: float = 1.0) -> dict[str, float]:
    one = torch.ones(1)
    values = kl_estimates(torch.tensor([d]), torch.zeros(1), ratio * one)
    return {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize(("d", "kl2", "kl3"), [(-1.0, 0.5, 0.718282), (0.5, 0.125, 0.106531)])
def test_kl_vectors(d, kl2, kl3):
    values = estimates(d, ratio=3.0)
    assert values == pytest.approx({"kl1": d, "kl2": kl2, "kl3": kl3, "kl4": 3 * d}, abs=1e-6)


def test_kl3_is_the_unbiased_estimate_and_never_negative():
    logits = torch.tensor([0.3, -1.0, 0.7])
    policy, reference = torch.log_softmax(logits, 0), torch.log_softmax(-logits, 0)
    values = kl_estimates(policy, reference, torch.ones(3))
    exact = (policy.exp() * (policy - reference)).sum()
    # E_policy of expm1(-d) is 0, so kl1 and kl3 have the same mean.
    torch.testing.assert_close((policy.exp() * values["kl3"]).sum(), exact)
    assert (values["kl3"] >= 0).all()


def test_the_clip_is_asymmetric_and_one_sided():
    log_ratio = torch.tensor([math.log(1.5), math.log(0.5), math.log(1.5), math.log(0.5)])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss_T, _, clipped_T = policy_terms(
        log_ratio, torch.zeros(4), advantage, clip_lower=0.2, clip_higher=0.28
    )
    assert loss_T.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8])
    assert clipped_T.tolist() == [True, False, False, True]


def test_an_unmoved_policy_has_ratio_one_and_a_gradient():
    logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss_T, ratio_T, _ = policy_terms(
        logprob, logprob.detach(), torch.tensor([2.0, -1.0]), clip_lower=0.2, clip_higher=0.2
    )
    loss_T.sum().backward()
    assert ratio_T.tolist() == [1.0, 1.0]
    assert logprob.grad.tolist() == [-2.0, 1.0]


def test_importance_weights_are_capped_above_only():
    old = torch.tensor([0.0, 0.0, 0.0])
    sampler = torch.tensor([-2.0, 0.0, 2.0])
    weights = importance_weights(old, sampler, 2.0)
    assert weights.tolist() == pytest.approx([2.0, 1.0, math.exp(-2)])
    assert importance_weights(old, sampler, 0.0).tolist() == [1.0, 1.0, 1.0]


def test_aggregation_weights():
    """[[1, 2, 3], [4, 5, 6]] under the mask [[1, 1, 0], [1, 0, 0]]: means 7/3 and 2.75."""
    assert token_weights([2, 1], "token") == pytest.approx([1 / 3, 1 / 3])
    assert token_weights([2, 1], "sequence") == [0.25, 0.5]
    assert token_weights([4, 0, 1], "sequence") == [0.125, 0.0, 0.5]
    assert token_weights([4, 2, 1, 0], "pack", packs=[0, 0, 1, 2]) == [1 / 12, 1 / 12, 0.5, 0.0]
    assert packs_in_order([6, 4, 1, 9, 12], 10) == [0, 0, 1, 1, 2]
    assert token_weights([3, 1], "constant", constant=10.0) == [0.1, 0.1]
    assert token_weights([0, 0], "token") == token_weights([0, 0], "sequence") == [0.0, 0.0]


@pytest.mark.parametrize(
    ("normalization", "low", "high"),
    [("standard", -0.57735, 1.73205), ("centered", -2.5, 7.5), ("sample_std", -0.5, 1.5)],
)
def test_reference_vectors(normalization, low, high):
    group = group_advantages([0.0, 0.0, 0.0, 10.0], normalization)
    assert group.dropped is None
    assert group.values == pytest.approx((low, low, low, high), abs=1e-5)


@pytest.mark.parametrize("normalization", ["standard", "centered", "sample_std"])
def test_an_unscored_sample_changes_nothing_for_the_others(normalization):
    without = group_advantages([0.0, 4.0, 10.0], normalization).values
    with_failed = group_advantages([0.0, None, 4.0, 10.0, None], normalization).values
    assert with_failed == (without[0], None, without[1], without[2], None)


@pytest.mark.parametrize("rewards", [[1.0, None, None], [None, None], []])
def test_a_group_with_nothing_to_compare_is_dropped(rewards):
    group = group_advantages(rewards)
    assert group.dropped == "too_few_scored"
    assert group.values == (None,) * len(rewards)


def test_a_group_without_spread_is_dropped():
    group = group_advantages([2.0, None, 2.0])
    assert group.dropped == "zero_std"
    assert group.values == (0.0, None, 0.0)


def test_rounding_noise_is_not_spread():
    noisy = [0.1 + 0.2, 0.3, 0.3]
    assert len(set(noisy)) == 2
    assert group_advantages(noisy).dropped == "zero_std"


# ---------------------------------------------------------------- the output head


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
