"""The link of `refiner server` on a terminal opens Prefect's UI without asking for a key."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from infra.prefect_server import ensure_server, terminal_link
from tests.support.browser import chromium
from tests.support.command import command, environment, refiner
from tests.support.prefect_server import PrefectApi, eventually

pytestmark = pytest.mark.prefect


def on_a_terminal(*words: str) -> str:
    """What a command prints on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*words), env=environment(), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # how a pseudo-terminal says that its other end is closed
        process.wait(60)
    finally:
        os.close(ours)
    return said.decode()


def test_the_link_opens_the_page_and_shows_no_key(prefect: PrefectApi, tmp_path: Path) -> None:
    found = re.search(r"http://\S+open\.html#\S+", on_a_terminal("server"))
    assert found
    with chromium(tmp_path / "stranger") as page:
        page.show(f"{prefect.info.url}/dashboard")
        eventually(lambda: page.run("location.pathname") == "/login")
    with chromium(tmp_path / "profile") as page:
        page.show(found[0])
        eventually(lambda: "Work Pools" in page.text())
        assert page.run("location.pathname") == "/dashboard"
        assert "Authentication failed" not in page.text()
        assert prefect.info.auth not in page.run("location.href")
        assert "open.html" not in page.run("document.referrer")
        entries = page.call("Page.getNavigationHistory")["entries"]
        assert not any(prefect.info.auth.split(":")[1] in entry["url"] for entry in entries)


def test_it_leads_to_no_other_site(prefect: PrefectApi, tmp_path: Path) -> None:
    on_a_terminal("server")  # the page is there
    with chromium(tmp_path / "profile") as page:
        for target in ("//example.org/", "https://example.org/", "javascript:alert(1)"):
            page.show(f"{prefect.info.url}/open.html#me:key,{target}")
            assert page.run("location.origin") == prefect.info.url
            assert page.run("localStorage.getItem('prefect-password')") is None
            page.show("about:blank")


def test_the_key_is_shown_on_a_terminal_alone(prefect: PrefectApi, tmp_path: Path) -> None:
    info = ensure_server(60)
    key = info.auth.split(":")[1]
    for words in (("server",), ("server", "--json")):
        done = refiner(*words)
        assert key not in done.stdout + done.stderr
    with (tmp_path / "file").open("w") as file:
        assert terminal_link(info, "/runs", file) == f"{info.url}/runs"
