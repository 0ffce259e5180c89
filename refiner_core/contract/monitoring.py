"""Facts about a recipe's monitor: its looks, rows and cost; what it refuses; its part of identity.

In: a recipe. Out: values for the plan, the training and the forecast. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fields import refuse_fields
from refiner_core.contract.fingerprint import identity_values
from refiner_core.contract.protocols import (
    configs_under,
    gold_protocols,
    golds_under,
    protocol_fingerprint,
    protocols_of,
)
from refiner_core.contract.sections.training import MONITOR_SHARE
from refiner_core.contract.services import serves

#: Rows below which only a large fall is found; see :mod:`refiner_core.rewards.sequential`.
FEW_ROWS = 48


def monitors(config: RecipeConfig) -> bool:
    """Tell whether GRPO is monitored."""
    return bool(config.monitor.every) and "grpo" in config.stages


def monitored_steps(config: RecipeConfig) -> tuple[int, ...]:
    """Numbers of finished steps at which the policy is looked at: the start, every so many, and the
    end."""
    last = config.grpo.num_training_steps
    return (*range(0, last, config.monitor.every), last)


def monitored_rows(config: RecipeConfig) -> int:
    """Number of monitored prompts."""
    given = config.monitor.rows
    if given is not None:
        return given
    grpo = config.grpo
    judged = grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout
    judged *= grpo.num_training_steps
    added = len(monitored_steps(config)) * (1 + len(config.monitor.gold))
    return max(1, int(MONITOR_SHARE * judged / added))


def evaluated_prompts(config: RecipeConfig) -> int | None:
    """Number of the held-out prompts that the recipe evaluates; None: all of them."""
    if "evaluate" not in config.stages:
        return 0
    measured = (config, *configs_under(config).values())
    most = [c.evaluate.max_prompts for c in measured if not c.data.all_held_out]
    return None if None in most else max((n for n in most if n is not None), default=0)


def monitor_identity(config: RecipeConfig, sources: Mapping[str, str]) -> dict[str, Any]:
    """The monitor's part of a GRPO stage's identity: none unless it may stop the stage.

    Parameters
    ----------
    sources
        All sources of the plan; those of a gold protocol end in its name.
    """
    if not monitors(config) or config.monitor.action != "stop":
        return {}
    values = identity_values(config, ("monitor",))
    golds = gold_protocols(config).items()
    values["monitor.gold"] = [
        protocol_fingerprint(
            protocol,
            {s.partition("@")[0]: d for s, d in sources.items() if s.endswith(f"@{name}")},
        )
        for name, protocol in golds
    ]
    return {**values, "monitor.after_prompts": evaluated_prompts(config)}


def check_monitor(config: RecipeConfig) -> None:
    """Refuse a monitor that cannot work.

    Raises
    ------
    ConfigurationError
        Names the field to change.
    """
    if not monitors(config):
        return
    refuse = functools.partial(refuse_fields, config)
    refuse(
        config.environment.name,
        "monitor.every environment.name",
        "a recipe whose answers are judged: an environment itself says how its episodes ended",
        "set monitor.every=0",
    )
    refuse(
        not config.monitor.gold,
        "monitor.every monitor.gold",
        "protocol files with another judge or other rubrics than the training reward",
        "set e.g. monitor.gold=[held-out-judge-v1]",
    )
    refuse(
        evaluated_prompts(config) is None,
        "monitor.every evaluate.max_prompts",
        "a number of evaluated prompts, here and in the protocols of evaluate.protocols: the "
        "monitor reads held-out prompts after them",
        "set evaluate.max_prompts=N, so that monitor.rows more are held out",
    )
    refuse(
        config.monitor.action == "stop" and config.publish.which != "final",
        "monitor.action publish.which",
        "publish.which=final: a run that may stop has no steps that are known before",
        "set one of them; the monitor itself keeps the best checkpoint by gold",
    )
    evaluated = protocols_of(config)
    for name, protocol in gold_protocols(config).items():
        refuse(
            name in evaluated and evaluated[name].text != protocol.text,
            "monitor.gold",
            f"another name than {name}, which differs in evaluate.protocols",
            "change `name:` in one of the files",
        )
    for name, gold in golds_under(config).items():
        refuse(
            _scores(gold) == _scores(config) or gold.data.all_held_out,
            "monitor.gold",
            f"{name} with a `reward` or `judge` unlike the recipe's own, and no `data`: gold is "
            "another view of the same answers",
            "name another protocol; `refiner list protocols` shows the shipped ones",
        )
        refuse(
            serves(gold.judge) and gold.judge.serve.where == "beside",
            "monitor.gold",
            f"a judge of {name} at an address (judge.base_url), or in a job of its own",
            "set judge.serve.where: job in the protocol's file",
        )


def _scores(config: RecipeConfig) -> dict[str, Any]:
    """The values that determine the score of an answer; the lexical judge has no prompt."""
    judge = config.judge
    if judge.kind == "lexical":
        return {**identity_values(config, ("reward",)), "judge": judge.model}
    return identity_values(config, ("reward", "judge"))


def monitor_notes(config: RecipeConfig) -> list[str]:
    """Notes on a monitor that works but finds little."""
    rows = monitored_rows(config) if monitors(config) else FEW_ROWS
    if rows >= FEW_ROWS:
        return []
    return [
        f"The monitor reads {rows} prompts at a look: it notices only a large fall of gold. "
        "monitor.rows=64 notices one of a fifth of its range."
    ]
