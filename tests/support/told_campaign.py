"""An orchestrator with notifications whose stages are run by the fake worker.

    python told_campaign.py WORKSPACE NOTIFY [RUN]

NOTIFY is the recipe's section as JSON; RUN goes on with that run, as `refiner resume` does. Also
for tests that work on one in their own process (:func:`told_run`).
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.running import calls
from flows.running.calls import RunOutcome, work_on
from flows.running.foreground import LaunchOptions
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.config import NotifyConfig, RetryConfig
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import RunRecord, from_json, to_json
from tests.support.plans import SOURCES, fake_router, run_record, small_config


def told_plan(notify: dict[str, Any], workspace: str) -> Plan:
    """One stage, ``data``; retries as often as one likes, after hardly a pause."""
    config = small_config("data", backoff_s=0.3, retries=RetryConfig(judge_outage=-1, bug=0))
    section = from_json(NotifyConfig, {"pause_min": 0.0, **notify})
    return make_plan(replace(config, workspace=workspace, notify=section), SOURCES)


def told_run(
    root: Path,
    notify: dict[str, Any],
    resume: str = "",
    behaviour: dict[str, Any] | None = None,
    *,
    use_server: bool = False,
) -> RunOutcome:
    """Work on a run to its end; the router of this process must be patched."""
    workspace = Workspace.open(root)
    if behaviour is not None:
        atomic.write_json(workspace.root / "behaviour.json", {"data": behaviour})
    plan = told_plan(notify, str(workspace.root))
    run: RunRecord = replace(run_record(workspace, plan), config=to_json(plan.config))
    if resume:
        run = workspace.read_run(resume)
    launch = LaunchOptions(use_server=use_server, quiet=True, resumed=bool(resume))
    return work_on(plan, workspace, run, launch)


def patch_router(patch: pytest.MonkeyPatch) -> None:
    """Let the fake worker do the work of whatever this process works on."""
    patch.setattr(calls, "make_router", lambda _, workspace: fake_router(workspace))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patched:
        patch_router(patched)
        outcome = told_run(Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:4])
    sys.exit(outcome.exit_code)
