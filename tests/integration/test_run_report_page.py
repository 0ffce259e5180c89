"""The page of a run in a real browser, as somebody uses it: from a file, without a network, by
keyboard alone, in the light and in the dark, on a wide screen and on a narrow one."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from refiner_core.report.run.rendering import VIEWS, page
from tests.support import run_reports
from tests.support.browser import Page
from tests.support.looking import POOR_CONTRAST, assert_harmless, drawn, go, seen

pytestmark = pytest.mark.browser

Show = Callable[..., None]
WIDTH = "document.documentElement.scrollWidth"
FOCUSED = "document.activeElement"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Pages of made-up reports; each is made once."""
    folder, pages = tmp_path_factory.mktemp("pages"), dict[tuple[str, int], Path]()

    def write(name: str, reload_s: int) -> Path:
        if (name, reload_s) not in pages:
            path = pages[name, reload_s] = folder / f"{name}-{reload_s}.html"
            text = page(getattr(run_reports, name)(), reload_s=reload_s)
            path.write_text(text, encoding="utf-8")
        return pages[name, reload_s]

    return write


@pytest.fixture
def show(browser: Page, made: Callable[[str, int], Path]) -> Iterator[Show]:
    """Opens the page of a report; afterwards nothing must have gone wrong or gone out."""

    def opened(name: str, choice: str = "", *, reload_s: int = 0) -> None:
        browser.show(f"{made(name, reload_s).as_uri()}#{choice}")

    browser.events.clear()
    yield opened
    assert_harmless(browser)


def focus(browser: Page, selector: str) -> None:
    """Put the keyboard on the first element that fits and is seen."""
    browser.run(
        f"[...document.querySelectorAll('{selector}')].find(e => e.getClientRects().length).focus()"
    )


def test_the_views_of_a_run_are_walked_by_arrow_keys(browser: Page, show: Show) -> None:
    show("full_report")
    browser.press("Tab")
    assert browser.run(f"{FOCUSED}.textContent") == "Skip to the content"
    browser.press("Enter")
    assert browser.run(f"{FOCUSED}.id") == "main"
    focus(browser, "nav a")
    for _, title in VIEWS:
        assert seen(browser, ".view > h2") == [title]
        assert browser.run(f"{FOCUSED}.textContent").startswith(title)
        outline = browser.run(f"getComputedStyle({FOCUSED}).outlineStyle")
        assert outline == "solid", "nobody sees where the keyboard is"
        browser.press("ArrowDown")
    browser.press("ArrowUp")
    assert seen(browser, ".view > h2") == [VIEWS[-2][1]]


def test_examples_are_walked_by_keys_and_chosen(browser: Page, show: Show) -> None:
    show("full_report", "examples")
    heads = seen(browser, ".example h3")
    browser.press("j")
    browser.press("ArrowRight")
    browser.press("k")
    assert seen(browser, ".example .pill")[:2] == ["best", "rollout"]
    browser.press("ArrowLeft")
    assert seen(browser, ".example h3") == heads
    browser.run(
        "(() => { const e = document.querySelector('select[data-state=e]');"
        "e.value = [...e.options].find(o => o.text.includes('got worse most')).value;"
        "e.dispatchEvent(new Event('change', {bubbles: true})) })()"
    )
    assert seen(browser, ".example h3") == ["What is the observatory of Tel Ammar?"]
    models = [" ".join(h.split()[:1]) for h in seen(browser, ".answer-card h4")]
    assert models == ["sft", "grpo", "base"], "before and after stand side by side"
    browser.show(browser.run("location.href"))
    heads = seen(browser, ".example h3")
    assert heads == ["What is the observatory of Tel Ammar?"], "the choice survives a reload"


def test_a_claim_leads_to_the_snippet_that_it_cites_and_back(browser: Page, show: Show) -> None:
    show("full_report", "examples")
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


def test_claims_without_evidence_look_different_and_say_why(browser: Page, show: Show) -> None:
    show("full_report", "examples")
    titles = browser.run(
        "[...document.querySelectorAll('.example.on .claim')].map(e => [e.className, e.title])"
    )
    assert ["claim unknown", "claim 2: cites S_x0; not in the prompt: S_x0"] in titles
    assert ["claim uncited", "claim 3: cites nothing"] in titles
    assert ["claim cites", "claim 4: cites S_e8Q9, S_w1"] in titles
    looks = browser.run(
        "['cites', 'uncited', 'unknown'].map(k => { const s = getComputedStyle("
        "document.querySelector('.example.on .claim.' + k));"
        "return [s.backgroundColor, s.borderBottomStyle, s.textDecorationLine].join() })"
    )
    assert len(set(looks)) == 3


def test_curves_are_smoothed_on_a_logarithmic_axis_and_stand_in_numbers(
    browser: Page, show: Show
) -> None:
    show("full_report", "curves")
    ((name, _, first, last),) = drawn(browser)
    assert (name, first) == ("loss/train_avg", pytest.approx(4.6))
    for field, value in (("smooth", "0.9"), ("log", "1")):
        browser.run(
            f"(() => {{ const e = document.querySelector('input[data-state={field}]');"
            f"e.value = '{value}'; e.checked = true;"
            "e.dispatchEvent(new Event('change', {bubbles: true})) })()"
        )
    ((_, _, smooth_first, smooth_last),) = drawn(browser)
    assert smooth_first == first
    assert smooth_last > last * 1.2, "it follows slowly"
    assert {"smooth=0.9", "log=1"} <= set(re.split("[#&]", browser.run("location.hash")))
    browser.run("document.querySelectorAll('#curves summary')[1].click()")
    cells = [" ".join(c.split()) for c in seen(browser, "#curves tr:first-child td")]
    assert cells[0].endswith("step 1")
    assert cells[-1] == "3", "where nothing was logged is counted"


