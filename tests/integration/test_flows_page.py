"""A person's way through Prefect's own pages, in a real browser: the form of a deployment, its
flow run, Cancel and Retry. Nothing but the mouse and the keyboard."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.prefect_server import terminal_link
from tests.support.browser import Page, chromium
from tests.support.command import SMALL
from tests.support.prefect_server import eventually
from tests.support.served import FINAL, Served, served_in, steps_of_grpo

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def served(prefect_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`refiner serve`, with a small recipe in its form."""
    folder = tmp_path_factory.mktemp("page")
    wanted = [word.partition("=") for word in (*SMALL, "grpo.num_training_steps=12")]
    fields: dict[str, dict[str, object]] = {}
    for path, _, value in wanted:
        section, _, field = path.partition(".")
        fields.setdefault(section, {})[field] = json.loads(value) if value[0].isdigit() else value
    fields["publish"]["malformed"] = True
    recipe = {"include": ["tiny"], "stages": ["data", "sft", "grpo"], **fields}
    (folder / "small.yaml").write_text(json.dumps(recipe))
    with served_in(folder, "small.yaml") as served:
        yield served


class Terminal(io.StringIO):
    """What a link is shown on."""

    def isatty(self) -> bool:
        return True


class Hand:
    """A mouse, and pictures of what it did."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page, self.folder, self._count = page, folder, 0

    def click(self, words: str, within: str = "button") -> None:
        """The last one that says these words and no others, in the middle."""
        find = (
            f"[...document.querySelectorAll({json.dumps(within)})].filter(e => "
            f"e.innerText?.trim() === {json.dumps(words)} && e.getClientRects().length "
            "&& !e.disabled).at(-1)"
        )
        eventually(lambda: self.page.run(f"!!{find}"), 60)
        x, y = self.page.run(
            f"(() => {{ const e = {find}; e.scrollIntoView({{block: 'center'}}); "
            "const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.page.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    def look(self, name: str) -> None:
        """Keep what the page looks like now."""
        self._count += 1
        self.page.screenshot(self.folder / f"{self._count}-{name}.png")


@pytest.mark.timeout(900)
def test_launch_cancel_and_retry_by_the_pages_own_buttons(served: Served, tmp_path: Path) -> None:
    prefect = served.prefect
    deployment = prefect.get("/deployments/name/pipeline/refiner")["id"]

    def launched() -> list[dict[str, Any]]:
        of_it = {"deployments": {"id": {"any_": [deployment]}}}
        return [r for r in prefect.post("/flow_runs/filter", of_it) if r["id"] not in before]

    before: set[str] = set()
    before = {run["id"] for run in launched()}
    with chromium(tmp_path / "profile") as page:
        hand = Hand(page, tmp_path)
        form = f"/deployments/deployment/{deployment}/run"
        page.show(terminal_link(prefect.info, form, Terminal()))
        eventually(lambda: "Parameters" in page.text(), 60)
        eventually(lambda: "small.yaml" in page.run(_FORM), 60)
        hand.look("form")
        hand.click("Submit")
        (run,) = eventually(launched, 60)
        page.show(f"{prefect.info.url}/runs/flow-run/{run['id']}")
        eventually(lambda: steps_of_grpo(served.folder / "runs") >= 1, 300)
        eventually(lambda: "Running" in page.text(), 60)
        hand.look("running")

        hand.click("Cancel")
        hand.look("cancel")
        hand.click("Confirm", _DIALOG)
        assert served.ends(run["id"], 120)["type"] == "CANCELLED"
        eventually(lambda: "Cancelled" in page.text(), 60)
        hand.look("cancelled")

        hand.click("Retry")
        hand.look("retry")
        hand.click("Retry", _DIALOG)
        eventually(lambda: served.state(run["id"])["type"] not in FINAL, 60)
        assert served.ends(run["id"], 300)["type"] == "COMPLETED"
        eventually(lambda: "Completed" in page.text(), 60)
        hand.look("completed")


_FORM = "[...document.querySelectorAll('input,textarea')].map(e => e.value).join(' ')"
_DIALOG = ".p-modal button, [role=dialog] button"
