"""ZeRO-3 in a single process that no launcher has started."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.command import finished
from tests.support.tiny_training import save_tiny_model

pytestmark = pytest.mark.slow

_TWO_STEPS = """
import sys
from refiner_core.training.engines.plain import open_engine
from refiner_core.training.batches import Sample, build_pack, collate
from tests.support.tiny_training import recipe

config = recipe(
    model={"dtype": "float32"}, sft={"deepspeed_stage": 3, "optimizer": "adamw"}
)
engine = open_engine(config, "sft", sys.argv[1])
batch = collate([build_pack([[Sample((), tuple(range(3, 12)), (True,) * 9)]])])
norms = []
for _ in range(2):
    engine.backward(-engine.score(batch).logprob_T.sum() / 8)
    norms.append(engine.step(1.0))
assert 0 < norms[1] < norms[0], norms
print("trained")
"""


def test_zero_3_trains_without_torchrun(tmp_path: Path) -> None:
    """DeepSpeed asks the environment for a rank at its first steps, long after it was opened."""
    model = save_tiny_model(tmp_path / "model")
    around = {n: v for n, v in os.environ.items() if n not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    two_steps = [sys.executable, "-c", _TWO_STEPS, str(model)]
    done = finished(two_steps, env=around | {"OMP_NUM_THREADS": "1"}, timeout_s=90)
    assert done.code == 0, done.stderr[-3000:]
    assert "trained" in done.stdout
