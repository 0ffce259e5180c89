"""Signals of a run on the terminal, and the markup of what Prefect is shown."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from flows.artifacts import artifacts_of, markdown_table
from flows.cli.run import stop_on_signals
from flows.running.console import Console
from flows.running.foreground import run_shown
from refiner_core.contract.types import StageView


class Stubborn:
    """An orchestrator that works for some seconds, and is slow to note a request to stop."""

    def __init__(self, seconds: float) -> None:
        self.ends_at, self.stopped_for = time.monotonic() + seconds, ""

    def start(self) -> None:
        pass

    def views(self) -> dict[str, StageView]:
        state = "running" if time.monotonic() < self.ends_at else "done"
        return {"data": StageView("data", "data", "f", state)}

    def request_stop(self, reason: str) -> None:
        time.sleep(0.1)
        self.stopped_for = reason

    def wait(self, seconds: float) -> bool:
        left = self.ends_at - time.monotonic()
        time.sleep(max(0.0, min(seconds, left)))
        return left <= seconds

    def join(self) -> dict[str, StageView]:
        return self.views()


@pytest.fixture
def handlers() -> Iterator[None]:
    """SIGTERM and SIGHUP as in the command; all as they were afterwards."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    stop_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.slow
def test_ctrl_c_asks_to_stop_and_a_second_one_leaves() -> None:
    class Impatient(Console):
        presses = 0

        def show(self, views: object) -> None:
            self.presses += 1
            signal.raise_signal(signal.SIGINT)

    campaign = Stubborn(60.0)
    console = Impatient(stream=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        run_shown(campaign, console=console)
    assert campaign.stopped_for == "Ctrl-C"
    assert console.presses > 2  # within a second they are one wish


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("apart_s", [0.0, 0.05])
@pytest.mark.parametrize(
    ("first", "said"), [(signal.SIGHUP, "SIGHUP"), (signal.SIGTERM, "SIGTERM")]
)
def test_simultaneous_signals_count_once(apart_s: float, first: signal.Signals, said: str) -> None:
    """A terminal that closes, systemd and scancel send several; the jobs must not be left."""
    campaign = Stubborn(1.2)
    code = (
        "import os, time; print(flush=True); input(); "
        f"os.kill({os.getpid()}, {first}); time.sleep({apart_s}); "
        f"os.kill({os.getpid()}, {signal.SIGTERM})"
    )
    stream = io.StringIO()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdin is not None
        sender.stdout.readline()  # it is there, and sends at once when it is told to
        threading.Timer(0.3, lambda: sender.communicate("\n")).start()
        views = run_shown(campaign, console=Console(stream=stream))
    # Which of two that are pending at once is taken first is the kernel's choice of threads.
    assert campaign.stopped_for in (said, "SIGTERM")
    assert stream.getvalue().count("Stopping (") == 1
    assert {view.state for view in views.values()} == {"done"}
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_artifacts_hold_no_image_and_no_html() -> None:
    """A row, an answer or a judge may have written a part of it; the UI would fetch and obey."""
    evil = "<img src=//h/x> ![](//h/y) <!-- x --></script>"
    view = StageView(
        "sft",
        "sft",
        "f",
        "done",
        report={
            "evaluations": [{"metric": evil, "value": 1.0}],
            "card": f"# Title\n\n{evil}\n\nwith a < b, a [link](x) and `<answer>`",
        },
    )
    artifacts = artifacts_of("r", view)
    assert len(artifacts) == 2
    shown = [a["markdown"] for a in artifacts] + [markdown_table([{evil: evil}])]
    for text in shown:
        assert not re.search(r"<[a-zA-Z/!?]|!\[", text)
    assert "with a < b, a [link](x) and `‹answer>`" in artifacts[-1]["markdown"]
