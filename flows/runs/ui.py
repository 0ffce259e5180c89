"""`refiner ui`: a page over all runs of a workspace, served on loopback or written as a file.

In: a workspace. Out: :func:`app`, a Starlette application that only reads, and :func:`write_page`.
Prefect launches and cancels; this page finds, compares and links. Every request needs the key of
the printed address, which the page keeps as a cookie, and a host name of loopback.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route

from flows.running.status import find_run, stage_names
from flows.runs.run_table import RunRow, changes_of, list_rows, main_metric
from flows.stored import attempts_of
from infra.host.files import names_in
from infra.prefect_server import server_status
from infra.store import atomic
from infra.store.records import now_text
from infra.store.sweep_records import sweep_names
from infra.store.traces import read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.records import RunRecord
from refiner_core.report.drawing import Series, chart
from refiner_core.report.printing import hours, label
from refiner_core.report.runs.rendering import page

#: Curves that are shown first.
_CURVES = ("scores", "rewards/mean", "reward", "loss/train_avg", "loss")
_MOST_RUNS, _COOKIE = 12, "refiner-ui"
#: Files of a page of samples, and number of runs whose pages are kept while serving.
_OF_SAMPLES = re.compile(r"samples\.html|samples/[a-z0-9]+(-\d+)?\.js")
_MOST_PAGES = 4


def write_page(workspace: str | Path, folder: Path) -> Path:
    """Write the page as ``index.html``; it links to reports that exist.

    Raises
    ------
    WorkspaceError
        The folder is no workspace.
    """
    ws = Workspace.read_only(workspace)

    def link(kind: str, name: str) -> str:
        file = "samples.html" if kind == "samples" else "report.html"
        report = ws.layout.reports / name / file
        return report.as_uri() if report.exists() else ""

    path = folder / "index.html"
    atomic.write_text(path, _page(ws, link, live=False))
    return path


def app(workspace: str | Path, key: str) -> Starlette:
    """The application.

    Parameters
    ----------
    workspace
        The folder that has the records.
    key
        Needed by every request: once as ``?key=``, then as a cookie.
    """
    ws = Workspace.read_only(workspace)
    pages, lock = tempfile.TemporaryDirectory(prefix="refiner-ui-"), threading.Lock()

    def index(request: Request) -> Response:
        if secrets.compare_digest(request.query_params.get("key", ""), key):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, key, httponly=True, samesite="strict")
            return answer
        return _refused(request) or HTMLResponse(_page(ws, _link, live=True))

    def rows(request: Request) -> Response:
        where = request.query_params.get("where", "")
        return _refused(request) or _answer(lambda: {"rows": _rows(ws, _link, where)})

    def curves(request: Request) -> Response:
        wanted = request.query_params
        runs = wanted.getlist("run")[:_MOST_RUNS]
        return _refused(request) or _answer(lambda: curves_of(ws, runs, wanted.get("metric", "")))

    def report(request: Request) -> Response:
        kind, name = request.path_params["kind"], request.path_params["name"]
        if refused := _refused(request):
            return refused
        return RedirectResponse(_link(kind, name)) if kind == "run" else _report(ws, kind, name)

    def samples(request: Request) -> Response:
        return _refused(request) or _samples(ws, Path(pages.name), lock, **request.path_params)

    def _refused(request: Request) -> Response | None:
        if secrets.compare_digest(request.cookies.get(_COOKIE, ""), key):
            return None
        return PlainTextResponse("Open the address that `refiner ui` has printed.", 403)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/rows.json", rows),
            Route("/curves.json", curves),
            Route("/run/{name}/{file:path}", samples),
            Route("/{kind}/{name:path}", report),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
    )


def _link(kind: str, name: str) -> str:
    if kind in ("run", "samples"):
        return f"/run/{name}/{'report' if kind == 'run' else kind}.html"
    return f"/{kind}/{name}"


def _answer(make: Any) -> Response:
    try:
        return JSONResponse(make())
    except RefinerError as error:
        return PlainTextResponse(str(error), 400)


def _report(workspace: Workspace, kind: str, name: str) -> Response:
    """The report of a run, of several (``runs/A,B``), of a sweep or a night, made now; nothing is
    written to the workspace."""
    from flows.reporting.run.report import report_run
    from flows.reporting.several import report_runs
    from flows.reporting.writing import report_sweep

    if kind == "night":
        night = workspace.layout.nightly / Path(name).name / "nightly.html"
        there = night.exists()
        text = night.read_text(encoding="utf-8") if there else "This night has no page yet."
        return HTMLResponse(text) if there else PlainTextResponse(text, 404)
    makers: dict[str, Any] = {
        "run": partial(report_run, samples=False),
        "runs": report_runs,
        "sweep": report_sweep,
    }
    if kind not in makers:
        return PlainTextResponse("There is no such page.", 404)
    named = name.split(",") if kind == "runs" else name
    with tempfile.TemporaryDirectory(prefix="refiner-ui-") as folder:
        try:
            made = makers[kind](named, workspace.root, folder=folder)
            return HTMLResponse(Path(made.page).read_text(encoding="utf-8"))
        except RefinerError as error:
            return PlainTextResponse(str(error), 404)


def _samples(
    workspace: Workspace, pages: Path, lock: threading.Lock, name: str, file: str
) -> Response:
    """The report of a run, or its page of samples, written for this server's time; or a script of
    that page."""
    from flows.reporting.run.report import report_run

    if file == "report.html":
        return _report(workspace, "run", name)
    try:
        run = find_run(workspace, name)
        if run is None or not _OF_SAMPLES.fullmatch(file):
            return PlainTextResponse("There is no such page.", 404)
        folder = pages / run.run
        if file == "samples.html":
            with lock:
                for old in sorted(pages.iterdir(), key=lambda p: p.stat().st_mtime)[:-_MOST_PAGES]:
                    shutil.rmtree(old)
                report_run(run.run, workspace.root, folder=folder)
    except RefinerError as error:
        return PlainTextResponse(str(error), 404)
    path = folder / file
    if not path.is_file():
        return PlainTextResponse(f"No sample of {run.run} is stored.", 404)
    return FileResponse(path, headers={"Cache-Control": "no-cache"})


# ---------------------------------------------------------------- content


def _page(workspace: Workspace, link: Any, *, live: bool) -> str:
    listed = list_rows(workspace.root)
    first = main_metric(listed)
    names = dict.fromkeys([first] * bool(first))
    names |= dict.fromkeys(sorted({name for row in listed for name in row.metrics}))
    prefect = ""
    with suppress(OSError, RefinerError):
        info = server_status().info
        prefect = "" if info is None else info.url
    rows = _values(listed, link)
    others = [*_sweeps(workspace, link), *_nights(workspace, link)]
    where = (str(workspace.root), now_text())
    return page(*where, rows, others, list(names), live=live, prefect=prefect)


def _rows(workspace: Workspace, link: Any, where: str) -> list[dict[str, Any]]:
    return _values(list_rows(workspace.root, where=where), link)


def _values(rows: Sequence[RunRow], link: Any) -> list[dict[str, Any]]:
    changes, found = changes_of(rows), []
    for row in rows:
        cost = row.gpu_hours or row.cpu_hours
        unit = "GPU-h" if row.gpu_hours else "CPU-h"
        text = [row.sweep, *changes[row.run], label(row.note, row.tags)]
        found.append(
            {
                **{"run": row.run, "short": row.run[-4:], "recipe": row.recipe},
                **{
                    "started": row.started,
                    "state": row.state,
                    "text": " ".join(filter(None, text)),
                },
                **{"cost": f"{hours(cost)} {unit}" if cost else "", "cost_value": cost},
                "metrics": {name: _number(entry) for name, entry in row.metrics.items()},
                **{"link": link("run", row.run), "samples": link("samples", row.run)},
            }
        )
    return found


def _number(entry: Mapping[str, Any]) -> list[float | None]:
    known = (entry.get(name) for name in ("value", "low", "high"))
    return [None if value is None else float(f"{value:.5g}") for value in known]


def _sweeps(workspace: Workspace, link: Any) -> list[dict[str, str]]:
    from flows.sweeping.status import SweepWatcher
    from infra.store.sweep_records import read_sweep

    found = []
    for name in sweep_names(workspace):
        standings = SweepWatcher(workspace, name).standings(read_sweep(workspace, name))
        done = sum(standing.state == "done" for standing in standings)
        state = f"{done} of {len(standings)} trials are done"
        found.append({"kind": "sweep", "name": name, "state": state, "link": link("sweep", name)})
    return found


def _nights(workspace: Workspace, link: Any) -> list[dict[str, str]]:
    nights = names_in(workspace.layout.nightly)
    return [{"kind": "nights", "name": n, "state": "", "link": link("night", n)} for n in nights]


def curves_of(workspace: Workspace, runs: Sequence[str], metric: str) -> dict[str, Any]:
    """One logged metric of several runs over steps, and the names of all.

    Raises
    ------
    ConfigurationError
        There is no such run.
    """
    logs = {}
    for name in runs:
        record = find_run(workspace, name)
        if record is not None:
            logs[record.run] = _logged(workspace, record)
    names = list(
        dict.fromkeys(n for steps in logs.values() for line in steps.values() for n in line)
    )
    chosen = metric or next((n for n in _CURVES if n in names), names[0] if names else "")
    series = []
    for place, (run, steps) in enumerate(logs.items(), start=1):
        kept = {step: line[chosen] for step, line in steps.items() if chosen in line}
        if kept:
            series.append(Series(run, list(kept), list(kept.values()), place=place))
    return {"metric": chosen, "metrics": names, "chart": chart(series, of=max(1, len(series)))}


def _logged(workspace: Workspace, run: RunRecord) -> dict[int, dict[str, float | None]]:
    """Metrics by step of the last training stage that has logged any."""
    steps: dict[int, dict[str, float | None]] = {}
    trained = [n for n in stage_names(run) if run.stages[n].rpartition("-")[0] in TRAINED]
    for name in reversed(trained):
        for attempt in attempts_of(workspace, run.stages[name]).values():
            for line in read_metrics(attempt.metrics):
                steps.setdefault(line.step, {}).update(line.metrics)
            if steps:
                return steps
    return steps
