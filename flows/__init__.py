"""The top layer: Prefect flows, the `refiner` command, recipes, and the worker of a job.

A call goes ``cli`` -> ``checking`` (is the plan valid) -> ``running`` (one run) or ``sweeping``
(its trials), with messages by ``notifying``; ``api`` has the functions of all packages for scripts.
From Prefect it comes through the flows ``pipeline`` and ``sweep``, which ``serving`` deploys; the
same flows show a call from a terminal, in the process ``attach`` (``terminal_runs``). Jobs start in
``worker`` and ``ranks`` and carry out ``stages``. On existing records: ``publishing``, ``cards``,
``reporting``, ``rescoring``, ``diffing``, ``why``, ``proving``, ``nightly``, ``frames``;
``stored`` finds outputs of stages. On the machine: ``disk``, ``doctor``, ``certify``, ``judges``,
``tracking``, ``adopting``. ``starting`` makes recipes; ``ensure_task`` makes stages tasks of your
own flow (``from flows import begin_run, ensure``). ``tests/lint/arrows.py`` has the allowed imports
between packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.ensure_task import begin_run, ensure

__all__ = ["begin_run", "ensure"]


def __getattr__(name: str) -> Any:
    """Stages as tasks of your own flow: imported on first use, as they import Prefect."""
    if name in __all__:
        from flows import ensure_task

        return getattr(ensure_task, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
