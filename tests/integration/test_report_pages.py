"""Pages of runs and sweeps in a real browser: from a file, without a network."""

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from refiner_core.report.run import rendering as run_rendering
from refiner_core.report.sweep import rendering as sweep_rendering
from tests.support import run_reports, sweep_reports
from tests.support.browser import Page
from tests.support.command import wait_until
from tests.support.looking import POOR_CONTRAST, assert_harmless, drawn, go, seen

pytestmark = pytest.mark.browser

Show = Callable[..., None]
MAKERS = {"run": (run_reports, run_rendering), "sweep": (sweep_reports, sweep_rendering)}
WIDTH = "document.documentElement.scrollWidth"
FOCUSED = "document.activeElement"
both = pytest.mark.parametrize("kind", MAKERS)


def views(kind: str) -> tuple[tuple[str, str], ...]:
    """(name, title) of each view."""
    return MAKERS[kind][1].VIEWS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Path]:
    """Pages of made-up reports; each is made once."""
    folder = tmp_path_factory.mktemp("pages")

    def write(kind: str, name: str, reload_s: int) -> Path:
        path = folder / f"{kind}-{name}-{reload_s}.html"
        if not path.exists():
            reports, rendering = MAKERS[kind]
            text = rendering.page(getattr(reports, name)(), reload_s=reload_s)
            path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def show(browser: Page, made: Callable[[str, str, int], Path]) -> Iterator[Show]:
    """Opens the page of a report; afterwards no script has failed and no request has gone out."""

    def opened(kind: str, name: str, choice: str = "", *, reload_s: int = 0) -> None:
        browser.show(f"{made(kind, name, reload_s).as_uri()}#{choice}")

    browser.events.clear()
    yield opened
    assert_harmless(browser)


# ---------------------------------------------------------------- pages of both kinds


@both
def test_text_can_be_read_on_any_screen(browser: Page, show: Show, kind: str) -> None:
    try:
        for width, scheme in ((400, "light"), (1600, "dark")):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            show(kind, "full_report", f"d={scheme}")
            for view, title in views(kind):
                go(browser, view)
                assert seen(browser, ".view > h2") == [title]
                browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
                assert browser.run(POOR_CONTRAST) == [], f"{scheme}, {view}"
                assert browser.run(WIDTH) <= width, f"{view} at {width}"
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


@both
def test_hostile_text_is_shown_and_does_nothing(browser: Page, show: Show, kind: str) -> None:
    show(kind, "hostile_report")
    for view, title in views(kind):
        go(browser, view)
        assert "</script>" in browser.run("document.title")
        assert browser.run("getComputedStyle(document.body).display") == "block"
        assert seen(browser, ".view > h2") == [title]
        assert browser.run(f"{WIDTH} - document.documentElement.clientWidth") <= 0
    assert browser.run("document.querySelectorAll('img, main script, main style').length") == 0
    on = "[...document.querySelectorAll('*')].filter(e => [...e.attributes].some("
    assert browser.run(f"{on}a => a.name.startsWith('on'))).length") == 0
    go(browser, "curves")
    drawn(browser)
    browser.hover(".chart")
    browser.run("new Promise(done => setTimeout(done, 300))")
    assert "</script>" in browser.run("document.title"), "a name in a chart's tooltip was run"
    go(browser, "examples" if kind == "run" else "answers")
    assert "characters more are in report.json" in browser.text()


@both
def test_a_running_page_reloads_and_stays_in_place(browser: Page, show: Show, kind: str) -> None:
    view = {"run": "examples", "sweep": "cost"}[kind]
    show(kind, "running_report", f"v={view}&d=dark", reload_s=1)
    browser.run("window.first = true; scrollTo(0, 20)")
    loaded = "!window.first && document.readyState == 'complete'"
    wait_until(lambda: browser.run(loaded), "a reload", 30)
    assert seen(browser, ".view > h2") == [dict(views(kind))[view]]
    assert browser.run("scrollY") == 20
    assert browser.run("document.documentElement.dataset.scheme") == "dark"
    pause = seen(browser, "#pause")
    browser.run("document.querySelector('#pause').click()")
    assert seen(browser, "#pause") != pause


@both
def test_a_finished_page_prints_and_needs_no_scripts(browser: Page, show: Show, kind: str) -> None:
    show(kind, "full_report", reload_s=1)
    assert browser.run("document.body.dataset.reload") is None
    printed = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= len(views(kind))
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert seen(browser, ".view > h2") == [title for _, title in views(kind)]
    assert seen(browser, "nav, form, #scheme") == []
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show(kind, "full_report")
        words = browser.text()
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert [title for _, title in views(kind) if title not in words] == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("run", "empty_report"),
        *(("sweep", f"{n}_report") for n in ("one_arm", "nothing_done", "long_names")),
    ],
)
def test_small_and_strange_reports_have_a_whole_page(browser: Page, show: Show, kind, name) -> None:
    show(kind, name)
    for view, title in views(kind):
        go(browser, view)
        assert seen(browser, ".view > h2") == [title]
        assert not re.search(r"\b(NaN|nan|None|undefined)\b", browser.text())


