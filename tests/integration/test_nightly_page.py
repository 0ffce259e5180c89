"""The trend page as a person sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from refiner_core.nightly.page import trend_page
from tests.support.browser import chromium
from tests.support.nightly_page import DRIFT, HOSTILE, NIGHTS, sixty_nights
from tests.support.prefect_server import eventually


def test_it_holds_all_series_and_asks_nobody_for_anything() -> None:
    text = trend_page(sixty_nights(), "2026-10-30T04:00:00+00:00")
    assert text.count('<svg class="chart') == 3
    assert HOSTILE not in text, "what people name things is escaped"
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert "default-src 'none'" in text


@pytest.mark.browser
def test_a_person_sees_alerts_series_and_what_has_changed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        trend_page(sixty_nights(), "2026-10-30T04:00:00+00:00"), encoding="utf-8"
    )
    with chromium(tmp_path / "browser") as page:
        page.open(f"file://{tmp_path}/page.html", local_storage={})
        # The end of the page: its beginning can be read while the rest is still on its way.
        eventually(lambda: "nobody measured the canary that night" in page.text(), 30)
        text = page.text()
        assert "the judge or the machines have drifted" in text
        assert "is back where it was, or past it" in text
        assert NIGHTS[DRIFT + 1] in text
        assert "nobody measured the canary that night" in text
        drawn = page.call(
            "Runtime.evaluate",
            expression="""JSON.stringify([...document.querySelectorAll('.chart')].map(c =>
                [c.getBoundingClientRect().width > 400, c.querySelectorAll('circle').length,
                 c.querySelectorAll('.alert').length]))""",
        )["result"]["value"]
        assert drawn.startswith("[[true,58,1],[true,58,")
        wide = "document.documentElement.scrollWidth <= innerWidth"
        assert page.call("Runtime.evaluate", expression=wide)["result"]["value"] is True
        page.screenshot(tmp_path / "page.png")
