"""Progress of a sweep on standard error.

In: an admission, looked at again and again. Out: on a terminal the trials at work and the totals,
redrawn in place; elsewhere a line when a trial begins or ends, and now and then one about those at
work. Standard output belongs to ``--json``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

from flows.running.console import detail
from flows.running.screen import Screen
from infra.host.terminal import printable, raw
from infra.orchestrator.timeline import first_line, rough
from refiner_core.contract.views import StageView
from refiner_core.report.sweep.document import TrialState

if TYPE_CHECKING:
    from flows.sweeping.admission import Admission
    from flows.sweeping.words import TrialWord

_EVERY_S = 30.0
_ROWS = 16
_ORDER: tuple[TrialState, ...] = ("done", "running", "waiting", "held", "interrupted", "failed")


class SweepConsole(Screen):
    """Shows a sweep; a :class:`flows.running.showing.Shows`. Safe to call from several threads."""

    def __init__(
        self,
        admission: Admission,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(quiet, stream, clock)
        self._admission = admission
        self._said: dict[str, str] = dict.fromkeys(admission.standing(), "waiting")
        self._told_at = clock()

    def show(self, views: Mapping[str, StageView]) -> None:
        """Bring the display up to date."""
        with self._lock:
            words = self._admission.standing()
            for name, word in words.items():
                if self._said.get(name, "waiting") != word.state:
                    self._said[name] = word.state
                    self._tell(name, word)
            if self._fancy and not self._lost:
                with self._while_it_can_be_written():
                    self._redraw(words)
            elif not self._quiet and self._clock() - self._told_at >= _EVERY_S:
                self._told_at = self._clock()
                self._print(self._totals(words))
                for line in self._at_work():
                    self._print(f"  {line}")

    def finish(self, views: Mapping[str, StageView]) -> None:
        """The last state of every trial."""
        self.show(views)
        self.close()
        words = self._admission.standing()
        if not self._quiet or any(w.state != "done" for w in words.values()):
            self._print(f"{self._totals(words)} in {rough(self._clock() - self._began)}")

    # ------------------------------------------------------------ lines

    def _tell(self, name: str, word: TrialWord) -> None:
        if self._quiet and word.state not in ("failed",):
            return
        if word.state == "held":  # said once, for all of them
            return
        why = f": {first_line(word.reason, 300)}" if word.reason else ""
        run = f" (run {word.run})" if word.state == "running" else ""
        self._print(f"{name}: {word.state}{run}{why}")

    def _totals(self, words: Mapping[str, TrialWord]) -> str:
        found = Counter(w.state for w in words.values())
        counts = ", ".join(f"{found[s]} {s}" for s in _ORDER if found[s])
        return f"{len(words)} trials: {counts or 'none'}"

    def _at_work(self) -> Iterator[str]:
        for name, views in self._admission.working().items():
            busy = [v for v in views.values() if v.state in ("running", "reattached", "paused")]
            waits = [v for v in views.values() if v.state in ("queued", "waiting")]
            for view in busy or waits[:1]:
                yield " ".join(filter(None, [f"{name}: {view.name} {view.state}", detail(view)]))

    # ------------------------------------------------------------ in place

    def _redraw(self, words: Mapping[str, TrialWord]) -> None:
        from rich.console import Console as RichConsole
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            screen = RichConsole(file=raw(self._stream))
            self._live = Live(console=screen, auto_refresh=False, transient=True)
            self._live.start()
        lines = list(self._at_work())
        shown = [Text(printable(line), overflow="ellipsis", no_wrap=True) for line in lines[:_ROWS]]
        if len(lines) > _ROWS:
            shown.append(Text(f"and {len(lines) - _ROWS} more", style="dim"))
        self._live.update(Group(Text(self._totals(words), style="bold"), *shown), refresh=True)
