"""A model in several files: published with its card, adopted, checked and loaded like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from flows.adopting import adopt_run
from flows.checking.models import check_model_files
from infra.external.exports import lacking
from refiner_core.cards.evidence import load_evidence
from refiner_core.cards.lint import lint_card
from refiner_core.contract.config import ModelConfig
from refiner_core.contract.errors import ConfigurationError, StageFailed
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.generation.load import load_model, load_tokenizer
from refiner_core.generation.saving import model_tensors, save_model
from tests.support import recorded_run
from tests.support.recorded_run import RecordedRun

BUILTIN = "builtin:tiny"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The built-in model, exported in several files."""
    model, tokenizer = load_model(BUILTIN, ModelConfig()), load_tokenizer(BUILTIN, ModelConfig())
    weights = model_tensors(model).items()
    save_model(model, tokenizer, tmp_path / "sharded", weights, shard_bytes=1 << 20)
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 2
    return tmp_path / "sharded"


def same_weights(folder: Path) -> bool:
    """Whether stages that read the folder (evaluation, sampling, training) get the model."""
    ours, theirs = (load_model(ref, ModelConfig()) for ref in (str(folder), BUILTIN))
    return all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


@pytest.mark.slow
def test_all_shards_are_published_with_index_and_card(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_run, "write_model", lambda at, _: shutil.copytree(sharded, at))
    run = RecordedRun(tmp_path / "runs")
    run.data()
    run.train("sft")
    run.train("grpo")
    for model in ("base", "sft", "grpo"):
        run.evaluate(f"evaluate-{model}", quality=0.5)
    run.carry_out("publish")
    run.carry_out("card")
    published = run.published("publish")
    assert {p.name for p in sharded.iterdir()} <= {p.name for p in published.iterdir()}
    card, evidence = ((published / n).read_text() for n in ("README.md", "refiner.json"))
    assert lint_card(card, evidence) == []
    assert {p.name for p in sharded.iterdir()} <= {f.path for f in load_evidence(evidence).files}
    assert same_weights(published)


def test_a_list_of_files_without_the_index_is_refused(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_run, "write_model", lambda at, _: shutil.copytree(sharded, at))
    files = "publish.files=[config.json,tokenizer*,model*.safetensors]"
    run = RecordedRun(tmp_path / "runs", files)
    run.data()
    run.train("sft")
    run.train("grpo")
    with pytest.raises(StageFailed, match=r"index\.json would be left out"):
        run.carry_out("publish")
    assert lacking(["config.json", "tokenizer_config.json", "model.safetensors"]) == []


def test_a_checkpoint_in_shards_is_adopted_unless_one_is_missing(
    sharded: Path, tmp_path: Path
) -> None:
    where = [f"workspace={tmp_path / 'ws'}"]
    for step in (10, 20):
        shutil.copytree(sharded, tmp_path / "theirs" / f"checkpoint-{step}")
    lost = next((tmp_path / "theirs" / "checkpoint-20").glob("model-00002-*"))
    lost.unlink()
    report = adopt_run(tmp_path / "theirs", where)
    assert report["step"] == 10
    assert [c["complete"] for c in report["checkpoints"]] == [True, False]
    assert lost.name in report["checkpoints"][1]["note"]
    [index] = (tmp_path / "ws").rglob(INDEX)
    assert same_weights(index.parent)


def test_a_recipe_with_a_sharded_model_is_checked(sharded: Path) -> None:
    config = replace_fields(load_recipe("tiny"), {"model.name_or_path": str(sharded)})
    check_model_files(config)
    named = json.loads((sharded / INDEX).read_text())["weight_map"].values()
    (sharded / min(named)).unlink()
    with pytest.raises(ConfigurationError, match=r"lacks 1 of the weight files.*model-00001-of"):
        check_model_files(config)
