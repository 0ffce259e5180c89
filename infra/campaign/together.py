"""What campaigns share that one process works on at once: history, local slots, looks at jobs.

In: campaigns that tell what they see and begin. Out: one answer for all of them, so that a shared
stage that has failed is not tried again by each, no more jobs run on this machine than may, and a
scheduler is asked once for all jobs, and handed those of one pass together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from infra.campaign.outage import one_by_one
from infra.campaign.reconcile import Taken, is_light
from infra.jobs.dispatch import Choice, Router, Told
from infra.jobs.failures import is_outage
from infra.jobs.protocol import AttemptRef, Dispatcher, JobRequest, JobSight, OpenAttempt


@dataclass
class Together:
    """What is known in common.

    Attributes
    ----------
    ended_before
        Stage id -> the newest attempt that had ended when the first of the campaigns saw it.
    """

    ended_before: dict[str, int] = field(default_factory=dict)
    _busy: dict[str, frozenset[str]] = field(default_factory=dict)

    def note_busy(self, run: str, stage_ids: Collection[str]) -> None:
        """Say which stages have a job on this machine, as far as a run's campaign sees."""
        if stage_ids:
            self._busy[run] = frozenset(stage_ids)
        else:
            self._busy.pop(run, None)

    def taken(self, own: Collection[str]) -> Taken:
        """Slots that stages take which are not among ``own``."""
        others = {i for ids in self._busy.values() for i in ids if i not in own}
        light = sum(map(is_light, others))
        return Taken(len(others) - light, light)


class SharedRouter(Router):
    """Looks at the jobs of all campaigns at once: :meth:`refresh` before a pass over them, and
    submits those that they begin in it at once: :meth:`flush` after it.

    Jobs of this machine are looked at and started whenever somebody asks: that costs nothing, and
    is newer.
    """

    def __init__(
        self, dispatchers: Mapping[str, Dispatcher], choose: Choice, *, missing: str = ""
    ) -> None:
        super().__init__(dispatchers, choose, missing=missing)
        self._asked: dict[AttemptRef, OpenAttempt] = {}
        self._seen: dict[AttemptRef, JobSight] = {}
        self._due: dict[str, list[tuple[Sequence[JobRequest], Told]]] = {}

    @classmethod
    def of(cls, router: Router) -> SharedRouter:
        """The same dispatchers, shared."""
        return cls(router.dispatchers, router.executor_for, missing=router.missing)

    def refresh(self) -> None:
        """One look at all jobs elsewhere that somebody has asked about since the last one."""
        asked, self._asked = self._asked, {}
        self._seen = {}
        try:
            self._seen = super().look(list(asked.values()))
        except Exception as error:
            if not is_outage(error):  # each campaign looks for itself, and meets it or not
                raise

    def submit(self, executor: str, requests: Sequence[JobRequest], tell: Told) -> None:
        """Start jobs of this machine now, others with the next :meth:`flush`."""
        if executor == "local":
            super().submit(executor, requests, tell)
        else:
            self._due.setdefault(executor, []).append((requests, tell))

    def flush(self) -> None:
        """Submit what is due, so that jobs of one shape are one array whatever trial they are of.

        Raises
        ------
        Exception
            An outage that one of the campaigns has met.
        """
        due, self._due = self._due, {}
        with one_by_one() as each:
            for executor, orders in due.items():
                with each():
                    failed = self.dispatchers[executor].submit([r for o, _ in orders for r in o])
                    for _, tell in orders:
                        with each():
                            tell(failed)

    def look(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobSight]:
        """As of the last :meth:`refresh`; who was not asked about then is looked at now."""
        orders = (order for due in self._due.values() for order in due)
        due = {request.ref for requests, _ in orders for request in requests}
        far = [a for a in attempts if a.attempt.executor != "local" and a.ref not in due]
        self._asked.update({a.ref: a for a in far})
        known = {a.ref: self._seen[a.ref] for a in far if a.ref in self._seen}
        soon = JobSight("live", running=False, reason="is being submitted")
        known |= {a.ref: soon for a in attempts if a.ref in due}
        return {**known, **super().look([a for a in attempts if a.ref not in known])}
