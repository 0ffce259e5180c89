"""The run that died at step 100, and what becomes of it now.

    make prove                                  # among other proofs
    python -m tests.prove.step100 [--steps 112] [--only quota everything]

A GRPO run of more than 110 steps that saves every 50, driven through the command line only, on a
real Slurm (fake GPUs, loopback) with its whole workspace on a real quota of 64 MiB. A control run
goes undisturbed. Then the same run meets another process that fills the quota at random moments and
in the middle of saves (errno 122), preemption, a time limit, a dead node, `kill -9` of trainer and
orchestrator, and at last all of them. Each must end by itself, with the control's weights to the
byte and its loss trace to the last digit. Prints a line per claim and ends with exit code 1 if one
does not hold. Needs root and the packages of :mod:`tests.support.slurm_cluster`.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.prove.learning import Claim
from tests.prove.learning import tell as report
from tests.support.command import Stage, refiner
from tests.support.quota import quota_folder
from tests.support.slurm_cluster import Cluster, ClusterSpec, running_cluster
from tests.support.story import (
    Fault,
    Telling,
    kill_orchestrator,
    kill_trainer,
    node_down,
    preempt,
    tell,
    time_limit,
)

QUOTA_MIB = 64
SFT = (
    *("data.synthetic_sft_rows=1100", "sft.max_train_steps=55", "sft.eval_freq=1000"),
    *("data.synthetic_rl_rows=60", "tracking.wandb=disabled"),
)
GRPO = (
    *("data.synthetic_sft_rows=160", "data.synthetic_rl_rows=60", "tracking.wandb=disabled"),
    *("grpo.num_unique_prompts_rollout=4", "grpo.num_samples_per_prompt_rollout=8"),
    *("grpo.save_freq=50", "stages=[data,grpo]"),
)


class Scenario(NamedTuple):
    """One telling: partition, faults by the share of the steps at which they come, filler."""

    partition: str
    faults: tuple[tuple[float, Callable[..., str]], ...] = ()
    rounds: int = 0


SCENARIOS: dict[str, Scenario] = {
    "quota": Scenario("main", rounds=24),
    "preempted": Scenario("low", ((0.3, preempt), (0.7, preempt))),
    "preempted-without-goodbye": Scenario("rough", ((0.6, preempt),)),
    "time-limit": Scenario("main", ((0.1, time_limit),)),
    "node-down": Scenario("main", ((0.55, node_down),)),
    "killed": Scenario(
        "main", ((0.2, kill_trainer), (0.5, kill_orchestrator), (0.8, kill_trainer))
    ),
    "everything": Scenario(
        "low",
        (
            *((0.1, kill_trainer), (0.25, preempt), (0.4, kill_orchestrator)),
            *((0.6, node_down), (0.75, time_limit), (0.9, kill_trainer)),
        ),
        rounds=16,
    ),
}


def main() -> int:
    """Tell everything, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=112)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="refiner-step100-") as name:
        folder = Path(name)
        overrides = (
            *GRPO,
            f"grpo.num_training_steps={told.steps}",
            f"model.name_or_path={trained(folder)}",
        )
        with (
            running_cluster(ClusterSpec(nodes=3)) as cluster,
            quota_folder(folder / "quota", QUOTA_MIB) as disk,
        ):
            print(f"control: {told.steps} steps, saved every 50, quota {QUOTA_MIB} MiB", flush=True)
            control = _tell("control", Scenario("main"), cluster, disk.folder, overrides, told)
            tellings = [
                _tell(name, SCENARIOS[name], cluster, disk.folder, overrides, told)
                for name in told.only
            ]
    return report(claims(control, tellings))


def trained(folder: Path) -> Path:
    """A model that gives some valid answers, made on an ordinary disk."""
    print("a model to start from", flush=True)
    workspace = folder / "sft"
    done = refiner(
        *("run", "tiny", f"workspace={workspace}", "stages=[data,sft]", "--no-server"), *SFT
    )
    if done.code:
        raise RuntimeError(done.stderr)
    return Stage(workspace, "sft").attempts[-1] / "output" / "model"


def _tell(
    name: str,
    scenario: Scenario,
    cluster: Cluster,
    mount: Path,
    overrides: Sequence[str],
    told: argparse.Namespace,
) -> Telling:
    print(f"{name}:", flush=True)
    faults = [Fault(int(told.steps * at), do.__name__, do) for at, do in scenario.faults]
    fill = None
    if scenario.rounds:
        fill = ["--rounds", str(scenario.rounds), "--seed", str(told.seed), "--hold-s", "1", "6"]
        fill += ["--longest-wait-s", "8"]
    telling = tell(
        name, cluster, mount, overrides, partition=scenario.partition, faults=faults, fill=fill
    )
    for line in telling.rounds:
        print(f"      filled: {json.dumps(line)}")
    for number, outcome in enumerate(telling.outcomes, 1):
        print(f"      attempt {number}: {json.dumps(outcome)[:300]}")
    print(f"      {telling.seconds:.0f} s", flush=True)
    status = refiner("status", f"workspace={mount / name}", "--incidents")
    print(status.stdout)
    shutil.rmtree(mount / name)
    return telling


def claims(control: Telling, tellings: Sequence[Telling]) -> list[Claim]:
    """What must hold."""
    found = []
    for telling in tellings:
        ends = [str(o.get("failure")) for o in telling.outcomes]
        says = f"{telling.name}: the final weights are the control's, to the byte"
        took = f"{telling.seconds:.0f} s against {control.seconds:.0f} s"
        weights = f"sha256 {telling.hashes['model/model.safetensors'][:16]}"
        measured = f"{len(ends)} attempts ({', '.join(ends)}), {took}; {weights}"
        found.append(Claim(says, measured, telling.hashes == control.hashes))
        says = f"{telling.name}: the loss trace is the control's, no step twice, none missing"
        steps = f"{len(telling.trace)} steps"
        found.append(Claim(says, steps, telling.trace == control.trace))
    rounds = sum(len(t.rounds) for t in tellings)
    hits = sum(t.hit_mid_save for t in tellings)
    if any(t.rounds for t in tellings):
        found.append(Claim("another process filled the quota", f"{rounds} times", rounds >= 20))
        found.append(
            Claim("it hit a save in the middle, errno 122 in the log", f"{hits} times", hits >= 1)
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
