"""Whether the programs that will serve models are there: refused before data are prepared and SFT
has trained for hours.

In: a plan. Out: nothing, or a refusal that names the field. Only for stages that are still to run
on this machine, and only what looking at files tells; `refiner doctor RECIPE` tries the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from infra.services.program import ServerProgram
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.plan import Plan
from refiner_core.contract.services import asks_judge, engine_of, serves


def check_server_programs(plan: Plan) -> None:
    """Refuse a plan whose servers cannot be started on this machine.

    Raises
    ------
    UnsupportedError
        An interpreter, a container's program or the engine's command is not there.
    """
    if plan.config.dispatch.executor != "local":
        return  # what compute nodes have is not seen from here
    workspace = Workspace.read_only(plan.config.workspace)
    kinds = {s.kind for s in plan.stages if workspace.read_result(s.id) is None}
    for program in _programs(plan.config, kinds):
        if program.lacking:
            setting = f"{program.field}.python=/PATH/bin/python"
            raise UnsupportedError(
                f"{program.field} is to serve models with {program.engine}, and {program.lacking}.",
                expected=f"an environment with {program.engine}: `{program.field}.python`, `setup` "
                "or `container`",
                fix=f"make one (`python3 -m venv DIR && DIR/bin/pip install {program.engine}`) and "
                f"set {setting}; `refiner doctor RECIPE` tries it",
            )


def _programs(config: RecipeConfig, kinds: Collection[str]) -> Iterator[ServerProgram]:
    grpo = "grpo" in kinds and config.grpo.generation_backend == "vllm"
    if grpo or ("sample" in kinds and config.sample.generation_backend == "vllm"):
        yield ServerProgram.of(config.grpo.rollout_server, "grpo.rollout_server", "vllm")
    engine = engine_of(config.judge)
    asked = any(asks_judge(config, kind) for kind in kinds)
    if asked and serves(config.judge) and engine in ("vllm", "transformers"):
        yield ServerProgram.of(config.judge.serve, "judge.serve", engine)
