"""Headless Chromium, driven over its debugging port, to look at a page."""

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

_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
         "ArrowDown": 40, "j": 74, "k": 75}  # fmt: skip


class Page:
    """One tab."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._count = socket, 0
        #: Events of domains that were enabled, oldest first.
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; events in between are kept."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=120))
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self.events.append(answer)

    def run(self, expression: str) -> Any:
        """The value of a script's expression; a promise is waited for.

        Raises
        ------
        AssertionError
            The script failed; says how.
        """
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def show(self, url: str) -> None:
        """Load a page and wait until it has. Another fragment of the same page is a new load."""
        for target in ("about:blank", url):
            before = len(self.events)
            self.call("Page.navigate", url=target)
            self.wait_for("Page.loadEventFired", before)

    def wait_for(self, event: str, since: int) -> None:
        """Wait for an event that comes after the first ``since`` ones."""
        while not any(e["method"] == event for e in self.events[since:]):
            self.events.append(json.loads(self._socket.recv(timeout=120)))

    def press(self, key: str) -> None:
        """One key, as from a keyboard."""
        for kind in ("rawKeyDown", "keyUp"):
            code = _KEYS[key]
            typed = "\r" if key == "Enter" else key if len(key) == 1 else ""
            text = {"text": typed} if typed and kind == "rawKeyDown" else {}
            kind = "keyDown" if text else kind
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    def hover(self, selector: str) -> None:
        """Move the pointer onto the middle of the first element that fits and is seen."""
        x, y = self.run(
            f"(() => {{ const e = [...document.querySelectorAll({json.dumps(selector)})]"
            ".find(e => e.getClientRects().length); e.scrollIntoView({block: 'center'}); "
            "const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

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
    deadline = time.monotonic() + 240
    while not (port_file.exists() and port_file.read_text().strip()):
        assert time.monotonic() < deadline, "chromium did not start"
        time.sleep(0.1)
    port = port_file.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=60) as answer:
        tabs = json.load(answer)
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
