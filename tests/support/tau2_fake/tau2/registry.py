"""Domains by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tau2.domains import kiosk


class Registry:
    def get_domains(self) -> list[str]:
        return ["kiosk"]

    def get_env_constructor(self, name: str) -> Callable[..., Any]:
        return {"kiosk": kiosk.Environment}[name]

    def get_tasks_loader(self, name: str) -> Callable[..., Any]:
        return {"kiosk": kiosk.get_tasks}[name]

    def get_task_splits_loader(self, name: str) -> Callable[..., Any] | None:
        return {"kiosk": kiosk.get_splits}.get(name)


registry = Registry()
