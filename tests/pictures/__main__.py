"""The pictures of the READMEs, made by the tool: pages of a real run and a real sweep.

    python -m tests.pictures WORKSPACE [--sweep NAME] [--sweep-workspace DIR]

In: a workspace with a finished run, and one with a finished sweep. Out: PNG files beside this one.
``make pictures`` makes both first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.browser import Page, chromium
from tests.support.command import refiner

HERE = Path(__file__).parent
#: Picture -> (report, fragment of the page's address, width and height in CSS pixels).
SHOTS = {
    "run-summary": ("run", "", 1280, 860),
    "run-examples": ("run", "#examples", 1560, 800),
    "sweep-summary": ("sweep", "", 1280, 840),
}


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workspace")
    parser.add_argument("--sweep", default="citation-weight-tiny")
    parser.add_argument("--sweep-workspace")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run = newest_run(chosen.workspace)
        pages = {
            "run": report(run, chosen.workspace, folder / "run"),
            "sweep": report(
                chosen.sweep, chosen.sweep_workspace or chosen.workspace, folder / "sweep"
            ),
        }
        with chromium(folder / "browser") as page:
            for name, (which, fragment, *size) in SHOTS.items():
                take(page, pages[which].as_uri() + fragment, size, HERE / f"{name}.png")


def newest_run(workspace: str) -> str:
    """The run that a report of a run is made of: the newest that is no trial of a sweep."""
    done = refiner("status", f"workspace={workspace}", "--json")
    assert done.code == 0, done.stderr
    return str(done.json["run"])


def report(name: str, workspace: str, out: Path) -> Path:
    """The page about a run or sweep."""
    done = refiner("report", name, f"workspace={workspace}", "--out", str(out))
    assert done.code == 0, done.stderr
    return out / "report.html"


def take(page: Page, url: str, size: Sequence[int], target: Path) -> None:
    """One picture, in the light scheme, from the top of the page."""
    width, height = size
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=height, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    light = {"name": "prefers-color-scheme", "value": "light"}
    page.call("Emulation.setEmulatedMedia", features=[light])
    page.show(url)
    page.run("scrollTo(0, 0)")
    page.screenshot(target)
    print(f"{target.name}: {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
