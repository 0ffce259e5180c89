"""A test message by each channel of a recipe: does it get through, and if not, why?

In: a recipe's `notify` section. Out: a :class:`Tried` each. Nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.notifying.channels import ChannelFailed, send
from flows.notifying.words import Topic
from infra.host.processes import host_name
from refiner_core.contract.alarms import alarms_of
from refiner_core.contract.checks.notify import check_notify
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe


@dataclass(frozen=True)
class Tried:
    """What came of a message by one channel.

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
    check_notify(config)
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
