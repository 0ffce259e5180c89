"""The run that died on a full quota, short: it comes back by itself, with the very same weights.

Slurm and the quota are real; another process fills the quota in the middle of saves. ``make prove``
has the long versions: ``tests.prove.step100``, with more of everything; ``tests.prove.neighbour``,
with a neighbour that takes every freed byte, on this machine and on Slurm.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import LONGER, Finished, Stage, called, refiner
from tests.support.quota import quota_folder
from tests.support.require import require
from tests.support.slurm_cluster import Cluster, ClusterSpec, missing, running_cluster
from tests.support.story import Fault, kill_orchestrator, preempt, tell

pytestmark = pytest.mark.quota


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    spec = ClusterSpec(nodes=2)
    reason = missing(spec)
    require("slurm", not reason, reason)
    with running_cluster(spec) as cluster:
        yield cluster


@pytest.mark.slurm
def test_a_full_quota_changes_no_weights(
    small_run: tuple[Path, Finished], small: tuple[str, ...], cluster: Cluster, tmp_path: Path
) -> None:
    def workspace_in(folder: Path) -> Path:
        """One in which GRPO alone is left to do."""
        for kind in ("data", "sft"):
            done = Stage(small_run[0], kind).folder
            copy = folder / "stages" / done.name
            shutil.copytree(done, copy, ignore=shutil.ignore_patterns("checkpoints"))
        return folder

    # Long enough for a preemption, which takes Slurm seconds, to find it at work.
    overrides = (*small, *LONGER, "grpo.num_training_steps=24", "stages=[data,sft,grpo]")
    root = workspace_in(tmp_path / "undisturbed")
    control = refiner("run", "tiny", f"workspace={root}", *overrides, "--no-server")
    assert control.code == 0, control.stderr
    undisturbed = Stage(root, "grpo")
    with quota_folder(tmp_path / "q", 72) as disk:
        workspace_in(disk.folder / "disturbed")
        disturbed = tell(
            *("disturbed", cluster, disk.folder),
            (*overrides, "grpo.save_freq=2"),
            partition="low",
            faults=[Fault(4, "kill", kill_orchestrator), Fault(6, "preempt", preempt)],
            fill=[
                *("--rounds", "20", "--seed", "1", "--hold-s", "1", "2"),
                *("--until-seen", "[errno 122"),
            ],
        )
        shown = called("status", f"workspace={disk.folder / 'disturbed'}", "--json").json
    assert disturbed.hashes == undisturbed.hashes(), "weights, to the byte"
    assert disturbed.trace == undisturbed.trace(), "no step twice, none missing"
    ends = [outcome.get("failure") for outcome in disturbed.outcomes]
    assert disturbed.hit_mid_save >= 1, disturbed.outcomes
    assert "errno 122" in disturbed.log
    assert "preempted" in ends
    assert ends[-1] == "none"
    assert "preempted" in json.dumps(shown["incidents"]), "the timeline tells it"
