"""What was published is what plain tools of others read: transformers, and a snapshot of a tag."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from infra.hub.target import HubTarget
from infra.publishing import Publication
from refiner_core.contract.config import PublishConfig
from refiner_core.models import tiny_model_dir
from refiner_core.training.model.loading import export
from tests.support.git_hub import LoopbackHub
from tests.support.publications import REPO, publication

READER = """
import hashlib, json, sys
from pathlib import Path
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

repo_id, revision = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(repo_id, revision=revision)
tokenizer = AutoTokenizer.from_pretrained(repo_id, revision=revision)
weight = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    weight.update(name.encode() + tensor.numpy().tobytes())
folder = Path(snapshot_download(repo_id, revision=revision))
print(json.dumps({
    "weights": weight.hexdigest(),
    "tokens": tokenizer("a question")["input_ids"],
    "files": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()},
}))
"""


def exported(folder: Path) -> tuple[Publication, str, list[int]]:
    """The built-in model as a stage exports it, its weights' hash, and how it reads a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())
    export(model, tokenizer, folder / "model")
    weight = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weight.update(name.encode() + tensor.numpy().tobytes())
    files = {p.name: p.read_bytes() for p in (folder / "model").iterdir()}
    wanted = publication(folder, 50, files=files)
    return wanted, weight.hexdigest(), tokenizer("a question")["input_ids"]


def test_transformers_loads_a_published_step(hub: LoopbackHub, tmp_path: Path) -> None:
    wanted, weights, tokens = exported(tmp_path)
    config = PublishConfig(target="hub", which="every-save")
    published = HubTarget(config, hub.url).publish(wanted)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READER, REPO, "step-50"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert (read["weights"], read["tokens"]) == (weights, tokens)
    del read["files"][".gitattributes"]
    assert read["files"] == {f.path: f.sha256 for f in published.files}
