"""A disk that stays full for minutes: another process takes every freed byte.

    make prove                                    # among other proofs: about an hour
    python -m tests.prove.neighbour --quick       # seconds instead of minutes
    python -m tests.prove.neighbour --only "ours, local, btrfs bytes"

GRPO of ours, and Hugging Face's Trainer as a `command` stage, on this machine and on a real Slurm.
In the middle of a save another process takes all bytes (or inodes) that are left, and every byte
that is freed after that; four times, so that saves meet it again and again. `disk.hold_s` is 5:
every worker gives up long before there is room. Where: a btrfs quota (EDQUOT), and an ext4 file
system that is full itself (ENOSPC; its quotas need CONFIG_QFMT_V2). Then a file system that is
read-only for a minute (EROFS; the btrfs subvolume, because no mount can be made read-only while
files are open), and a Slurm controller that is away for 20 minutes, when the next stage is to be
submitted and in the middle of one. Not one kill is forgiven (`dispatch.retries.killed=0`).

Each must end by itself with the weights of a run that nothing disturbed, to the byte. Prints a
table and ends with exit code 1 if one does not. Needs root, btrfs-progs, mkfs.ext4 and the packages
of :mod:`tests.support.slurm_cluster`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tests.prove.step100 import GRPO, trained
from tests.support.command import ROOT
from tests.support.quota import QuotaFolder, quota_folder, small_ext4
from tests.support.slurm_cluster import Cluster, ClusterSpec, running_cluster
from tests.support.story import Fault, Telling, read_only, slurm_away, tell

ROUNDS = 4
STEPS = {"ours": 12, "HF Trainer": 60}
WEIGHTS = "model/model.safetensors"
RECIPE = f"""
include: [own-trainer]
stages: [command]
tracking: {{wandb: disabled}}
command:
  run: >-
    {sys.executable} {ROOT / "tests/support/hf_trainer.py"} --output_dir {{output}} --seed {{seed}}
    --steps {STEPS["HF Trainer"]} --save_steps 10 --step_s 0.2 {{resume}}
"""
#: What a half-written checkpoint of theirs looks like.
THEIR_SAVES = ("--saves", "stages/*/work/checkpoint-*/*", "--whole", "trainer_state.json")


class Case(NamedTuple):
    """Who trains, where, on which disk, and what happens."""

    trainer: Literal["ours", "HF Trainer"]
    where: Literal["local", "Slurm"]
    what: str

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.trainer}, {self.where}, {self.what}"


_BYTES, _EXT4, _INODES = "btrfs bytes", "ext4 bytes", "ext4 inodes"
_READ_ONLY, _BOUNDARY, _MIDDLE = "read-only", "Slurm away at submission", "Slurm away in a stage"
CASES = (
    *(Case("ours", "local", what) for what in (_BYTES, _EXT4, _INODES, _READ_ONLY)),
    *(Case("HF Trainer", "local", what) for what in (_BYTES, _EXT4, _INODES, _READ_ONLY)),
    *(Case("ours", "Slurm", what) for what in (_BYTES, _EXT4, _READ_ONLY, _BOUNDARY, _MIDDLE)),
    *(Case("HF Trainer", "Slurm", what) for what in (_BYTES, _INODES, _MIDDLE)),
)


class Seconds(NamedTuple):
    """How long each trouble lasts."""

    full: float
    read_only: float
    away: float


FULL, QUICK = Seconds(60.0, 60.0, 1200.0), Seconds(12.0, 20.0, 45.0)


def main() -> int:
    """Tell every case, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="troubles of seconds, not of minutes")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=[c.name for c in CASES])
    told = parser.parse_args()
    cases = [c for c in CASES if not told.only or c.name in told.only]
    lasting = QUICK if told.quick else FULL
    rows: list[tuple[Case, Telling | str, bool]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="refiner-full-")))
        stage = Stage(folder)
        controls = {name: stage.control(name) for name in dict.fromkeys(c.trainer for c in cases)}
        cluster = None
        if any(c.where == "Slurm" for c in cases):
            cluster = stack.enter_context(running_cluster(ClusterSpec(nodes=2)))
        for case in cases:
            print(f"{case.name}:", flush=True)
            try:
                telling = stage.tell(case, cluster if case.where == "Slurm" else None, lasting)
            except RuntimeError as error:
                rows.append((case, str(error), False))
                print(f"      {error}", flush=True)
                continue
            equal = telling.hashes[WEIGHTS] == controls[case.trainer].hashes[WEIGHTS]
            rows.append((case, telling, equal))
            same = "bytewise equal" if equal else "NOT bytewise equal"
            print(f"      {telling.ends}, {same}, {telling.seconds:.0f} s", flush=True)
    return _report(rows)


