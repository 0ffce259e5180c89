"""A model comes in checked, and its state goes to disk and back."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from refiner_core.contract.config import DispatchConfig, ModelConfig, RecipeConfig
from refiner_core.contract.errors import (
    ConfigurationError,
    DamagedCheckpoint,
    UnsupportedError,
    WorkspaceError,
)
from refiner_core.contract.placement import refuse_unsupported
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.engines.protocol import PROGRESS
from refiner_core.training.model import loading
from tests.support.tiny_training import save_tiny_model, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


def engine(model, muon: float | None = None) -> PlainEngine:
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
    loaded = loading.Loaded(model, tiny_tokenizer(), share_prompts=False, balance=None)
    return PlainEngine(loaded, ModelConfig(), **settings, muon_learning_rate=muon)


def sharded(**changes) -> RecipeConfig:
    config = RecipeConfig()
    return replace(config, sft=replace(config.sft, deepspeed_stage=2, **changes))


def test_a_machine_without_deepspeed_refuses_it_by_the_field(monkeypatch):
    refuse_unsupported(sharded())
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    with pytest.raises(UnsupportedError, match=r"sft\.deepspeed_stage"):
        refuse_unsupported(sharded())
    with pytest.raises(UnsupportedError, match=r"sft\.deepspeed_stage"):
        refuse_unsupported(replace(sharded(), stages=()), "sft")
    refuse_unsupported(sharded(), "grpo")
    elsewhere = replace(sharded(), dispatch=replace(DispatchConfig(), executor="slurm"))
    refuse_unsupported(elsewhere)  # what a node has is seen there
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
def test_an_exported_model_loads_as_it_was(tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    folder = tmp_path / "out" / "model"
    folder.mkdir(parents=True)
    (folder / "leftover").write_text("of an earlier try")
    loading.export(model, tiny_tokenizer(), folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert AutoTokenizer.from_pretrained(folder).decode([4, 5]) == "w4 w5"
    assert not (folder / "leftover").exists()


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


@pytest.mark.parametrize("muon", [None, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_goes_on_bitwise(tmp_path, dtype, muon):
    def train(engine: PlainEngine) -> list[float]:
        ids = torch.arange(3, 13)[None]
        losses = []
        for _ in range(2):
            loss = engine.model(ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step(1.0)
            losses.append(float(loss.detach()))
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


def test_nan_never_enters_the_progress_file(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="JSON"):
        engine(model).snapshot({"loss": float("nan")}).write(tmp_path)
