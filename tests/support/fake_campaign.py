"""A campaign whose stages change by a script instead of by work."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from refiner_core.contract.plan import Plan
from refiner_core.contract.types import StageView

Change = tuple[float, Mapping[str, Any]]  # seconds after the stage may begin, fields of the view


class FakeCampaign:
    """Stages follow ``script[name]``, each once its inputs have ended; else they are done."""

    def __init__(self, plan: Plan, script: Mapping[str, Sequence[Change]] | None = None) -> None:
        self.plan, self.script = plan, dict(script or {})
        self.stopped = ""
        self.started_at = 0.0
        self.ended_at = 0.0
        self._changed = threading.Condition()
        self._views = {
            s.name: StageView(s.name, s.kind, s.fingerprint, "waiting") for s in plan.stages
        }
        self._threads = [
            threading.Thread(target=self._play, args=(s.name,), daemon=True) for s in plan.stages
        ]

    def start(self) -> None:
        self.started_at = time.monotonic()
        for thread in self._threads:
            thread.start()

    def views(self) -> dict[str, StageView]:
        with self._changed:
            return dict(self._views)

    def wait(self, stage_name: str, timeout_s: float) -> StageView:
        with self._changed:
            self._changed.wait_for(lambda: self._views[stage_name].terminal, timeout_s)
            return self._views[stage_name]

    def request_stop(self, reason: str) -> None:
        with self._changed:
            self.stopped = reason
            for name, view in self._views.items():
                if not view.terminal:
                    self._views[name] = replace(view, state="interrupted", message=reason)
            self._changed.notify_all()

    def join(self) -> dict[str, StageView]:
        while any(thread.is_alive() for thread in self._threads) and not self.stopped:
            time.sleep(0.02)
        self.ended_at = time.monotonic()
        return self.views()

    def _play(self, name: str) -> None:
        for before in self.plan.by_name[name].inputs.values():
            while not self.wait(before, 1.0).terminal:
                pass
        default = [(0.0, {"state": "running"}), (0.2, {"state": "done", "seconds": 0.2})]
        began = time.monotonic()
        for after_s, fields in self.script.get(name, default):
            time.sleep(max(0.0, began + after_s - time.monotonic()))
            with self._changed:
                if self._views[name].terminal:
                    return
                self._views[name] = replace(self._views[name], **fields)
                self._changed.notify_all()