class Stage:
    """Where the cases are told, and what they have in common."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._recipe = folder / "theirs.yaml"
        self._recipe.write_text(RECIPE)
        self._model: Path | None = None

    def control(self, trainer: str) -> Telling:
        """A run that nothing disturbs."""
        print(f"control: {trainer}", flush=True)
        return self._tell(trainer, None, self.folder / "undisturbed" / trainer)

    def tell(self, case: Case, cluster: Cluster | None, lasting: Seconds) -> Telling:
        """One case on a disk of its own."""
        with _disk(case.what, self.folder / case.name.replace(", ", "-").replace(" ", "-")) as (
            mount,
            quota,
        ):
            faults: list[Fault] = []
            fill: list[str] | None = None
            middle = STEPS[case.trainer] // 2
            if case.what == _READ_ONLY:
                assert quota is not None
                faults.append(Fault(middle, case.what, read_only(quota, lasting.read_only)))
            elif case.what in (_BOUNDARY, _MIDDLE):
                step = middle if case.what == _MIDDLE else 0
                faults.append(Fault(step, case.what, slurm_away(lasting.away)))
            else:
                hold = str(lasting.full)
                fill = ["--refill", "--rounds", str(ROUNDS), "--hold-s", hold, hold]
                fill += ["--inodes"] if case.what == _INODES else []
                fill += THEIR_SAVES if case.trainer == "HF Trainer" else ()
            limit_s = 900.0 + ROUNDS * 3 * lasting.full + 2 * lasting.away
            return self._tell(case.trainer, cluster, mount, limit_s, faults, fill)

    def _tell(
        self,
        trainer: str,
        cluster: Cluster | None,
        mount: Path,
        limit_s: float = 900.0,
        faults: Sequence[Fault] = (),
        fill: Sequence[str] | None = None,
    ) -> Telling:
        mount.mkdir(parents=True, exist_ok=True)
        recipe, kind, overrides = str(self._recipe), "command", ["dispatch.retries.killed=0"]
        if trainer == "ours":
            recipe, kind = "tiny", "grpo"
            self._model = self._model or trained(self.folder)
            steps = f"grpo.num_training_steps={STEPS[trainer]}"
            overrides += [*GRPO, steps, "grpo.save_freq=3", f"model.name_or_path={self._model}"]
        return tell(
            *("run", cluster, mount, overrides),
            recipe=recipe,
            kind=kind,
            limit_s=limit_s,
            faults=faults,
            fill=fill,
        )


@contextlib.contextmanager
def _disk(what: str, folder: Path) -> Iterator[tuple[Path, QuotaFolder | None]]:
    if what == _EXT4:
        with small_ext4(folder, mib=96) as mount:
            yield mount, None
    elif what == _INODES:
        with small_ext4(folder, mib=256, inodes=4096) as mount:
            yield mount, None
    else:
        with quota_folder(folder, 64) as quota:
            yield quota.folder, quota


def _report(rows: Sequence[tuple[Case, Telling | str, bool]]) -> int:
    """The table, as the documentation carries it."""
    print("\n| case | attempts ended | bytewise equal | wall-clock |\n|---|---|---|---|")
    for case, telling, equal in rows:
        if isinstance(telling, str):
            print(f"| {case.name} | did not end: {telling.splitlines()[0]} | no | |")
        else:
            same = "yes" if equal else "NO"
            print(f"| {case.name} | {telling.ends} | {same} | {telling.seconds:.0f} s |")
    return 0 if all(equal for _, _, equal in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
