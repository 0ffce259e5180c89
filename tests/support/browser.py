"""Headless Chromium, driven over its debugging port, to look at a page as a person would."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.require import require


class Page:
    """One tab."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._count = socket, 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; events in between are dropped."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=30))
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def open(self, url: str, *, local_storage: dict[str, str]) -> None:
        """Load a page whose scripts find these values in their storage."""
        for key, value in local_storage.items():
            script = f"localStorage.setItem({json.dumps(key)}, {json.dumps(value)})"
            self.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        self.call("Page.navigate", url=url)

    def text(self) -> str:
        """What the page says now."""
        found = self.call("Runtime.evaluate", expression="document.body?.innerText ?? ''")
        return str(found["result"]["value"])

    def screenshot(self, path: Path) -> None:
        """The page as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A browser with one empty tab."""
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    require("browser", program, "there is no chromium (Debian: apt-get install chromium)")
    require("browser", importlib.util.find_spec("websockets"), "websockets is not installed")
    from websockets.sync.client import connect

    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        [str(program), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with connect(_tab(folder / "DevToolsActivePort"), max_size=None) as socket:
            page = Page(socket)
            page.call("Page.enable")
            yield page
    finally:
        process.terminate()
        process.wait(10)


def _tab(port_file: Path) -> str:
    deadline = time.monotonic() + 60
    while not (port_file.exists() and port_file.read_text().strip()):
        assert time.monotonic() < deadline, "chromium did not start"
        time.sleep(0.1)
    port = port_file.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as answer:
        tabs = json.load(answer)
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
