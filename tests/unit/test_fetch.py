"""The fetch stage and a Hub on loopback: downloads, interruptions, wrong names, offline reads."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.git_hub import Fault, LoopbackHub

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "refiner_core" / "models" / "tiny"
#: A fetch for each list of overrides; prints a report or an error for each.
FETCH = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from flows.api import make_recipe_plan
from flows.stages.fetch import run_fetch
from refiner_core.contract.errors import RefinerError
from tests.support.stage_io import FolderStageIO

out = Path(sys.argv[1])
out.mkdir(exist_ok=True)
for overrides in json.loads(sys.argv[2]):
    plan = make_recipe_plan("tiny", overrides)
    io, spec = FolderStageIO(out.parent / "io"), plan.by_name["fetch"]
    work = SimpleNamespace(config=plan.config, spec=spec, output_dir=out, io=io)
    try:
        print(json.dumps(run_fetch(work)))
    except RefinerError as error:
        print(json.dumps({"error": type(error).__name__, "says": str(error)}))
"""
READ = """
import json, sys
from flows.stages.fetch import local_model
from refiner_core.contract.config import DataConfig, ModelConfig
from refiner_core.data.sources import read_rows, resolve_source
from refiner_core.generation.load import load_tokenizer

config = ModelConfig(name_or_path="me/tiny")
print(json.dumps([len(load_tokenizer("me/tiny", config)), local_model(config)]))
config = DataConfig(rl_path="me/rows", rl_revision=sys.argv[1])
print(json.dumps([r.row for r in read_rows(resolve_source(config, "rl"))]))
"""
MODEL = "model.name_or_path=me/tiny"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    """A model with a file that is not read, and a data set."""
    model, rows = tmp_path / "model", tmp_path / "rows"
    shutil.copytree(TINY, model)
    (model / "model.onnx").write_bytes(b"not read")
    rows.mkdir()
    text = "".join(json.dumps({"messages": f"row {n}"}) + "\n" for n in range(5))
    (rows / "train.jsonl").write_text(text)
    with LoopbackHub(tmp_path / "hub") as found:
        found.add_folder("me/tiny", model)
        found.add_folder("me/rows", rows)
        yield found


def in_process(hub: LoopbackHub, script: str, *args: str, **settings: str) -> list[Any]:
    """The client reads the Hub's address when it is imported, so this takes another process."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(hub.root.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=env | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{"]


def fetch(hub: LoopbackHub, *calls: list[str]) -> list[Any]:
    return in_process(hub, FETCH, str(hub.root.parent / "out"), json.dumps(calls))


def downloads(hub: LoopbackHub) -> list[str]:
    return [r.path for r in hub.log if r.method == "GET" and "/resolve/" in r.path]


def test_what_is_fetched_can_be_read_without_a_network(hub: LoopbackHub) -> None:
    commits = {name: hub.refs(f"me/{name}")["heads/main"] for name in ("tiny", "rows")}
    given = ["data.rl_path=me/rows", f"data.rl_revision={commits['rows']}"]
    missing = [MODEL, "model.name_or_path=me/other"], [MODEL, "model.revision=v2"]
    report, again, other, revision, rows = fetch(hub, [MODEL], [MODEL], *missing, given)
    (fetched,) = report["fetched"]
    assert (fetched["source"], fetched["commit"]) == ("model", commits["tiny"])
    files = hub.contents("me/tiny")
    wanted = sum(len(data) for path, data in files.items() if not path.endswith(".onnx"))
    assert report["bytes"] == fetched["bytes"] == wanted
    found = downloads(hub)
    assert not any("onnx" in path for path in found)
    assert (again, len(found)) == (report, len(set(found))), "nothing is fetched twice"
    for failed, name in ((other, "me/other@main"), (revision, "me/tiny@v2")):
        assert failed["error"] == "ConfigurationError", failed
        assert name in failed["says"]
    assert [f["source"] for f in rows["fetched"]] == ["data.rl"]

    asked = len(hub.log)
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    (size, folder), read = in_process(hub, READ, commits["rows"], **offline)
    assert size > 100
    assert (Path(folder) / "config.json").is_file()
    assert read == [{"messages": f"row {n}"} for n in range(5)]
    assert len(hub.log) == asked


def test_a_download_that_was_cut_off_continues(hub: LoopbackHub) -> None:
    hub.faults = [
        Fault("cut", where=lambda r: "safetensors" in r.path, times=1000, after=1_000_000)
    ]
    (failed,) = fetch(hub, [MODEL])
    assert failed["error"] == "FetchError", failed
    hub.faults = []
    small = [path for path in downloads(hub) if path.endswith("tokenizer.json")]
    (report,) = fetch(hub, [MODEL])
    assert report["fetched"]
    assert [path for path in downloads(hub) if path.endswith("tokenizer.json")] == small
