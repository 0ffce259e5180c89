"""What recipes and nightly files could say before, and still may for one version.

In: what a file says. Out: the same without what has no effect any more, of which one is warned.
Records of earlier versions need none of it: they are read without keys that nobody knows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)


def without_former(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe without fields and words of before."""
    notify = values.get("notify")
    if not isinstance(notify, Mapping):
        return dict(values)
    kept = {k: v for k, v in notify.items() if k != "prefect"}
    if kept.keys() != notify.keys():
        warn_former("notify.prefect", "Prefect has the states of flow runs for automations")
    if kept.get("webhook") is not None:
        warn_former("notify.webhook", "it works as notify.urls=[NAME], which takes its place", "")
    if isinstance(on := kept.get("on"), list | tuple) and "resumed" in on:
        warn_former("`resumed` in notify.on", "`refiner status` says what goes on")
        kept["on"] = [word for word in on if word != "resumed"]
    return {**values, "notify": kept}


@functools.cache
def warn_former(what: str, instead: str, effect: str = "has no effect any more, and ") -> None:
    """Say once that something goes."""
    log.warning("%s %swill be refused by the next version: %s.", what, effect, instead)
