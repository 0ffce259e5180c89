"""Runs of one machine at the same time: each job has its own GPUs, and the next run waits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.command import called, refiner, start, wait_until
from tests.support.gpus import invented


def words(folder: Path, workspace: str, gpus: int) -> tuple[str, ...]:
    """A run whose trainer prints its GPUs, and ends when it may."""
    program = f"true {{resume}}; echo $CUDA_VISIBLE_DEVICES > {folder}/{workspace}.sees; "
    program += f"while [ ! -e {folder}/end ]; do sleep 0.1; done"
    return (
        *("run", "own-trainer", f"workspace={folder / workspace}", "stages=[command]"),
        *(f"command.run={program}", "dispatch.retries.bug=0"),
        *(f"command.resources.gpus={gpus}", "dispatch.poll_s=0.1", "--no-server"),
    )


def test_jobs_of_two_runs_have_different_gpus_and_a_third_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = invented(monkeypatch, 3)
    first, second = (start(*words(tmp_path, name, 1)) for name in ("a", "b"))
    sees = [tmp_path / "a.sees", tmp_path / "b.sees"]
    wait_until(lambda: all(p.exists() and p.read_text().strip() for p in sees), "two jobs")
    taken = {path.read_text().strip() for path in sees}
    assert len(taken) == 2
    assert taken <= set(names)

    third = start(*words(tmp_path, "c", 2))
    where = f"workspace={tmp_path / 'c'}"
    wait_until(
        lambda: "waits for 2 GPUs: 1 of 3 free" in called("status", where).stdout, "a reason"
    )
    assert "used by command-" in called("status", where).stdout

    first.send_signal(signal.SIGKILL)  # its job goes on, with its GPU
    assert not (tmp_path / "c.sees").exists()
    (tmp_path / "end").touch()
    wait_until((tmp_path / "c.sees").exists, "the third job")
    assert len((tmp_path / "c.sees").read_text().strip().split(",")) == 2
    for process in (first, second, third):
        process.wait(400)


def test_a_run_that_never_fits_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invented(monkeypatch, 2)
    done = refiner(*words(tmp_path, "big", 3))
    assert done.code == 8
    assert "needs 3 GPUs of this machine, and CUDA_VISIBLE_DEVICES names 2" in done.stderr
    assert "command.resources.gpus" in done.stderr
    assert not list((tmp_path / "big" / "runs").glob("*"))
