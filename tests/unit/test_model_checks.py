"""A model that cannot do what a recipe asks for is refused when the plan is made, by its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from flows.api import make_recipe_plan
from flows.checking.models import check_model_files, model_files
from flows.sweeping.planning import make_sweep_plan
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.models import tiny_model_dir

TINY = load_recipe("tiny")
WORDS = 835  # of the shipped model
Edit = Callable[[Path], None]


def copied(folder: Path) -> Path:
    """The shipped model in a folder of its own; its weights are a link."""
    folder.mkdir(parents=True)
    for path in tiny_model_dir().iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def edited(folder: Path, name: str, **changes: Any) -> None:
    """Fields of a JSON file; a value of ... takes one away."""
    value = {**json.loads((folder / name).read_text()), **changes}
    kept = {k: v for k, v in value.items() if v is not ...}
    (folder / name).write_text(json.dumps(kept))


def config(**changes: Any) -> Edit:
    return lambda folder: edited(folder, "config.json", **changes)


def tokenizer(**changes: Any) -> Edit:
    return lambda folder: edited(folder, "tokenizer_config.json", **changes)


def tokens_up_to(number: int) -> Edit:
    added = [{"id": number, "content": "<|im_end|>"}]
    return lambda folder: edited(folder, "tokenizer.json", added_tokens=added)


def gone(*names: str) -> Edit:
    def edit(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return edit


def embeddings(folder: Path, words: int, short: int = 0) -> None:
    """A safetensors file with embeddings of so many tokens, ``short`` bytes too short."""
    path = folder / "model.safetensors"
    path.unlink()
    data = save({"model.embed_tokens.weight": np.zeros((words, 128), np.float32)})
    path.write_bytes(data[: len(data) - short])


def recipe(folder: Path | str, **fields: Any) -> RecipeConfig:
    dotted = {name.replace("__", "."): value for name, value in fields.items()}
    return replace_fields(TINY, {"model.name_or_path": str(folder), **dotted})


def index_of_three(folder: Path) -> None:
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    (folder / "model.safetensors").rename(folder / shards[1])
    index = {"weight_map": dict(zip("abc", shards, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def in_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("edit", "fields", "says"),
    [
        (tokens_up_to(900), {}, r"ids up to 900.*embeddings of 835 tokens.*66 too many"),
        (tokenizer(chat_template=...), {}, r"has no chat template.*set model\.chat_template"),
        (
            config(max_position_embeddings=2048),
            {"environment__name": "desk", "grpo__max_token_length": 4096},
            r"has 2,048 tokens, and grpo\.max_token_length is 4,096",
        ),
        (tokenizer(eos_token=None), {}, r"no end-of-text token"),
        (gone("tokenizer.json"), {}, r"has no tokenizer.*tokenizer_name_or_path"),
        (index_of_three, {}, r"lacks 2 of the weight files.*model-00001-of"),
        (gone("model.safetensors"), {}, r"a configuration, but no weights"),
        (
            lambda f: embeddings(f, WORDS, short=9),
            {},
            r"model\.safetensors .* is cut short: it has 427,\d+ bytes",
        ),
        (config(max_position_embeddings=300), {}, r"has 300 tokens, and data\..* is 304"),
        (
            config(layer_types=["linear_attention"] * 3 + ["full_attention"]),
            {},
            r"layers of kind linear_attention.*runs on from one packed sequence",
        ),
        (config(final_logit_softcapping=30.0), {}, r"final_logit_softcapping \(30\.0\)"),
    ],
)
def test_wrong_models(tmp_path: Path, edit: Edit | None, fields: dict[str, Any], says: str) -> None:
    folder = copied(tmp_path / "model")
    if edit is not None:
        edit(folder)
    with pytest.raises(RefinerError, match=says) as refused:
        check_model_files(recipe(folder, **fields))
    assert all((refused.value.expected, refused.value.fix)), "what is right, and the fix"


@pytest.mark.parametrize(
    ("edit", "fields"),
    [
        (None, {}),
        (config(max_position_embeddings=304), {}),
        (
            config(max_position_embeddings=300, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
            {},
        ),
        (tokenizer(chat_template=...), {"model__chat_template": "{{ messages }}"}),
        (tokenizer(eos_token={"content": "<|im_end|>"}), {}),
        (gone("model.safetensors", "tokenizer.json"), {"only": ("publish",)}),
        (in_pickles, {}),
    ],
)
def test_fitting_models_pass(tmp_path: Path, edit: Edit | None, fields: dict[str, Any]) -> None:
    folder = copied(tmp_path / "model")
    if edit is not None:
        edit(folder)
    check_model_files(recipe(folder, **fields))


def test_embeddings_of_the_model_must_hold_all_tokens(tmp_path: Path) -> None:
    """Qwen3 has 151,936 embeddings for a tokenizer of 151,669: the rest is padding."""
    folder, other = copied(tmp_path / "model"), copied(tmp_path / "other")
    tokens_up_to(5000)(other)
    with pytest.raises(ConfigurationError, match=r"\(model\.tokenizer_name_or_path, .*up to 5,000"):
        check_model_files(recipe(folder, model__tokenizer_name_or_path=str(other)))
    config(vocab_size=1024)(folder)
    embeddings(folder, 1024)
    check_model_files(recipe(folder))


# ---------------------------------------------------------------- what is read


def cached(home: Path, complete: bool) -> Path:
    """The shipped model as a snapshot of somebody/model in a Hub cache."""
    repository = home / "hub" / "models--somebody--model"
    folder = copied(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    (repository / "blobs").mkdir()
    if not complete:
        (repository / "blobs" / "0f.incomplete").write_bytes(b"")
    return folder


@pytest.mark.parametrize("complete", [True, False])
def test_a_cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    wanted = recipe("somebody/model")
    check_model_files(wanted)  # nothing is here yet
    folder = cached(tmp_path, complete)
    if not complete:
        gone("model.safetensors", "tokenizer.json", "tokenizer_config.json")(folder)
    check_model_files(wanted)
    config(max_position_embeddings=100)(folder)
    with pytest.raises(ConfigurationError, match="has 100 tokens"):
        check_model_files(wanted)
    check_model_files(replace_fields(wanted, {"model.revision": "v2"}))  # that one is not here


@pytest.mark.parametrize("damaged", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_cannot_be_read_is_left_to_who_loads_it(tmp_path: Path, damaged: str) -> None:
    folder = copied(tmp_path / "model")
    (folder / damaged).unlink()
    (folder / damaged).write_bytes(b"\xff{<|im_end|>")
    assert model_files(str(folder), "main") is not None
    check_model_files(recipe(folder))


# ---------------------------------------------------------------- where it is asked


def test_plans_of_recipes_and_sweeps_refuse_it(tmp_path: Path) -> None:
    folder = copied(tmp_path / "model")
    config(max_position_embeddings=100)(folder)
    overrides = [f"model.name_or_path={folder}", f"workspace={tmp_path / 'none'}"]
    with pytest.raises(ConfigurationError, match="has 100 tokens"):
        make_recipe_plan("tiny", overrides)
    with pytest.raises(ConfigurationError, match="has 100 tokens"):
        make_sweep_plan("kl-tiny", overrides)
