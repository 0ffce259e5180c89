"""Delivery of messages: a test by each channel of a recipe, and what a channel did not take.

In: a recipe's `notify` section; a workspace and a call. Out: a :class:`Tried` for each channel;
events of the call's log, and lines for `refiner status`. Nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.notifying.channels import ChannelFailed, send
from flows.notifying.messages import Topic
from flows.notifying.sender import NOT_TOLD
from infra.host.processes import host_name
from infra.orchestrator.timeline import run_events
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.sections.steering import alarms_of, check_notify


@dataclass(frozen=True)
class Tried:
    """Result of a message by one channel.

    ``why`` says why it did not get through; empty where it did.
    """

    channel: str
    seconds: float
    why: str = ""


def notify_settings(recipe: str, overrides: Sequence[str]) -> RecipeConfig:
    """A recipe of which at least the `notify` section can be carried out.

    Parameters
    ----------
    recipe, overrides
        As for ``refiner run``.

    Raises
    ------
    ConfigurationError
        It cannot, or names no channel.
    """
    config = load_recipe(recipe, overrides)
    check_notify(config.notify)
    if not alarms_of(config.notify):
        raise ConfigurationError(
            f"{recipe} tells nobody: it names no channel.",
            expected="notify.urls or notify.command",
            fix="add one, e.g. notify.urls=[MY_HOOK] after `export MY_HOOK=https://…`, or "
            "notify.command='cat >> ~/told.jsonl'",
        )
    return config


def try_channels(config: RecipeConfig, *, started: Callable[[str], None]) -> list[Tried]:
    """Send a test message by every channel of ``config``, one after the other; ``started`` hears of
    each. It raises nothing: a channel that fails says why."""
    topic = Topic("test", config.recipe, str(Path(config.workspace).absolute()), host_name())
    told = ", ".join(config.notify.on) or "nothing: notify.on is empty"
    text = f"This is a test. What is told of runs of {config.recipe}: {told}."
    message = topic.message("test", "of the channels", text, next_="refiner show notify")
    tried = []
    for alarm in alarms_of(config.notify):
        started(alarm.name)
        began, why = time.monotonic(), ""
        try:
            send(alarm, message)
        except ChannelFailed as error:
            why = str(error)
        tried.append(Tried(alarm.name, round(time.monotonic() - began, 2), why))
    return tried


def not_told(workspace: Workspace, call: str) -> list[dict[str, Any]]:
    """When, of which kind, its title, by which channel, and why not; oldest first."""
    keys = ("at", "kind", "title", "channel", "why")
    events = (e for e in run_events(workspace, call) if e.get("event") == NOT_TOLD)
    return [{key: str(event.get(key, "")) for key in keys} for event in events]


def not_told_lines(workspace: Workspace, call: str) -> Iterator[str]:
    """For people: by channel, with what finds out why."""
    found = not_told(workspace, call)
    for channel in dict.fromkeys(event["channel"] for event in found):
        of_it = [event for event in found if event["channel"] == channel]
        kinds = ", ".join(event["kind"] for event in of_it)
        yield (
            f"not told by {channel}: {kinds}: {of_it[-1]['why']} (`refiner notify test` tries the "
            "channel)"
        )
