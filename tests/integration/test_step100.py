"""The run that died on a full quota, short: it comes back by itself, with the very same weights.

Slurm and the quota are real; another process fills the quota in the middle of saves. The long
versions, with more of everything, are ``python -m tests.prove.step100`` and, for a neighbour that
takes every freed byte, on Slurm too, ``python -m tests.prove.neighbour``.
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
from tests.support.story import Fault, Telling, kill_orchestrator, preempt, tell

pytestmark = pytest.mark.quota
#: A short run that saves twice; not one kill is forgiven.
SHORT = (
    *(o for o in SMALL if not o.startswith("grpo.")),
    *("grpo.num_training_steps=4", "grpo.num_unique_prompts_rollout=2"),
    *("grpo.num_samples_per_prompt_rollout=4", "grpo.save_freq=2", "stages=[data,grpo]"),
    "dispatch.retries.killed=0",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    spec = ClusterSpec(nodes=2)
    reason = missing(spec)
    require("slurm", not reason, reason)
    with running_cluster(spec) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Telling:
    folder = tmp_path_factory.mktemp("undisturbed")
    return tell("control", None, folder, (*SHORT, f"model.name_or_path={trained}"))


def test_a_neighbour_that_takes_every_freed_byte_costs_no_retries_and_changes_no_weights(
    undisturbed: Telling, trained: Path, tmp_path: Path
) -> None:
    with quota_folder(tmp_path / "q", 64) as disk:
        disturbed = tell(
            *("disturbed", None, disk.folder, (*SHORT, f"model.name_or_path={trained}")),
            hold_s=1.0,
            fill=["--refill", "--rounds", "2", "--hold-s", "9", "9"],
        )
    assert disturbed.hashes == undisturbed.hashes, "weights, to the byte"
    assert disturbed.trace == undisturbed.trace, "no step twice, none missing"
    ends = [outcome.get("failure") for outcome in disturbed.outcomes]
    assert set(ends) == {"disk_full", "none"}, disturbed.outcomes
    assert len(disturbed.rounds) == 2


@pytest.mark.slurm
def test_a_full_quota_changes_no_weights(cluster: Cluster, trained: Path, tmp_path: Path) -> None:
    overrides = (
        *(o for o in SMALL if not o.startswith("grpo.")),
        *("grpo.num_training_steps=24", "grpo.num_unique_prompts_rollout=2"),
        *("grpo.num_samples_per_prompt_rollout=4", "grpo.save_freq=2"),
        *("stages=[data,grpo]", f"model.name_or_path={trained}"),
    )
    with quota_folder(tmp_path / "q", 64) as disk:
        control = tell("control", cluster, disk.folder, overrides)
        shutil.rmtree(disk.folder / "control")  # it would take half of the quota for good
        disturbed = tell(
            *("disturbed", cluster, disk.folder, overrides),
            partition="low",
            faults=[Fault(4, "kill", kill_orchestrator), Fault(6, "preempt", preempt)],
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
