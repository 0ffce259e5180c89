"""Which dispatcher a stage's job goes to, and all of them looked at as one.

In: a recipe's ``dispatch`` section. Out: a :class:`Router`: this machine alone, or this machine for
what the cluster's profile keeps here (CPU stages, stages that need the network) and Slurm for the
rest. An attempt says for good by which executor it was submitted, so whoever looks later asks the
right one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from infra.jobs.local import LocalDispatcher
from infra.jobs.protocol import AttemptRef, Dispatcher, JobRequest, JobSight, OpenAttempt
from infra.store.workspace import Workspace
from refiner_core.contract.config import DispatchConfig
from refiner_core.contract.plan import PlannedStage

#: Names the executor that a stage's job goes to.
Choice = Callable[[PlannedStage], str]


class Router:
    """Several dispatchers as one; see :class:`~infra.jobs.protocol.Dispatcher` for the methods.

    Parameters
    ----------
    dispatchers
        By executor name.
    choose
        The executor of a stage that is about to be launched.
    missing
        Why a dispatcher is not there that the configuration names; empty if it names none.
    """

    def __init__(
        self, dispatchers: Mapping[str, Dispatcher], choose: Choice, *, missing: str = ""
    ) -> None:
        self.dispatchers, self._choose = dict(dispatchers), choose
        self.missing = missing

    def executor_for(self, stage: PlannedStage) -> str:
        """Where the next attempt at a stage goes."""
        return self._choose(stage)

    def check(self, stages: Iterable[PlannedStage]) -> None:
        """Refuse stages that can never run where they would go; errors as of the dispatchers."""
        for stage in stages:
            self.dispatchers[self.executor_for(stage)].check(stage)

    def submit(
        self, executor: str, requests: Sequence[JobRequest]
    ) -> Mapping[AttemptRef, Exception]:
        """Start jobs of one executor; what went wrong, by attempt."""
        return self.dispatchers[executor].submit(requests)

    def look(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobSight]:
        """All of them, by one look per dispatcher. Jobs of an executor that this call does not
        have are ``unknown``."""
        groups: dict[str, list[OpenAttempt]] = defaultdict(list)
        for attempt in attempts:
            groups[attempt.attempt.executor].append(attempt)
        seen = {a.ref: self._out_of_sight(a) for a in attempts}
        for executor, members in groups.items():
            if executor in self.dispatchers:
                seen.update(self.dispatchers[executor].look(members))
        return seen

    def _out_of_sight(self, attempt: OpenAttempt) -> JobSight:
        executor = attempt.attempt.executor
        reason = f"how its job is, only a call with dispatch.executor={executor} can see"
        if self.missing:
            reason = f"how its job is cannot be seen from here: {self.missing}"
        return JobSight("unknown", reason=reason)

    def stop(self, attempt: OpenAttempt) -> bool:
        """Ask the worker to save and end; False if nobody could be asked."""
        found = self.dispatchers.get(attempt.attempt.executor)
        return found is not None and found.stop(attempt)

    def kill(self, attempt: OpenAttempt) -> bool:
        """End the job and all it has started; False if the order did not get through."""
        found = self.dispatchers.get(attempt.attempt.executor)
        return found is None or found.kill(attempt)

    def release(self, attempt: OpenAttempt) -> None:
        """Let a held job start again."""
        if found := self.dispatchers.get(attempt.attempt.executor):
            found.release(attempt)


def make_router(config: DispatchConfig, workspace: Workspace, *, adopt: bool = True) -> Router:
    """The dispatchers that a recipe names. ``adopt=False``: only to look; nothing is written.

    Raises
    ------
    UnsupportedError
        ``dispatch.executor=slurm`` on a machine without Slurm's commands.
    ConfigurationError
        The profile cannot be read.
    """
    local = LocalDispatcher(workspace)
    if config.executor == "local":
        return Router({"local": local}, lambda _: "local")
    from infra.slurm.dispatcher import SlurmDispatcher
    from infra.slurm.profiles import load_profile

    profile = load_profile(config.profile)
    slurm = SlurmDispatcher(
        workspace, profile, scheduler_poll_s=config.scheduler_poll_s, adopt=adopt
    )
    return Router({"local": local, "slurm": slurm}, profile.executor_for)


def router_to_look(config: DispatchConfig, workspace: Workspace) -> Router:
    """Like :func:`make_router`, for who only looks (plan, status): never refuses. Where Slurm
    cannot be asked, its jobs are ``unknown``."""
    from refiner_core.contract.errors import RefinerError

    try:
        return make_router(config, workspace, adopt=False)
    except RefinerError as error:
        local = LocalDispatcher(workspace)
        return Router({"local": local}, lambda _: config.executor, missing=str(error))
