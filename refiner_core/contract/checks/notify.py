"""Checks of the `notify` section: no secret in a recipe, and no channel that can never work."""

from __future__ import annotations

import re

from refiner_core.contract.alarms import is_place
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError

_ADDRESS = re.compile(r"(?i)\bhttps?://")


def check_notify(config: RecipeConfig) -> None:
    """Refuse a `notify` section that cannot work, or that would put an address into records. What
    is wrong with it is not repeated: it may be a secret."""
    notify = config.notify
    for field, names in (("urls", notify.urls), ("webhook", (notify.webhook or "URL",))):
        if not all(map(is_place, names)):
            raise ConfigurationError(
                f"`notify.{field}` has an address in it, or something else that is no name of a "
                "variable.",
                expected="the name of the environment variable, or the path (from / or ~/) of the "
                "file, that holds the address: it is often a secret, and would stand in every "
                "record of the run",
                fix="export MY_HOOK=…, and set notify.urls=[MY_HOOK]",
            )
    if notify.command is not None and not notify.command.strip():
        raise ConfigurationError(
            "`notify.command` is empty.",
            expected="a shell command, which gets the message as JSON on its standard input",
            fix="set e.g. notify.command='cat >> ~/told.jsonl', or notify.command=null for none",
        )
    if notify.command is not None and _ADDRESS.search(notify.command):
        raise ConfigurationError(
            "`notify.command` has an address in it.",
            expected="no address: the command stands in every record of the run, and whoever reads "
            "such an address can often post to it",
            fix='export MY_WEBHOOK=…, and write "$MY_WEBHOOK" in the command, in single quotes',
        )
    for name in ("after_min", "pause_min"):
        value = getattr(notify, name)
        if value < 0:
            raise ConfigurationError(
                f"`notify.{name}` is {value}.",
                expected="minutes, zero or more",
                fix=f"set notify.{name}=… to such a value",
            )
