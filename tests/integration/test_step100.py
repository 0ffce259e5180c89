"""The run that died on a full quota, short: it comes back by itself, with the very same weights.

Slurm and the quota are real; another process fills the quota in the middle of saves. The long
version, with more of everything, is ``python -m tests.prove.step100``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import SMALL, refiner
from tests.support.quota import quota_folder
from tests.support.require import require
from tests.support.slurm_cluster import Cluster, ClusterSpec, missing, running_cluster
from tests.support.story import Fault, kill_orchestrator, preempt, tell

pytestmark = [pytest.mark.slurm, pytest.mark.quota]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    spec = ClusterSpec(nodes=2)
    reason = missing(spec)
    require("slurm", not reason, reason)
    with running_cluster(spec) as cluster:
        yield cluster


def test_a_run_whose_quota_fills_up_pauses_makes_room_and_ends_with_the_same_weights(
    cluster: Cluster, trained: Path, tmp_path: Path
) -> None:
    overrides = (
        *(o for o in SMALL if not o.startswith("grpo.")),
        *("grpo.num_training_steps=20", "grpo.num_unique_prompts_rollout=2"),
        *("grpo.num_samples_per_prompt_rollout=4", "grpo.save_freq=2"),
        *("stages=[data,grpo]", f"model.name_or_path={trained}"),
    )
    with quota_folder(tmp_path / "q", 64) as disk:
        control = tell("control", cluster, disk.folder, overrides)
        shutil.rmtree(disk.folder / "control")  # it would take half of the quota for good
        disturbed = tell(
            *("disturbed", cluster, disk.folder, overrides),
            partition="low",
            faults=[Fault(4, "kill", kill_orchestrator), Fault(15, "preempt", preempt)],
            fill=[
                *("--rounds", "20", "--seed", "1", "--hold-s", "1", "2"),
                *("--until-seen", "[errno 122"),
            ],
        )
        shown = refiner("status", f"workspace={disk.folder / 'disturbed'}", "--json").json
    assert disturbed.hashes == control.hashes, "weights, to the byte"
    assert disturbed.trace == control.trace, "no step twice, none missing"
    ends = [outcome.get("failure") for outcome in disturbed.outcomes]
    assert disturbed.hit_mid_save >= 1, disturbed.outcomes
    assert "errno 122" in disturbed.log
    assert "preempted" in ends
    assert ends[-1] == "none"
    assert "preempted" in json.dumps(shown["incidents"]), "the timeline tells it"
