"""Rollout servers as processes, seen and handled from outside."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from infra.process.child import mark_of
from refiner_core.contract.types import Endpoint


def marked(workdir: Path) -> list[psutil.Process]:
    """Processes of the servers that were started with this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            of = mark_of(process) or ""
            if of.startswith(str(workdir)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def serving(workdir: Path) -> list[psutil.Process]:
    """Those of them that are servers."""
    return [p for p in marked(workdir) if "vllm_server.py" in " ".join(p.cmdline())]


def control(endpoint: Endpoint, **settings: Any) -> None:
    """Tell the tests' server how to behave."""
    url = endpoint.url.removesuffix("/v1") + "/control"
    with urllib.request.urlopen(url, json.dumps(settings).encode(), timeout=60):
        pass


def status(url: str, authorization: str) -> int:
    """The status of a POST."""
    request = urllib.request.Request(url, b"{}", {"Authorization": authorization})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
