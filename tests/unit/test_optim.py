"""Optimisers and schedules: what moves, by how much, and that a state survives saving."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from refiner_core.contract.config import ModelConfig
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.model.loading import Loaded
from refiner_core.training.model.optim import orthogonalize, schedule_factor
from tests.support.tiny_training import tiny_model, tiny_tokenizer


def test_warmup_rises_to_the_peak_and_the_schedules_end_near_zero():
    factors = [schedule_factor(s, 10, "cosine", warmup_ratio=0.2) for s in range(10)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors == sorted(factors[:2]) + sorted(factors[2:], reverse=True)
    assert 0 < factors[-1] < 0.05
    assert [schedule_factor(s, 4, "linear") for s in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert {schedule_factor(s, 4, "constant") for s in range(4)} == {1.0}


@pytest.mark.parametrize("shape", [(2, 8, 8), (3, 16, 4), (3, 4, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert singular.min() > 0.5
    assert singular.max() < 1.3


def engine(model, **changes) -> PlainEngine:
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
    loaded = Loaded(model, tiny_tokenizer(), share_prompts=False, balance=None)
    return PlainEngine(loaded, ModelConfig(), **(settings | changes))


def states_of(trainer: PlainEngine) -> dict[str, Any]:
    return dict(trainer.states(lambda _: True))


def backward(model, scale: float = 1.0) -> None:
    ids = torch.arange(3, 13)[None]
    (scale * model(ids, labels=ids, use_cache=False).loss).backward()


def test_muon_takes_hidden_matrices_and_leaves_the_embedding_to_adamw():
    model = tiny_model()
    up = engine(model, muon_learning_rate=0.01)
    backward(model)
    up.step(1.0)
    states = states_of(up)
    muon = {name for name, state in states.items() if "momentum" in state}
    matrices = {n for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n}
    assert muon == matrices
    assert len(matrices) == 14
    assert all("exp_avg" in states[name] for name in states.keys() - muon)


def test_the_gradient_is_clipped_and_its_norm_before_that_is_returned():
    small, large = tiny_model(), tiny_model()
    for model, scale in ((small, 100.0), (large, 1000.0)):
        backward(model, scale)
    norms = [engine(model, max_grad_norm=0.1).step(1.0) for model in (small, large)]
    assert norms[1] == pytest.approx(10 * norms[0], rel=1e-4)
    for a, b in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    backward(model, math.nan)
    assert math.isnan(engine(model).step(1.0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_bitwise(dtype):
    def run(model, up, steps) -> None:
        for _ in range(steps):
            backward(model)
            up.step(0.5)

    model = tiny_model().to(dtype)
    up = engine(model, muon_learning_rate=0.01)
    run(model, up, 2)
    other = tiny_model(seed=5).to(dtype)
    other.load_state_dict(model.state_dict())
    other_up = engine(other, muon_learning_rate=0.01)
    other_up.set_states(copy.deepcopy(states_of(up)).__getitem__)
    run(model, up, 2)
    run(other, other_up, 2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bfloat16_weights_move_at_learning_rates_below_their_resolution():
    model = tiny_model().to(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    up = engine(model, learning_rate=2e-5, weight_decay=0.0)
    for _ in range(30):
        backward(model)
        up.step(1.0)
    # One such step is far below half a unit in the last place of most weights; thirty add up.
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (model.state_dict()[name] != before[name]).float().mean()
    assert moved > 0.3
