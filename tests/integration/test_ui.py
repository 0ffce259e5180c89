"""`refiner ui` in a real browser: filters, order, curves, reports; only with the key."""

from __future__ import annotations

import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.store.workspace import Workspace
from refiner_core.report.runs.rendering import page
from tests.bench.many_runs import write_runs
from tests.support.browser import Page
from tests.support.command import command, environment, refiner, wait_until
from tests.support.looking import assert_harmless, drawn, seen

pytestmark = pytest.mark.browser
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 runs, three of them with logged metrics, one with a hostile note."""
    folder = tmp_path_factory.mktemp("ui")
    write_runs(folder, 300)
    ws = Workspace.open(folder)
    for name in ws.run_ids()[:3]:
        grpo = ws.layout.attempt(ws.read_run(name).stages["grpo"], 1)
        lines = [f'{{"step": {step}, "metrics": {{"scores": {step / 10}}}}}\n' for step in range(9)]
        grpo.metrics.parent.mkdir(parents=True, exist_ok=True)
        grpo.metrics.write_text("".join(lines))
    ws.write_label(ws.run_ids()[0], {"note": HOSTILE, "tags": ["odd"]})
    return folder


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    """The address of a served page, with its key."""
    process = subprocess.Popen(
        command("ui", f"workspace={place}"), stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(400)


def choose(browser: Page, selector: str, value: str, event: str = "change") -> None:
    browser.run(
        f"(() => {{ const e = document.querySelector({selector!r}); e.value = {value!r};"
        f"e.dispatchEvent(new Event({event!r}, {{bubbles: true}})) }})()"
    )


def rows(browser: Page) -> list[str]:
    return seen(browser, ".tall .row")


def test_runs_are_searched_ordered_filtered_and_compared(
    browser: Page, address: str, place: Path
) -> None:
    browser.events.clear()
    browser.show(address)
    assert "300 of 300 runs" in browser.text()
    assert 20 <= len(rows(browser)) < 100, "only rows in sight are drawn"
    choose(browser, "select[data-state=s]", "m")
    values = [float(re.search(r"(\d\.\d{3}) \[", row)[1]) for row in rows(browser)]
    assert values == sorted(values, reverse=True)
    choose(browser, "#where", "reward > 0.5 and grpo.beta < 0.005")
    wait_until(lambda: "300 of 300" not in browser.text(), "the filter")
    choose(browser, "#where", "reward >")
    wait_until(lambda: "is not understood" in browser.text(), "the refusal")
    choose(browser, "#where", "")
    choose(browser, "input[data-state=q]", "#odd", "input")
    wait_until(lambda: len(rows(browser)) == 1, "the search")
    assert HOSTILE in rows(browser)[0]
    browser.run("document.querySelector('.tall input').click()")
    wait_until(lambda: drawn(browser), "the curve")
    ((name, _, first, last),) = drawn(browser)
    assert (name, first, last) == (Workspace.read_only(place).run_ids()[0], 0.0, 0.8)
    assert "refiner report" in browser.run("document.querySelector('#commands').textContent")
    choose(browser, "input[data-state=q]", "", "input")
    browser.run("[...document.querySelectorAll('.tall input')].find(e => !e.checked).click()")
    assert "/runs/" in browser.run("document.querySelector('#compare:not([hidden])').href")
    assert "Runtime.exceptionThrown" not in [event["method"] for event in browser.events]
    assert browser.run("document.title").startswith("Runs of"), "a hostile note is text"


def test_a_row_leads_to_its_report(browser: Page, address: str) -> None:
    browser.show(address)
    link = browser.run("document.querySelector('.tall a').href")
    browser.show(link)
    assert "tiny" in browser.text()
    assert "grpo" in browser.text()


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_nobody_reads_without_the_key_or_through_another_name(address: str) -> None:
    base = address.partition("?")[0]
    for path in ("", "rows.json", "curves.json?run=x", "run/x", "?key=wrong"):
        assert status(f"{base}{path}") == 403, path
    assert status(base, Cookie="refiner-ui=wrong") == 403
    assert status(address, Host="evil.example") == 400


def test_ten_thousand_runs_as_a_file_paint_at_once(
    browser: Page, tmp_path: Path, place: Path
) -> None:
    row: dict[str, Any] = {
        **{"short": "0000", "recipe": "tiny", "started": "2026-01-01T00:00:00", "state": "done"},
        **{"text": "grpo.beta=0.1", "cost": "1 GPU-h", "cost_value": 1.0, "link": ""},
        "metrics": {"reward": [0.5, 0.4, 0.6]},
    }
    many = [{**row, "run": f"run-{n}"} for n in range(10_000)]
    path = tmp_path / "index.html"
    path.write_text(page("w", row["started"], many, [], ["reward"], live=False))
    browser.events.clear()
    browser.show(path.as_uri())
    assert "10000 of 10000 runs" in browser.text()
    assert len(rows(browser)) < 100
    assert path.stat().st_size < 5_000_000
    browser.run("document.querySelector('.rows').scrollTop = 1e9")
    names = "document.querySelector('.tall').innerHTML"
    wait_until(lambda: "run-9999" in browser.run(names), "the last row")
    done = refiner("ui", f"workspace={place}", "--out", str(tmp_path / "out"))
    assert done.code == 0, done.stderr
    browser.show((tmp_path / "out" / "index.html").as_uri())
    time.sleep(0.2)
    assert "300 of 300 runs" in browser.text()
    assert_harmless(browser)
