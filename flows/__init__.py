"""The wiring: Prefect flows, the `refiner` command, recipes, and the worker that a job runs.

A call goes ``cli`` -> ``checking`` (is the plan fit) -> ``running`` (one run) or ``sweeping`` (its
arms), with its messages (``notifying``); ``api`` names the functions of all rooms for scripts. From
Prefect it comes by the flows ``pipeline`` and ``sweep``, which ``serving`` deploys; a call from a
terminal is shown by the same flows, in the process ``attach`` (``terminal_runs``). Jobs come in by
``worker`` and ``ranks`` and do what ``stages`` says. On what is there: ``publishing``, ``cards``,
``reporting``, ``rescoring``, ``diffing``, ``why``, ``proving``, ``nightly``, ``frames``; what
stages have left is found by ``stored``; on the machine: ``disk``, ``doctor``, ``certify``,
``judges``, ``tracking``, ``adopting``.
``starting`` makes recipes; ``ensuring`` makes stages tasks of one's own flow
(``from flows import begin_run, ensure``). The order in which rooms may import each other stands in
``tests/lint/arrows.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.ensuring import begin_run, ensure

__all__ = ["begin_run", "ensure"]


def __getattr__(name: str) -> Any:
    """Stages as tasks of one's own flow: they import Prefect, so only who asks for them does."""
    if name in __all__:
        from flows import ensuring

        return getattr(ensuring, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
