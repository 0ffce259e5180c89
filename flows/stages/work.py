"""The work of a stage, its execution, and the inputs that it was planned with.

A stage function gets a :class:`StageWork` (specification, input folders, output folder) and returns
a JSON-ready report; its outputs are the files in ``output_dir``. No stage calls another. Each kind
names its function, and a function imports what it needs, so that a publish job does not import
torch.

Own environments, rubrics and prompts are files that may be edited between plan and job: they must
be those of the plan from a stage's beginning to its end, or the stage is refused. Half a run under
other rules is worse than none.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.jobs.signals import AttemptClosed
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.records import StageSpec
from refiner_core.contract.types import Progress, StageIO

if TYPE_CHECKING:
    from refiner_core.samples import OpenServers


@dataclass(frozen=True)
class StageWork:
    """Everything that a stage may use.

    ``inputs`` maps a role (``data``, ``policy``, ``weights`` …) to the output folder of its
    finished stage, ``input_stages`` to the stage's id. ``workspace`` is for cards, which describe a
    whole run, and for shared servers and the store of judgements. ``attempt`` is the number of this
    attempt.
    """

    spec: StageSpec
    config: RecipeConfig
    inputs: Mapping[str, Path]
    input_stages: Mapping[str, str]
    output_dir: Path
    io: StageIO
    stage_id: str
    workspace: Workspace
    attempt: int = 1

    @property
    def model_ref(self) -> str:
        """Model that this stage starts from or measures: a folder, or a reference to the recipe's
        base."""
        for role in ("policy", "weights"):
            if role in self.inputs:
                return str(self.inputs[role] / "model")
        return self.config.model.name_or_path

    def starts(self, what: str) -> Callable[[float], None]:
        """Callback that reports as progress for how many seconds something has been starting."""
        return lambda s: self.io.progress(Progress(0, 0, what, {"seconds": round(s)}))

    def sampling_servers(self, section: str) -> OpenServers | None:
        """The stage's own vLLM servers of a fixed model, as children of this process; None if the
        section samples with transformers."""
        if getattr(self.config, section).generation_backend != "vllm":
            return None

        def opened(tokenizer: Any, window: int, on_step: Callable[[int, int], None]) -> Any:
            from infra.rollouts.servers import open_sampler

            return open_sampler(
                *(self.config, section, self.model_ref, tokenizer),
                self.workspace.layout.stage(self.stage_id).control,  # the same in every attempt
                window=window,
                should_stop=self.io.should_stop,
                tell=self.starts("starting rollout servers"),
                on_step=on_step,
            )

        return opened

    def check_fence(self, what: str) -> None:
        """Refuse to continue if there is a newer attempt; ``what`` ends then.

        Raises
        ------
        AttemptClosed
            There is a newer attempt.
        """
        if self.workspace.is_stale(self.stage_id, self.attempt):
            raise AttemptClosed(
                f"Attempt {self.attempt} of {self.stage_id} is no longer the newest, so its {what}",
                fix="nothing; the newer attempt continues",
            )


def run_stage(work: StageWork) -> dict[str, Any]:
    """Run the function of a stage's kind; returns its report."""
    module, _, function = KINDS[work.spec.kind].run.partition(":")
    report: dict[str, Any] = getattr(importlib.import_module(module), function)(work)
    return report


def as_planned(sources: Mapping[str, str], config: RecipeConfig) -> str:
    """Digest of a stage's environment; empty without one. ``sources`` are the stage's.

    Raises
    ------
    ConfigurationError
        Its tasks or rules differ from the stage's plan.
    """
    if not config.environment.name:
        return ""
    from refiner_core.environments.registry import environment_digest

    planned, found = sources.get("environment", ""), environment_digest(config)
    if found != planned:
        raise ConfigurationError(
            f"The environment {config.environment.name} is not what this stage was planned with: "
            f"its digest is {found[:24]}, and was {planned[:24]}.",
            expected="the same tasks and rules from the plan to the last attempt",
            fix="put the file back as it was, or run the recipe again, which plans it again",
        )
    return found


@contextlib.contextmanager
def judged_as_planned(spec: StageSpec, config: RecipeConfig) -> Iterator[None]:
    """Judge with the static rubrics and prompts of the plan. Does nothing for stages without
    judgements.

    Raises
    ------
    ConfigurationError
        The file of the set, or the folder of the prompts, is gone or has changed since the plan.
    """
    with contextlib.ExitStack() as stack:
        if (digest := spec.sources.get("rubrics")) is not None:
            from refiner_core.rubrics import hold_rubrics

            stack.enter_context(hold_rubrics(config.reward.static_rubrics, digest))
        if (digest := spec.sources.get("judge_prompt")) is not None:
            from refiner_core.judges.prompting import hold_judge_prompts

            judge = config.judge
            stack.enter_context(hold_judge_prompts(judge.prompt, judge.form, digest))
        yield
