"""The page of all samples in a real browser: as a file and served; filters, search, permalinks."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.reporting.run.report import report_run
from tests.support.browser import Page
from tests.support.command import command, environment, wait_until
from tests.support.looking import POOR_CONTRAST, assert_harmless, seen
from tests.support.sampled_run import BAD, sampled_run

pytestmark = pytest.mark.browser
HASH = "decodeURIComponent(location.hash)"
Show = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written report with its page of samples."""
    run = sampled_run(tmp_path_factory.mktemp("samples"))
    return report_run(workspace=run.workspace.root).folder


@pytest.fixture
def show(browser: Page, folder: Path) -> Iterator[Show]:
    """Opens the page with these choices, and gives its rows; nothing failed or was asked for."""

    def opened(choice: str) -> list[str]:
        browser.show(f"{(folder / 'samples.html').as_uri()}#{choice}")
        return rows(browser)

    browser.events.clear()
    yield opened
    assert_harmless(browser)


def rows(browser: Page) -> list[str]:
    """Rows in sight, once the index is read and a search has ended."""

    def ready() -> bool:
        text = str(browser.run("document.querySelector('#count').textContent"))
        return " of 33 samples" in text and "searched" not in text

    wait_until(ready, "the list")
    return seen(browser, ".tall .row")


def sample(browser: Page, text: str) -> str:
    """The text of the shown sample, once it has this one."""
    found = "document.querySelector('.sample').innerText"
    wait_until(lambda: text in browser.run(found), text)
    return str(browser.run(found))


def test_samples_are_filtered_ordered_and_searched(browser: Page, show: Show) -> None:
    assert len(show("v=summary")) >= 10
    assert len(show("src=s:evaluate-base")) == 6
    assert len(show("t0=2&t1=3")) == 4
    assert len(show("src=s:evaluate-base&f=%3Dmalformed")) == 3
    assert len(show("c=unusable&o=2")) == 3
    assert len(show("c=unusable&o=0")) == 0
    assert len(show("q=the+judge:+alert")) == 3
    assert len(show("q=i+do+not+know.")) == 6
    assert show("q=judgements") == [], "names of fields are no text"
    scores = [float(row.split()[0][:4]) for row in show("src=s:evaluate-grpo&ord=best")]
    assert scores == sorted(scores, reverse=True)
    changed = show("src=f:greedy&ord=up")
    assert "change +" in changed[0]
    browser.run("document.querySelector('.tall a').click()")
    sample(browser, "this prompt changed by +")
    browser.run("(() => { const e = document.querySelector('[data-state=r0]'); e.value = '99';"
                "e.dispatchEvent(new Event('input', {bubbles: true})) })()")  # fmt: skip
    assert rows(browser) == []
    assert "r0=99" in browser.run(HASH)


def test_a_permalink_keeps_the_sample_and_the_filters(browser: Page, show: Show) -> None:
    show("src=s:grpo&t0=3")
    browser.press("j")
    browser.press("j")
    name = "grpo/3/row-7/0"
    assert name in browser.run(HASH)
    first = sample(browser, "grpo, step 3 · row-7")
    before = browser.run("location.href")
    browser.show(before)
    assert sample(browser, "row-7") == first
    assert len(rows(browser)) == 11
    assert len(seen(browser, ".row[aria-current]")) == 1
    browser.press("k")
    assert "grpo/3/row-6/0" in browser.run(HASH)
    show("s=grpo/99/none/0")
    sample(browser, "is on this page")


def test_hostile_texts_do_nothing_and_turns_of_agents_are_shown(browser: Page, show: Show) -> None:
    show("t0=7")
    for number, text in enumerate(("the judge", "Empty answer", "look_up")):
        browser.run(f"document.querySelectorAll('.tall a')[{number}].click()")
        sample(browser, text)
        browser.run("document.querySelectorAll('.sample details').forEach(d => { d.open = true })")
    assert "found it" in sample(browser, "refunded")
    assert browser.run("document.title").startswith("Samples of")
    assert browser.run("getComputedStyle(document.body).display") == "block"
    assert browser.run("document.querySelectorAll('img, main script, main style').length") == 0
    show("q=alert(1)&t0=7")
    browser.run("document.querySelector('.tall a').click()")
    assert BAD[:20] in sample(browser, "unusable")


def test_the_page_can_be_read_in_light_and_dark_on_narrow_and_wide_screens(
    browser: Page, show: Show
) -> None:
    try:
        for width, scheme in ((400, "light"), (1600, "dark")):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            show(f"d={scheme}&q=the&s=grpo/7/odd+")
            for choice in ("t0=7", "src=s:evaluate-base&ord=change&q=not"):
                show(f"d={scheme}&{choice}")
                browser.run("document.querySelector('.tall a').click()")
                sample(browser, "permalink")
                assert browser.run(POOR_CONTRAST) == [], scheme
                assert browser.run("document.documentElement.scrollWidth") <= width
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_a_missing_part_is_named(browser: Page, folder: Path) -> None:
    browser.show((folder / "samples.html").as_uri())
    rows(browser)
    browser.run("all.sources.forEach(s => { s.key = 'gone'; })")
    browser.run("document.querySelector('.tall a').click()")
    wait_until(lambda: "gone-0.js is missing" in browser.text(), "the error")


def test_a_served_report_leads_to_its_samples(browser: Page, folder: Path) -> None:
    words = command("ui", f"workspace={folder.parents[1]}")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        browser.show(address)
        browser.show(f"{address.partition('?')[0]}run/{folder.name}")
        browser.show(browser.run("document.querySelector('.sample-link').href"))
        sample(browser, "permalink")
        assert len(rows(browser)) > 10
        wrong = f"{address.partition('?')[0]}run/{folder.name}/samples/..%2Freport.json"
        browser.show(wrong)
        assert "There is no such page." in browser.text()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(400)


def test_a_report_leads_to_its_samples(browser: Page, folder: Path) -> None:
    browser.show((folder / "report.html").as_uri() + "#examples")
    link = browser.run("document.querySelector('.sample-link').href")
    browser.show(link)
    sample(browser, "permalink")