def test_a_change_is_called_better_only_where_its_interval_keeps_clear_of_0(
    browser: Page, show: Show
) -> None:
    show("full_report")
    says = [" ".join(s.split()) for s in seen(browser, ".before-after tr td:nth-of-type(3)")]
    assert says[0] == "▲ +0.157 [0.117, 0.197] better"
    assert says[-1] == "◆ +0.302 [0.262, 0.342] changed", "more claims are not better or worse"
    go(browser, "numbers")
    browser.run("document.querySelectorAll('#numbers details')[1].open = true")
    assert "■ +0.17 [−0.23, 0.57] not clear" in " ".join(browser.text().split())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_runs_texts_can_be_read_on_their_ground(browser: Page, show: Show, scheme: str) -> None:
    show("full_report", f"d={scheme}")
    for view, _ in VIEWS:
        go(browser, view)
        browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert browser.run(POOR_CONTRAST) == [], f"{scheme}, {view}"
    show("full_report", f"v=examples&d={scheme}")
    focus(browser, 'a.claim[data-n="4"]')
    browser.press("Enter")
    assert browser.run(POOR_CONTRAST) == [], "a snippet that was followed"


def test_a_runs_page_fits_a_narrow_screen_and_a_wide_one(browser: Page, show: Show) -> None:
    try:
        for width in (400, 1600):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            for name in ("full_report", "hostile_report"):
                show(name)
                for view, _ in VIEWS:
                    go(browser, view)
                    assert browser.run(WIDTH) <= width, f"{name}, {view} at {width}"
                    chosen = browser.run(
                        "document.querySelector('nav a[aria-current]').getBoundingClientRect().left"
                    )
                    assert 0 <= chosen < width, "the chosen view is out of sight"
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_hostile_text_in_a_run_is_shown_and_does_nothing(browser: Page, show: Show) -> None:
    show("hostile_report")
    for view, title in VIEWS:
        go(browser, view)
        assert browser.run("document.title").startswith("Recipe </script>")
        assert browser.run("getComputedStyle(document.body).display") == "block"
        assert seen(browser, ".view > h2") == [title]
    assert browser.run("document.querySelectorAll('img, main script, main style').length") == 0
    on = "[...document.querySelectorAll('*')].filter(e => [...e.attributes].some("
    assert browser.run(f"{on}a => a.name.startsWith('on'))).length") == 0
    go(browser, "examples")
    assert "characters more are in report.json" in browser.text()
    assert not re.search(r"\bnan\b|\binf\b", browser.text().lower())


def test_the_page_of_a_long_run_is_bounded_and_opens(browser: Page, show: Show, made: Any) -> None:
    assert made("huge_report", 0).stat().st_size < 5_000_000
    show("huge_report", "curves")
    assert len(seen(browser, "figure")) == 30
    assert "Of many points the extremes are drawn." in browser.text()
    for view, left in (
        ("stages", "The first 1900 attempts are in report.json"),
        ("incidents", "3600 more are in report.json"),
        ("settings", "2800 more are in report.json"),
        ("examples", "80 more examples are in report.json"),
    ):
        go(browser, view)
        assert left in browser.text(), view


def test_a_running_runs_page_loads_itself_again_and_stays_where_it_was(
    browser: Page, show: Show
) -> None:
    show("running_report", "v=examples&e=2&d=dark", reload_s=1)
    before = len(browser.events)
    browser.run("window.first = true; scrollTo(0, 120)")
    browser.wait_for("Page.loadEventFired", before)
    assert browser.run("window.first") is None
    assert browser.run("document.querySelector('select[data-state=e]').value") == "2"
    assert browser.run("scrollY") == 120
    assert browser.run("document.documentElement.dataset.scheme") == "dark"
    browser.run("document.querySelector('#pause').click()")
    assert seen(browser, "#pause") == ["Go on"]


def test_the_page_of_a_run_that_is_over_or_empty_stays(browser: Page, show: Show) -> None:
    show("full_report", reload_s=1)
    assert browser.run("document.body.dataset.reload") is None
    show("empty_report")
    for view, title in VIEWS:
        go(browser, view)
        assert seen(browser, ".view > h2") == [title]
        assert not re.search(r"\b(NaN|nan|None|undefined)\b", browser.text())


def test_a_runs_page_is_printed_whole_and_read_without_scripts(browser: Page, show: Show) -> None:
    show("full_report")
    printed = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= len(VIEWS)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert seen(browser, ".view > h2") == [title for _, title in VIEWS]
    assert len(seen(browser, ".example h3")) == 6
    assert seen(browser, "nav, form, #scheme") == []
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show("full_report")
        words = browser.text()
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    for _, title in VIEWS:
        assert title in words
