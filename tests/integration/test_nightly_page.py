"""The trend page as a person sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from refiner_core.nightly.page import VIEWS, trend_page
from tests.support.browser import Page
from tests.support.looking import POOR_CONTRAST, assert_harmless, drawn, go
from tests.support.nightly_page import DRIFT, HOSTILE, NIGHTS, sixty_nights


@pytest.mark.browser
def test_a_person_sees_alerts_series_and_what_has_changed(browser: Page, tmp_path: Path) -> None:
    text = trend_page(sixty_nights(), "2026-10-30T04:00:00+00:00")
    assert HOSTILE not in text, "what people name things is escaped"
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    browser.events.clear()
    browser.show(f"file://{tmp_path}/page.html#d=dark")
    assert [line[0] for line in drawn(browser)] == ["canary", "latest", "released"]
    browser.hover(".chart")
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert "judge.served: judge-7b-0713 -> judge-7b-0826" in browser.text()
    said = ""
    for view, _ in VIEWS:
        go(browser, view)
        said += browser.text()
        assert browser.run(POOR_CONTRAST) == [], view
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert "the judge or the machines have drifted" in said
    assert "is back where it was, or past it" in said
    assert NIGHTS[DRIFT + 1] in said
    assert "nobody measured the canary that night" in said
    assert_harmless(browser)
