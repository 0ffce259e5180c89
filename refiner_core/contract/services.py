"""Judge servers that refiner starts: when there is one, and when two are the same.

In: a recipe's configuration. Out: whether it has a judge's server of its own, the server's
definition (engine, model, arguments …) as values that are hashed into its id, and the stages that
use it. None of this is part of a judgement's identity, so no stage runs again because its judge is
served elsewhere; and all recipes of a workspace that would start the same server share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.fields import refuse_fields
from refiner_core.contract.kinds import KINDS, kinds_of

#: Name of the stage that serves the judge, and prefix of the ids of such stages.
JUDGE_SERVICE = "judge"
_PREFIX = "serve-"
#: Kinds of stages that may ask a judge; see :func:`asks_judge`.
CONSUMERS = tuple(k.name for k in KINDS.values() if k.asks_judge)


def is_service(stage_id: str) -> bool:
    """Tell whether a stage is a server: it is needed for some time, and never done."""
    return stage_id.startswith(_PREFIX)


def asks_judge(config: RecipeConfig, kind: str | None = None) -> bool:
    """Tell whether stages of a kind use the recipe's judge; without a kind: whether any stage does.

    An agent with tools is judged by its environment, which may ask about assertions in plain
    language (``environment.nl_assertions``).
    """
    kinds = [k.name for k in kinds_of(config.stages)] if kind is None else [kind]
    if not any(name in CONSUMERS for name in kinds):
        return False
    return not config.environment.name or config.environment.nl_assertions == "judge"


def serves(judge: JudgeConfig) -> bool:
    """Tell whether refiner starts the judge's server itself: if no address is given."""
    if judge.kind != "openai" or judge.base_url or judge.base_urls:
        return False
    return judge.serve.engine != "none" or judge.serve_command is not None


def has_service(config: RecipeConfig) -> bool:
    """Tell whether the judge's server is a job of its own."""
    return serves(config.judge) and config.judge.serve.where == "job"


def judge_gpus(config: RecipeConfig, kind: str) -> int:
    """GPUs that a judge beside stages of a kind takes out of the GPUs of their jobs."""
    if not (serves(config.judge) and config.judge.serve.where == "beside"):
        return 0
    return config.judge.resources.gpus if asks_judge(config, kind) else 0


def engine_of(judge: JudgeConfig) -> str:
    """The judge's engine: ``vllm``, ``transformers`` or ``command``."""
    return "command" if judge.serve.engine == "none" else judge.serve.engine


def service_identity(config: RecipeConfig) -> dict[str, Any]:
    """Identity of a server: all settings of its start.

    ``reach``: this machine alone, or all nodes.

    Raises
    ------
    ConfigurationError
        Other nodes have to reach it, but its engine cannot check a key.
    """
    judge, engine = config.judge, engine_of(config.judge)
    reach = "node" if config.dispatch.executor == "local" else "cluster"
    refuse_fields(
        config,
        engine == "transformers" and reach == "cluster",
        "judge.serve.engine judge.serve.where dispatch.executor",
        "an engine that asks for a key, unlike `transformers`, or a server that only its own "
        "job can reach: every user of the cluster can reach one in a job of its own",
        "set judge.serve.where=beside, or judge.serve.engine=vllm",
    )
    serve = judge.serve
    values: Mapping[str, Any] = {
        "model": judge.model,
        "revision": judge.revision,
        "engine": engine,
        "args": list(serve.args),
        "python": serve.python,
        "container": serve.container,
        "setup": list(serve.setup),
        "command": judge.serve_command if engine == "command" else None,
        "gpus": judge.resources.gpus,
        "reach": reach,
    }
    return {f"serve.{name}": value for name, value in values.items()}
