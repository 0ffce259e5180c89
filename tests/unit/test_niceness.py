"""Jobs that only move bytes give way to the trainer, on this machine, for whoever runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.jobs.dispatch import LocalDispatcher, gives_way
from infra.jobs.protocol import JobRequest, WorkerCommand
from infra.store.workspace import Workspace
from refiner_core.contract.config import PublishConfig, Resources
from refiner_core.contract.plan import make_plan
from tests.support.command import wait_until
from tests.support.plans import SOURCES, claim, small_config, small_plan

#: What a job says of itself.
TELL = (
    "import json, os, psutil, sys\n"
    "group = '/proc/self/autogroup'\n"
    "print(json.dumps({'nice': os.nice(0), 'disk': psutil.Process().ionice()[1],\n"
    "    'session': open(group).read().split()[-1] if os.path.exists(group) else None}))\n"
)


def after(script: str) -> tuple[dict[str, Any], str]:
    """What a process says of itself that has done ``script``, and what it warned of."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import json\nfrom infra.jobs.give_way import give_way\n{script}\n{TELL}",
        ],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    return json.loads(done.stdout), done.stderr


def test_a_job_gives_way_for_processor_session_and_disk() -> None:
    before, _ = after("")
    found, said = after("give_way(5)")
    assert (found["nice"], found["disk"]) == (before["nice"] + 5, 7)
    if before["session"] is not None and os.geteuid() == 0:
        assert found["session"] == "5", "else it counts inside the job's own session only"
    assert said == ""
    found, said = after("import os\nos.getuid() or os.setuid(65534)\ngive_way(-20)")
    assert "gives way less than it should" in said, "a missing right ends no job"
    assert found["nice"] >= 0


def test_what_moves_bytes_gives_way_and_what_a_run_waits_for_does_not() -> None:
    config = small_config("data", "sft", "grpo", "evaluate", "publish")
    publish = PublishConfig(which="every-save")
    grpo = replace(config.grpo, num_training_steps=2, save_freq=1)
    plan = make_plan(replace(config, publish=publish, grpo=grpo), SOURCES)
    found = {stage.name for stage in plan.stages if gives_way(plan, stage)}
    assert found == {
        *("export-step1", "publish-step1", "evaluate-grpo-step1", "card-step1"),
        *("publish", "card", "card-progression"),
    }


def test_a_local_job_runs_at_the_niceness_of_its_request(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    stage = claim(workspace, small_plan("data"), "data")
    script, told = tmp_path / "tell.py", workspace.root / "told"
    script.write_text(f"import os\nopen({str(told)!r}, 'w').write(str(os.nice(0)))\n")
    worker = WorkerCommand(workspace.root, (str(script),))
    request = JobRequest(stage.id, 1, "refiner-nice", Resources(), nice=7)
    assert LocalDispatcher(workspace, worker).submit([request]) == {}
    assert wait_until(lambda: told.exists() and told.read_text(), "a job", 60)
    assert int(told.read_text()) == os.nice(0) + 7
