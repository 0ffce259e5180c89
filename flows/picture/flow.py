"""The Prefect flow ``refiner``: a picture of a campaign, drawn by a process of its own.

In: a drawing (the graph) and something that says how stages are: a
:class:`flows.picture.feed.Feed` in the process that :mod:`flows.picture.drawer` runs, or a
campaign. Out: one flow run with a task run per stage and its artifacts on a Prefect server. This
module imports Prefect, which reads its settings from the environment when it is imported and takes
seconds: no command line imports it.

A task is an idempotent ``ensure(stage)``: it waits until the reconciler has brought the stage about
and has no retries, cache, results or time-out of its own. To run the same flow elsewhere (a
deployment, say), start a campaign, and call :func:`refiner` inside ``watching(drawing, campaign)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from prefect import flow, get_run_logger, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.context import TagsContext
from prefect.futures import PrefectFuture, wait
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from flows.picture.feed import Drawing, Feed, Node, NothingMore, Watched
from flows.picture.news import News
from flows.picture.posted import ReportNews
from flows.picture.poster import Poster
from infra.store.layout import is_sweep
from refiner_core.contract.views import StageView

_POLL_S = 1.0
_NEWS_S = 2.0
#: How long the orchestrator's last word is waited for after the last stage, seconds: longer than a
#: sweep takes for its last report at most.
_LAST_WORD_S = 90.0
Started = Callable[[str], None]
_WATCHED: ContextVar[tuple[Drawing, Watched, Started]] = ContextVar("watched")


@contextlib.contextmanager
def watching(
    drawing: Drawing, source: Watched, started: Started = lambda flow_run: None
) -> Iterator[None]:
    """Say what :func:`refiner` draws when it is called inside; ``started`` learns the run's id."""
    token = _WATCHED.set((drawing, source, started))
    try:
        with tags(*drawing.tags):
            yield
    finally:
        _WATCHED.reset(token)


@flow(  # type: ignore[untyped-decorator]  # mypy does not follow Prefect's imports
    name="refiner",
    flow_run_name="{recipe} {run}",
    retries=0,
    persist_result=False,
    validate_parameters=False,
)
def refiner(recipe: str, run: str, owner: str) -> State[Any]:
    """One task run per stage, in the plan's graph. ``owner`` is the process that works."""
    drawing, source, started = _WATCHED.get()
    started(str(flow_run.id))
    futures: dict[str, PrefectFuture[Any]] = {}
    # Task runs carry no tags: for each one that does, Prefect asks the server for a concurrency
    # slot, which takes a second or more.
    with TagsContext(current_tags=set()):
        for node in drawing.nodes:
            before = [_Ended(futures[name]) for name in node.inputs if name in futures]
            futures[node.name] = _stage_task(recipe, node, source).submit(wait_for=before)
    _wait_for(list(futures.values()), _tellers(drawing), source)
    return _flow_state({name: future.state for name, future in futures.items()})


def _tellers(drawing: Drawing) -> list[News | ReportNews]:
    """Who tells what happens beside the stages."""
    if drawing.story is None:
        return []
    tellers: list[News | ReportNews] = [News(drawing, drawing.story)]
    if is_sweep(drawing.run):
        tellers.append(ReportNews(drawing, drawing.story))
    return tellers


def _wait_for(
    futures: list[PrefectFuture[Any]], tellers: list[News | ReportNews], source: Watched
) -> None:
    """Wait for every stage, telling meanwhile what else happens; in the end all of it: the last
    report of a sweep is made after its last trial, and before the orchestrator says that it is
    over."""
    while tellers:
        over = not wait(futures, timeout=_NEWS_S).not_done
        if over and isinstance(source, Feed):
            source.ended.wait(_LAST_WORD_S)
        for teller in tellers:
            teller.tell()
        if over:
            break
    wait(futures)


class _Ended(PrefectFuture[Any]):  # type: ignore[misc]  # mypy does not follow Prefect's imports
    """An upstream stage's future that lets what follows run, however the stage ended.

    Prefect runs nothing after a cancelled or crashed task, and shows it as "not ready"; here the
    campaign says what became of it.
    """

    def __init__(self, future: PrefectFuture[Any]) -> None:
        super().__init__(task_run_id=future.task_run_id)
        self._future = future

    @property
    def state(self) -> State[Any]:
        state = self._future.state
        return Completed(data=True) if state.is_final() else state  # data: Prefect reads it

    def wait(self, timeout: float | None = None) -> None:
        self._future.wait(timeout)

    def result(self, timeout: float | None = None, raise_on_failure: bool = True) -> Any:
        self.wait(timeout)

    def add_done_callback(self, fn: Callable[[PrefectFuture[Any]], None]) -> None:
        self._future.add_done_callback(fn)


def _stage_task(recipe: str, node: Node, source: Watched) -> Any:
    @task(  # type: ignore[untyped-decorator]
        name=node.name,
        task_run_name=node.title.replace("{", "{{").replace("}", "}}"),
        cache_policy=NO_CACHE,
        retries=0,
        persist_result=False,
    )
    def ensure() -> State[Any]:
        return _follow(Poster(recipe, node), node, source)

    return ensure


def _follow(poster: Poster, node: Node, source: Watched) -> State[Any]:
    """Wait for a stage, showing how it goes, and say how it ended."""
    logger = get_run_logger()
    told = ""
    try:
        while True:
            view = source.wait(node.name, _POLL_S)
            if (news := f"{view.state} {view.message}".strip()) != told:
                logger.info("%s", news)
                told = news
            poster.show_state(view)
            poster.show(view)
            if view.terminal:
                poster.finish(view)
                return stage_state(view)
    except NothingMore as over:
        return Crashed(message=str(over))


def stage_state(view: StageView) -> State[Any]:
    """The Prefect state that says honestly how a stage ended."""
    said = f": {view.message}" if view.message else ""
    match view.state:
        case "done":
            return Completed(message=view.message or f"done in {view.seconds:.0f} s")
        case "skipped":
            return Completed(name="Skipped", message=f"skipped: {view.message or 'done before'}")
        case "failed":
            return Failed(message=view.message or "failed; the log says why")
        case "interrupted":
            return Cancelled(
                name="Interrupted", message=f"stopped{said} (the same command goes on from here)"
            )
        case _:
            return Cancelled(name="Blocked", message=f"not started{said or ': an input failed'}")


def _flow_state(states: dict[str, State[Any]]) -> State[Any]:
    """The worst of its stages' states, and how many there are of each."""
    names = [state.name or state.type.value for state in states.values()]
    message = ", ".join(f"{names.count(n)} {n.lower()}" for n in dict.fromkeys(names))
    ends = list(states.values())
    if any(s.is_crashed() for s in ends):
        return Crashed(message=message)
    if failed := [name for name, s in states.items() if s.is_failed()]:
        return Failed(message=f"{message}; failed: {', '.join(failed)}")
    if any(s.is_cancelled() for s in ends):
        return Cancelled(name="Interrupted", message=message)
    if all(s.name == "Skipped" for s in ends):
        return Completed(name="Skipped", message="everything was done before")
    return Completed(message=message)


def draw(drawing: Drawing, source: Watched, started: Started) -> None:
    """Draw a whole run; returns when every stage has ended."""
    with watching(drawing, source, started):
        refiner(recipe=drawing.recipe, run=drawing.run, owner=drawing.owner, return_state=True)
