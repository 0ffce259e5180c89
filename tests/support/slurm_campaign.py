"""Attempts on a cluster, for tests of dispatch: claimed, submitted, looked at until all is well.

The jobs are :mod:`tests.support.slurm_job`, which tell what reaches them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.jobs.dispatcher import AttemptRef, JobRequest, JobStatus, OpenAttempt, WorkerCommand
from infra.slurm.dispatcher import SlurmDispatcher
from infra.slurm.profiles import Profile
from infra.slurm.scheduler import RealSlurm
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.config import Resources
from refiner_core.contract.plan import make_plan
from tests.support.plans import OWNER, SOURCES, small_config

JOB = Path(__file__).with_name("slurm_job.py")
SMALL = Resources(cpus=1, memory_gb=1, time_limit_min=10)


class Campaign:
    """A workspace whose jobs run on a cluster."""

    def __init__(self, folder: Path, profile: Profile | None = None, **options: Any) -> None:
        self.workspace = Workspace.open(folder)
        self.profile = profile or Profile(name="test", cpu_stages="slurm")
        self.dispatcher = self.another_dispatcher(**options)
        self.refs: list[AttemptRef] = []
        self.behave({})

    def another_dispatcher(
        self, commands: RealSlurm | None = None, poll_s: float = 0.2, **options: Any
    ) -> SlurmDispatcher:
        """As an orchestrator that is started again would make it."""
        return SlurmDispatcher(
            self.workspace,
            self.profile,
            scheduler_poll_s=poll_s,
            worker=WorkerCommand(self.workspace.root, (str(JOB),)),
            commands=commands,
            **{"patience": (3, 1.0), **options},
        )

    def behave(self, behaviour: Mapping[str, Any], **more: Any) -> None:
        """What jobs do that start from now on."""
        text = json.dumps({**behaviour, **more})
        (self.workspace.root / "behaviour.json").write_text(text)

    def claim(self, seed: int = 1, **changes: Any) -> JobRequest:
        """A request for a stage of its own (by seed); ``changes`` are fields of the request."""
        config = small_config("data")
        config = replace(config, data=replace(config.data, split_seed=seed))
        plan = make_plan(config, SOURCES)
        stage = plan.by_name["data"]
        before = self.workspace.layout.stage(stage.id).attempt_numbers()
        attempt = self.workspace.claim_attempt(
            stage, plan.config, {}, StageClaim(OWNER, "slurm", max(before, default=0))
        )
        self.refs.append(AttemptRef(stage.id, attempt.number))
        given = JobRequest(stage.id, attempt.number, attempt.comment, SMALL, kind="data")
        return replace(given, **changes)

    def end(self) -> None:
        """End what still runs."""
        for ref in self.refs:
            note = self.workspace.read_control(self.workspace.layout.attempt(*ref).job)
            if note is not None and "job_id" in note:
                RealSlurm().cancel(str(note["job_id"]))

    def submit(self, *requests: JobRequest) -> Sequence[JobRequest]:
        """Submit; all must be taken."""
        assert self.dispatcher.submit(requests) == {}
        return requests

    def open(self, request: JobRequest) -> OpenAttempt:
        """The attempt as the workspace knows it now."""
        attempt = self.workspace.read_attempt(request.stage_id, request.attempt)
        assert attempt is not None
        paths = self.workspace.layout.attempt(*request.ref)
        return OpenAttempt(request.ref, attempt, self.workspace.read_control(paths.started))

    def observe(self, *requests: JobRequest) -> dict[AttemptRef, JobStatus]:
        """One look."""
        return self.dispatcher.observe([self.open(r) for r in requests])

    def status(self, request: JobRequest) -> JobStatus:
        """One job now."""
        return self.observe(request)[request.ref]

    def wait(
        self, request: JobRequest, there: Callable[[JobStatus], bool], timeout_s: float = 240
    ) -> JobStatus:
        """Look until ``there`` says so."""
        deadline = time.monotonic() + timeout_s
        while not there(status := self.status(request)):
            assert time.monotonic() < deadline, f"still {status}; it said {self.said(request)}"
            time.sleep(0.05)
        return status

    def wait_dead(self, request: JobRequest, timeout_s: float = 240) -> JobStatus:
        """Look until it is over."""
        return self.wait(request, lambda s: s.liveness == "dead", timeout_s)

    def wait_begun(self, request: JobRequest, times: int = 1) -> None:
        """Wait until its process has begun (so often)."""
        deadline = time.monotonic() + 240
        while sum(line.startswith("begin") for line in self.said(request)) < times:
            assert time.monotonic() < deadline, self.status(request)
            time.sleep(0.05)

    def said(self, request: JobRequest) -> list[str]:
        """What the job has said, without the times."""
        return [line.partition(" ")[2] for line in self._lines(request)]

    def when(self, request: JobRequest, what: str) -> float:
        """When it said so, seconds of this machine's clock."""
        return next(float(line.split()[0]) for line in self._lines(request) if what in line)

    def job_id(self, request: JobRequest) -> str:
        """The noted id."""
        note = self.workspace.read_control(self.workspace.layout.attempt(*request.ref).job)
        return str(note["job_id"])

    def _lines(self, request: JobRequest) -> list[str]:
        paths = self.workspace.layout.attempt(*request.ref)
        try:
            return (paths.control / "said.txt").read_text().splitlines()
        except FileNotFoundError:
            return []
