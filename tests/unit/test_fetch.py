"""The fetch stage against a Hub on loopback: what comes, what is reported, what goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_server import HubServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "refiner_core" / "models" / "tiny"
SCRIPT = """
import json, sys
from pathlib import Path
from flows.api import make_recipe_plan
from flows.stages.fetch import run_fetch
from refiner_core.contract.errors import RefinerError
from tests.support.stage_io import FolderStageIO

class Work:
    pass

plan = make_recipe_plan("tiny", sys.argv[2:])
work, out = Work(), Path(sys.argv[1])
out.mkdir(exist_ok=True)
work.config, work.spec, work.output_dir = plan.config, plan.by_name["fetch"], out
work.io = FolderStageIO(out.parent / "io")
try:
    print(json.dumps(run_fetch(work)))
except RefinerError as error:
    print(json.dumps({"error": type(error).__name__, "says": str(error)}))
"""
MODEL = ("model.name_or_path=me/tiny",)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A repository with more in it than is read."""
    folder = tmp_path / "repository"
    shutil.copytree(TINY, folder)
    (folder / "model.onnx").write_bytes(b"not read")
    return folder


def in_process(script: str, cache: Path, hub: HubServer, *args: str, **settings: str) -> Any:
    """The Hub's address is read when the client is imported, so it needs a process of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(cache),
        **settings,
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_comes_into_the_cache_and_is_read_without_a_network(
    model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with HubServer({"me/tiny": model}) as hub:
        report = in_process(SCRIPT, cache, hub, str(tmp_path / "out"), *MODEL)
        (fetched,) = report["fetched"]
        assert (fetched["source"], fetched["commit"]) == ("model", hub.commit("me/tiny"))
        wanted = sum(p.stat().st_size for p in model.iterdir() if p.suffix != ".onnx")
        assert report["bytes"] == fetched["bytes"] == wanted
        assert not any("onnx" in path for path in hub.downloads())
        before = len(hub.downloads())
        assert in_process(SCRIPT, cache, hub, str(tmp_path / "out"), *MODEL) == report
        assert len(hub.downloads()) == before
        load = (
            "import json\n"
            "from flows.stages.fetch import local_model\n"
            "from refiner_core.contract.config import ModelConfig\n"
            "from refiner_core.generation.load import load_tokenizer\n"
            "config = ModelConfig(name_or_path='me/tiny')\n"
            "size = len(load_tokenizer('me/tiny', config))\n"
            "print(json.dumps([size, local_model(config)]))\n"
        )
        asked = len(hub.requests)
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        size, folder = in_process(load, cache, hub, **offline)
        assert size > 100
        assert (Path(folder) / "config.json").is_file()
        assert len(hub.requests) == asked


def test_a_download_that_was_cut_off_goes_on(model: Path, tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", str(tmp_path / "out")
    with HubServer({"me/tiny": model}) as hub:
        hub.fail_after = 1_000_000
        failed = in_process(SCRIPT, cache, hub, out, *MODEL)
        assert failed["error"] == "FetchFailed", failed
        assert "downloaded files are kept" in failed["says"]
        hub.fail_after = None
        small = [p for p in hub.downloads() if p.endswith("tokenizer.json")]
        assert in_process(SCRIPT, cache, hub, out, *MODEL)["fetched"]
        assert [p for p in hub.downloads() if p.endswith("tokenizer.json")] == small


def test_what_is_not_there_is_bad_configuration(model: Path, tmp_path: Path) -> None:
    with HubServer({"me/tiny": model}) as hub:
        for changed, name in (
            ("model.name_or_path=me/other", "me/other@main"),
            ("model.revision=v2", "me/tiny@v2"),
        ):
            failed = in_process(
                SCRIPT, tmp_path / "cache", hub, str(tmp_path / "out"), *MODEL, changed
            )
            assert failed["error"] == "ConfigurationError", failed
            assert name in failed["says"]


def test_rows_of_a_hub_data_set_are_read_without_a_network_afterwards(
    model: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    text = "".join(json.dumps({"messages": f"row {n}"}) + "\n" for n in range(5))
    (rows / "train.jsonl").write_text(text)
    cache, out = tmp_path / "cache", str(tmp_path / "out")
    with HubServer({"me/rows": rows}) as hub:
        commit = hub.commit("me/rows")
        given = ("data.rl_path=me/rows", f"data.rl_revision={commit}")
        report = in_process(SCRIPT, cache, hub, out, *given)
        assert [f["source"] for f in report["fetched"]] == ["data.rl"]
        read = (
            "import json, sys\n"
            "from refiner_core.contract.config import DataConfig\n"
            "from refiner_core.data.sources import read_rows, resolve_source\n"
            "config = DataConfig(rl_path='me/rows', rl_revision=sys.argv[1])\n"
            "print(json.dumps([r.row for r in read_rows(resolve_source(config, 'rl'))]))\n"
        )
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        found = in_process(read, cache, hub, commit, **offline)
        assert found == [{"messages": f"row {n}"} for n in range(5)]
