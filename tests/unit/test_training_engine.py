"""The training engine: checks of a model, its state on disk, optimisers and schedules."""

import copy
import importlib.util
import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from refiner_core.contract.config import DispatchConfig, ModelConfig, RecipeConfig
from refiner_core.contract.errors import (
    ConfigurationError,
    DamagedCheckpoint,
    UnsupportedError,
    WorkspaceError,
)
from refiner_core.contract.placement import refuse_unsupported
from refiner_core.generation.saving import model_tensors, save_model
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.engines.protocol import PROGRESS
from refiner_core.training.model import loading
from refiner_core.training.model.optim import orthogonalize, schedule_factor
from tests.support.tiny_training import save_tiny_model, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


def engine(model, muon: float | None = None, **changes: Any) -> PlainEngine:
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
    loaded = loading.LoadedModel(model, tiny_tokenizer(), share_prompts=False, balance=None)
    return PlainEngine(loaded, ModelConfig(), **(settings | changes), muon_learning_rate=muon)


def backward(model, scale: float = 1.0) -> float:
    ids = torch.arange(3, 13)[None]
    loss = model(ids, labels=ids, use_cache=False).loss
    (scale * loss).backward()
    return float(loss.detach())


def test_a_machine_without_deepspeed_refuses_it_by_the_field(monkeypatch):
    base = RecipeConfig()
    sharded = replace(base, sft=replace(base.sft, deepspeed_stage=2))
    refuse_unsupported(sharded)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    with pytest.raises(UnsupportedError, match=r"sft\.deepspeed_stage"):
        refuse_unsupported(sharded)
    refuse_unsupported(sharded, "grpo")
    elsewhere = replace(sharded, dispatch=replace(DispatchConfig(), executor="slurm"))
    refuse_unsupported(elsewhere)  # the node is checked there
    with pytest.raises(UnsupportedError, match="deepspeed"):
        refuse_unsupported(elsewhere, "sft")


def test_demonstrations_longer_than_the_models_window_are_refused_with_both_numbers(tmp_path):
    model = loading.load_for_training(str(save_tiny_model(tmp_path)), ModelConfig(), CPU).model
    window = model.config.max_position_embeddings
    loading.check_window(model, window)
    with pytest.raises(ConfigurationError, match=rf"{window + 1} tokens.*has {window}"):
        loading.check_window(model, window + 1)


def test_a_model_whose_packs_leak_is_refused(tmp_path, monkeypatch):
    loaded = loading.load_for_training(str(save_tiny_model(tmp_path)), ModelConfig(), CPU)

    def leaky(model, batch):  # transformers' default: with a cache, blocks see each other
        out = model.base_model(
            input_ids=batch.input_ids_BL, position_ids=batch.position_ids_BL, use_cache=True
        )
        return out.last_hidden_state.flatten(0, 1)[batch.source_T]

    monkeypatch.setattr(loading, "hidden_states", leaky)
    with pytest.raises(UnsupportedError, match="see each other"):
        loading.check_model(loaded)


def test_a_model_with_more_than_a_plain_head_is_refused(tmp_path, monkeypatch):
    loaded = loading.load_for_training(str(save_tiny_model(tmp_path)), ModelConfig(), CPU)
    head = torch.nn.Linear(32, 48, bias=False)
    monkeypatch.setattr(loaded.model, "get_output_embeddings", lambda: head)
    with pytest.raises(UnsupportedError, match="head"):
        loading.check_model(loaded)


@pytest.mark.parametrize("tied", [True, False])
def test_a_small_model_is_one_file_as_transformers_writes_it(tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    folder = tmp_path / "out" / "model"
    folder.mkdir(parents=True)
    (folder / "leftover").write_text("of an earlier try")
    save_model(model, tiny_tokenizer(), folder, model_tensors(model).items())
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert AutoTokenizer.from_pretrained(folder).decode([4, 5]) == "w4 w5"
    assert not (folder / "leftover").exists()
    model.save_pretrained(tmp_path / "theirs")
    for file in (tmp_path / "theirs").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_model_is_written_in_shards_with_an_index(tmp_path, tied):
    model, folder = tiny_model(tie_word_embeddings=tied), tmp_path / "model"
    largest = max(parameter.nbytes for parameter in model.parameters())
    weights = model_tensors(model).items()
    save_model(model, tiny_tokenizer(), folder, weights, shard_bytes=largest)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert [s.name for s in shards] == [
        f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)
    ]
    held = [sum(t.nbytes for t in load_file(shard).values()) for shard in shards]
    assert max(held) <= largest
    model.save_pretrained(tmp_path / "theirs", max_shard_size=largest)
    index, theirs = (
        json.loads((at / "model.safetensors.index.json").read_text())
        for at in (folder, tmp_path / "theirs")
    )
    assert index["metadata"] == theirs["metadata"]
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_state_comes_back_with_every_random_state(tmp_path):
    model = tiny_model()
    engine(model).snapshot({"step": 3, "losses": [0.1, 1 / 3]}).write(tmp_path)

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    expected = draw()
    other = tiny_model(seed=1)
    progress = engine(other).restore(tmp_path)
    assert progress == {"step": 3, "losses": [0.1, 1 / 3]}
    assert draw() == expected
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_a_checkpoint_of_another_model_or_format_is_refused(tmp_path):
    model = tiny_model()
    engine(model).snapshot({}).write(tmp_path)
    other = tiny_model(num_hidden_layers=1)
    with pytest.raises(WorkspaceError, match="another model"):
        engine(other).restore(tmp_path)
    (tmp_path / PROGRESS).write_text(json.dumps({"format": 99}))
    with pytest.raises(WorkspaceError, match="another format"):
        engine(model).restore(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        engine(model).snapshot({"loss": float("nan")}).write(tmp_path)


@pytest.mark.parametrize("muon", [None, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_resumes_bitwise(tmp_path, dtype, muon):
    def train(engine: PlainEngine) -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(backward(engine.model))
            engine.step(0.5)
        return losses

    one, two = (engine(tiny_model(seed).to(dtype), muon) for seed in (0, 1))
    train(one)
    one.snapshot({"step": 2}).write(tmp_path)
    assert two.restore(tmp_path) == {"step": 2}
    assert train(two) == train(one)
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["model", "state-rank00000-of-00001", "rng-rank00000-of-00001"])
def test_a_file_that_is_cut_short_is_found_before_anything_changes(tmp_path, name):
    model = tiny_model()
    engine(model).snapshot({}).write(tmp_path)
    [path] = tmp_path.glob(f"{name}.*")
    path.write_bytes(path.read_bytes()[:-40])
    other = tiny_model(seed=1)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        engine(other).restore(tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


# ---------------------------------------------------------------- optimisers and schedules


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


def test_muon_takes_hidden_matrices_and_leaves_the_embedding_to_adamw():
    model = tiny_model()
    up = engine(model, muon=0.01)
    backward(model)
    up.step(1.0)
    states = dict(up.states(lambda _: True))
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
