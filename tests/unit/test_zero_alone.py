"""ZeRO-3 in a single process that no launcher has started, and its updates."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_training import save_tiny_model

pytestmark = pytest.mark.slow

_TWO_STEPS = """
import sys
from refiner_core.training.engines.plain import open_engine
from refiner_core.training.batches import Sample, build_pack, collate
from tests.support.tiny_training import recipe

config = recipe(
    model={"dtype": "float32"},
    sft={
        "deepspeed_stage": 3, "optimizer": "adamw", "adam_beta2": 0.5, "learning_rate": 1e-2
    },
)
engine = open_engine(config, "sft", sys.argv[1])
batch = collate([build_pack([[Sample((), tuple(range(3, 12)), (True,) * 9)]])])


def norms_of(engine):
    norms = []
    for _ in range(4):
        engine.backward(-engine.score(batch).logprob_T.sum() / 8)
        norms.append(engine.step(1.0))
    return norms


norms = norms_of(engine)
assert 0 < norms[1] < norms[0], norms
for beta2, same in ((0.5, True), (0.999, False)):
    plain = {"adam_beta2": beta2, "learning_rate": 1e-2, "optimizer": "adamw"}
    alone = open_engine(recipe(model={"dtype": "float32"}, sft=plain), "sft", sys.argv[1])
    gap = max(abs(a - b) / b for a, b in zip(norms, norms_of(alone)))
    assert (gap < 1e-4) == same, (beta2, gap)
print("trained")
"""


def test_zero_3_trains_without_torchrun(tmp_path: Path) -> None:
    """DeepSpeed asks the environment for a rank at its first steps, long after it was opened."""
    model = save_tiny_model(tmp_path / "model")
    around = {n: v for n, v in os.environ.items() if n not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", _TWO_STEPS, str(model)],
        env=around | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained" in done.stdout