def test_large_reports_are_bounded_and_open(
    browser: Page, show: Show, made: Callable[[str, str, int], Path]
) -> None:
    assert made("run", "huge_report", 0).stat().st_size < 5_000_000
    show("run", "huge_report", "curves")
    assert len(seen(browser, "figure")) == 30
    for view in ("stages", "incidents", "settings", "examples"):
        go(browser, view)
        assert "are in report.json" in browser.text(), view
    show("sweep", "large_report", "arms")
    assert len(seen(browser, ".cmp tbody tr")) == 200
    browser.run(
        "(() => { const q = document.querySelector('input[type=search]'); q.value = 'lr3-';"
        "q.dispatchEvent(new Event('input', {bubbles: true})) })()"
    )
    assert len(seen(browser, ".cmp tbody tr")) == 11, "ten arms and the baseline"


# ---------------------------------------------------------------- runs


def focus(browser: Page, selector: str) -> None:
    """Put the keyboard on the first element that fits and is seen."""
    browser.run(
        f"[...document.querySelectorAll('{selector}')].find(e => e.getClientRects().length).focus()"
    )


def test_the_views_of_a_run_are_walked_by_arrow_keys(browser: Page, show: Show) -> None:
    show("run", "full_report")
    browser.press("Tab")
    assert browser.run(f"{FOCUSED}.textContent") == "Skip to the content"
    browser.press("Enter")
    assert browser.run(f"{FOCUSED}.id") == "main"
    focus(browser, "nav a")
    for _, title in views("run"):
        assert seen(browser, ".view > h2") == [title]
        assert browser.run(f"{FOCUSED}.textContent").startswith(title)
        outline = browser.run(f"getComputedStyle({FOCUSED}).outlineStyle")
        assert outline == "solid", "nobody sees where the keyboard is"
        browser.press("ArrowDown")
    browser.press("ArrowUp")
    assert seen(browser, ".view > h2") == [views("run")[-2][1]]


def test_a_claim_leads_to_the_snippet_that_it_cites_and_back(browser: Page, show: Show) -> None:
    show("run", "full_report", "examples")
    focus(browser, 'a.claim[data-n="4"]')
    browser.press("Enter")
    here = seen(browser, ".source.here")
    assert [text.split(">")[0] for text in here] == ["<snippet id=S_e8Q9", "<snippet id=S_w1"]
    assert browser.run(f"{FOCUSED}.matches('.source.here')")
    inside = browser.run(
        "(() => { const e = document.querySelector('.source.here').getBoundingClientRect(),"
        "p = document.activeElement.closest('pre').getBoundingClientRect();"
        "return e.top >= Math.max(0, p.top) && e.bottom <= Math.min(innerHeight, p.bottom) })()"
    )
    assert inside, "the snippet is not in sight"
    browser.press("Escape")
    assert browser.run(f"{FOCUSED}.dataset.n") == "4"


def test_better_needs_an_interval_clear_of_0(browser: Page, show: Show) -> None:
    show("run", "full_report")
    says = [" ".join(s.split()) for s in seen(browser, ".before-after tr td:nth-of-type(3)")]
    assert "▲ +0.170 [0.130, 0.210] better" in says
    assert says[-1] == "◆ +0.302 [0.262, 0.342] changed", "more claims are not better or worse"
    go(browser, "numbers")
    browser.run("document.querySelectorAll('#numbers details')[1].open = true")
    assert "■ +0.17 [−0.23, 0.57] not clear" in " ".join(browser.text().split())


# ---------------------------------------------------------------- sweeps


SORT = "document.querySelector('.cmp.on th[data-sort=difference] button').click()"


def test_arms_are_sorted_and_missing_ones_come_last(browser: Page, show: Show) -> None:
    show("sweep", "full_report", "arms")
    browser.run(f"{SORT}; {SORT}")
    first = ["mixed-0", "static-0.2", "mixed-0.2", "instance-0.2"]
    assert seen(browser, ".cmp tbody .arm")[:4] == first
    assert set(seen(browser, ".cmp tbody .arm")[4:]) == {"static-0", "instance-0"}
    browser.show(browser.run("location.href"))
    assert seen(browser, ".cmp tbody .arm")[:4] == first, "what was chosen survives a reload"
    browser.run(SORT)
    assert seen(browser, ".cmp tbody .arm")[:2] == ["static-0", "static-0.2"]


def test_a_flipped_prompt_leads_to_its_answers(browser: Page, show: Show) -> None:
    show("sweep", "full_report", "flips")
    browser.run("document.querySelectorAll('#flips a[data-goto]')[4].click()")
    assert seen(browser, ".prompt h3")[0].startswith("Who founded the observatory")
    assert [c.split()[0] for c in seen(browser, ".answer-card h4")] == ["static-0", "mixed-0"]
    assert seen(browser, ".answer-card .claim[title*='cites S_']")[0].startswith("<snippet id=S_")
    browser.run("document.querySelector('.prompt.on .answer-card:not([hidden]) summary').click()")
    assert "Answers first" in browser.text()


def test_messages_of_agents_and_tools_are_shown_and_do_nothing(browser: Page, show: Show) -> None:
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.call("Emulation.setEmulatedMedia", features=[feature])
        for choice in ("attempts", "v=answers&p=1&a=&l=&r="):
            show("sweep", "agents_report", choice)
            assert browser.run("document.title") == "Rejection sampling before GRPO"
            assert browser.run("document.querySelectorAll('main img, main script').length") == 0
            assert browser.run(POOR_CONTRAST) == []
            assert browser.run(wide) <= 0
    browser.call("Emulation.setEmulatedMedia", features=[])
