"""A model that cannot do what a recipe asks for is refused when the plan is made, by its files."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.api import make_recipe_plan
from flows.checking.models import (
    check_model_files,
    judge_notes,
    layer_notes,
    model_files,
    position_notes,
)
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


def weights(folder: Path, names: Mapping[str, tuple[int, ...]], short: int = 0) -> None:
    """A safetensors file with tensors of that shape, ``short`` bytes too short."""
    header, begin = dict[str, Any](), 0
    for name, shape in names.items():
        size = 4 * int(shape[0] * shape[-1])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * (begin - short))


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
            lambda f: weights(f, {"model.embed_tokens.weight": (WORDS, 128)}, short=9),
            {},
            r"model\.safetensors .* is cut short: it has 427,\d+ bytes",
        ),
        (config(max_position_embeddings=300), {}, r"has 300 tokens, and data\..* is 304"),
        (config(final_logit_softcapping=30.0), {}, r"final_logit_softcapping \(30\.0\)"),
        (config(logits_scaling=8.0), {}, r"scale of logits \(8\.0\)"),
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
        (config(logits_scaling=1.0), {}),
        (config(layer_types=["linear_attention"] * 3 + ["full_attention"]), {}),
        (tokenizer(chat_template=...), {"model__chat_template": "{{ messages }}"}),
        (tokenizer(eos_token={"content": "<|im_end|>"}), {}),
        (tokenizer(chat_template=[{"name": "default", "template": "x"}]), {}),
        (config(vocab_size=...), {}),
        (gone("model.safetensors", "tokenizer.json"), {"only": ("publish",)}),
        (in_pickles, {}),
    ],
)
def test_fitting_models_pass(tmp_path: Path, edit: Edit | None, fields: dict[str, Any]) -> None:
    folder = copied(tmp_path / "model")
    if edit is not None:
        edit(folder)
    check_model_files(recipe(folder, **fields))


def test_a_plan_notes_what_recurrent_layers_cost(tmp_path: Path) -> None:
    folder = copied(tmp_path / "model")
    assert not layer_notes(recipe(folder))
    config(layer_types=["linear_attention"] * 3 + ["full_attention"])(folder)
    (note,) = layer_notes(recipe(folder))
    assert "(linear_attention)" in note
    assert "row of its own" in note


def test_embeddings_of_the_model_must_hold_all_tokens(tmp_path: Path) -> None:
    """Qwen3 has 151,936 embeddings for a tokenizer of 151,669: the rest is padding."""
    folder, other = copied(tmp_path / "model"), copied(tmp_path / "other")
    tokens_up_to(5000)(other)
    with pytest.raises(ConfigurationError, match=r"\(model\.tokenizer_name_or_path, .*up to 5,000"):
        check_model_files(recipe(folder, model__tokenizer_name_or_path=str(other)))
    config(vocab_size=1024)(folder)
    weights(folder, {"model.embed_tokens.weight": (1024, 128)})
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


@pytest.mark.parametrize(
    ("model", "fields", "noted"),
    [
        ("Qwen/Qwen3.5-35B-A3B", {}, True),
        ("Qwen/Qwen3.5-35B-A3B", {"max_tokens": 8192}, False),
        ("Qwen/Qwen3.5-35B-A3B", {"extra_body": '{"chat_template_kwargs": {}}'}, True),
        ("Qwen/Qwen3.5-35B-A3B", {"extra_body": '{"reasoning_effort": "low"}'}, False),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", {}, False),
        ("gpt-4.1-mini", {}, False),
        ("{}", {}, True),
        ("{}", {"extra_body": '{"chat_template_kwargs": {"enable_thinking": false}}'}, False),
    ],
)
def test_a_judge_that_reasons_by_default_is_noted_by_its_template_or_name(
    tmp_path: Path, model: str, fields: dict[str, Any], noted: bool
) -> None:
    """The shipped model's template is that of models whose reasoning can be switched off."""
    name = model.replace("{}", str(copied(tmp_path / "judge")))
    values = {"kind": "openai", "model": name, "base_url": "http://127.0.0.1:1/v1", **fields}
    asked = replace_fields(TINY, {f"judge.{key}": value for key, value in values.items()})
    assert bool(judge_notes(asked)) == noted


@pytest.mark.parametrize(("opens", "noted"), [("<think>\n", True), ("", False)])
def test_a_judge_whose_template_opens_the_reasoning_is_noted(
    tmp_path: Path, opens: str, noted: bool
) -> None:
    template = "{{ messages[0].content.split('</think>')[-1] }}{% if add_generation_prompt %}A: "
    name = str(copied(tmp_path / "judge"))
    (tmp_path / "judge" / "chat_template.jinja").write_text(template + opens + "{% endif %}")
    values = {"kind": "openai", "model": name, "base_url": "http://127.0.0.1:1/v1"}
    asked = replace_fields(TINY, {f"judge.{key}": value for key, value in values.items()})
    assert bool(judge_notes(asked)) == noted


@pytest.mark.parametrize("name", ["refiner-gpt54", "refiner-instance-only", "refiner-answer-only"])
def test_the_judge_of_the_large_recipes_does_not_reason(name: str) -> None:
    assert judge_notes(load_recipe(name)) == []


FIRST = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("rope", "noted"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}, FIRST: 64}, True),
        ({"rope_scaling": {"type": "su", FIRST: 64}}, True),
        ({"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 9000}, False),
        ({"rope_parameters": {"rope_type": "yarn"}, FIRST: 64}, False),
    ],
)
def test_positions_that_depend_on_the_batch_are_noted_before_the_queue(
    tmp_path: Path, rope: dict[str, Any], noted: bool
) -> None:
    folder = copied(tmp_path / "model")
    edited(folder, "config.json", rope_parameters=..., rope_scaling=...)
    edited(folder, "config.json", **rope)
    assert bool(position_notes(recipe(folder))) == noted
