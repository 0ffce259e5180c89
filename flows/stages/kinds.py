"""What each kind of stage does: the wiring from records and configuration to the science.

A stage function gets a :class:`StageWork` (what it is, where its inputs lie, where to write) and
returns a JSON-ready report; outputs are whatever files it leaves in ``output_dir``. No stage calls
another. Functions import what they need, so that a publish job does not pay for torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.stages.environments import as_planned
from flows.stages.work import StageWork
from infra.store import atomic
from infra.store.checkpoints import MARKER
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.plan import StageKind
from refiner_core.contract.types import Generator, Progress

if TYPE_CHECKING:
    from flows.stages.judging import StageJudge


def _judge(work: StageWork) -> AbstractContextManager[StageJudge]:
    """The stage's judge, and the IO to use beside it; its server is kept while the stage works."""
    from flows.stages.judging import judge_for

    return judge_for(work)


def run_data(work: StageWork) -> dict[str, Any]:
    """Rows, or an environment's tasks, to tokenised training, validation and held-out sets."""
    from refiner_core.data.prepare import prepare_data
    from refiner_core.generation.load import load_tokenizer

    tokenizer = load_tokenizer(work.config.model.name_or_path, work.config.model)
    if work.config.environment.name:
        from refiner_core.data.tasks import prepare_tasks
        from refiner_core.environments.registry import open_environment

        return prepare_tasks(
            work.config,
            environment=open_environment(work.config, evaluation=False),
            digest=as_planned(work.spec.sources, work.config),
            tokenizer=tokenizer,
            output_dir=work.output_dir,
            io=work.io,
        )
    return prepare_data(work.config, tokenizer=tokenizer, output_dir=work.output_dir, io=work.io)


def run_sft(work: StageWork) -> dict[str, Any]:
    """Demonstrations to weights."""
    from flows.ranks.training import run_training

    return run_training(work)


def run_rft(work: StageWork) -> dict[str, Any]:
    """Attempts that were kept to weights."""
    from flows.ranks.training import run_training

    return run_training(work)


def run_sample(work: StageWork) -> dict[str, Any]:
    """A model's attempts at the training prompts, and those of them that are worth learning."""
    from refiner_core.rejection.stage import sample_attempts

    as_planned(work.spec.sources, work.config)
    servers = work.config.sample.generation_backend == "vllm"
    with _judge(work) as (judge, io):
        return sample_attempts(
            work.config,
            data_dir=work.inputs["data"],
            model_ref=work.model_ref,
            output_dir=work.output_dir,
            io=io,
            judge=judge,
            open_generator=partial(_sampling_servers, work) if servers else None,
        )


def _sampling_servers(
    work: StageWork, tokenizer: Any, on_step: Callable[[int, int], None]
) -> AbstractContextManager[Generator]:
    """The stage's own vLLM servers, as children of this process, on a model that does not move."""
    from infra.rollouts.opening import open_sampler

    def tell(seconds: float) -> None:
        work.io.progress(Progress(0, 0, "starting rollout servers", {"seconds": round(seconds)}))

    return open_sampler(
        work.config,
        work.model_ref,
        tokenizer,
        work.workspace.layout.stage(work.stage_id).control,  # the same in every attempt
        should_stop=work.io.should_stop,
        tell=tell,
        on_step=on_step,
    )


def run_grpo(work: StageWork) -> dict[str, Any]:
    """Prompts, samples, judgements and rewards to weights."""
    from flows.ranks.training import run_training

    as_planned(work.spec.sources, work.config)
    return run_training(work)


def run_command(work: StageWork) -> dict[str, Any]:
    """Another trainer's script to weights in the layout of the Hub."""
    from flows.stages.foreign import run_foreign

    return run_foreign(work)


def run_fetch(work: StageWork) -> dict[str, Any]:
    """Models and data sets of a Hub into this machine's cache."""
    from flows.stages.fetch import fetch

    return fetch(work.config, work.spec.sources, output_dir=work.output_dir, io=work.io)


def run_evaluate(work: StageWork) -> dict[str, Any]:
    """Weights and a protocol to per-sample results and numbers."""
    from infra.foreign.exports import require_whole
    from refiner_core.contract.protocols import protocol_name
    from refiner_core.evaluation.run import Circumstances, evaluate_model

    if work.spec.model == "command":
        require_whole(work.inputs["weights"] / "model", "evaluation")
    if work.config.environment.name:
        return _evaluate_agent(work)
    with _judge(work) as (judge, io):
        return evaluate_model(
            work.config,
            data_dir=work.inputs["data"],
            data_digest=work.spec.input_fingerprints["data"],
            model_ref=work.model_ref,
            model_name=work.spec.model,
            output_dir=work.output_dir,
            io=io,
            judge=judge,
            circumstances=Circumstances(protocol_name(work.spec.name), _first_attempt(work)),
        )


def _evaluate_agent(work: StageWork) -> dict[str, Any]:
    """The same of an agent; nobody is asked to judge but where the environment is to ask."""
    from refiner_core.contract.protocols import protocol_name
    from refiner_core.evaluation.episodes import evaluate_episodes
    from refiner_core.evaluation.run import Circumstances

    as_planned(work.spec.sources, work.config)
    asks = work.config.environment.nl_assertions == "judge"
    judged = _judge(work) if asks else nullcontext((None, work.io))
    with judged as (judge, io):
        return evaluate_episodes(
            work.config,
            data_dir=work.inputs["data"],
            data_digest=work.spec.input_fingerprints["data"],
            model_ref=work.model_ref,
            model_name=work.spec.model,
            output_dir=work.output_dir,
            io=io,
            judge=judge,
            circumstances=Circumstances(protocol_name(work.spec.name)),
        )


def _first_attempt(work: StageWork) -> str:
    """What tells this making of a stage from all others, also from one whose record was deleted:
    the same in all of its attempts."""
    record = work.workspace.read_record(work.stage_id)
    return record.attempts[0].comment if record is not None and record.attempts else ""


def run_export(work: StageWork) -> dict[str, Any]:
    """A checkpoint of a training that may still go on to weights in the layout of the Hub."""
    from refiner_core.training.export import export_checkpoint

    trained = work.input_stages["policy"]
    report = export_checkpoint(
        work.config,
        checkpoint=work.inputs["policy"],
        model_ref=_trained_from(work, trained),
        output_dir=work.output_dir,
        io=work.io,
    )
    return {**report, "stage": trained, **_made_by(work.inputs["policy"])}


def _made_by(checkpoint: Path) -> dict[str, Any]:
    """The attempt that made a checkpoint, and for how long it had run by then."""
    marker = atomic.read_json(checkpoint / MARKER) or {}
    return {"attempt": marker.get("attempt"), "elapsed_s": marker.get("elapsed_s")}


def _trained_from(work: StageWork, stage_id: str) -> str:
    """The model that a training stage started from: a folder, or the recipe's base."""
    layout = work.workspace.layout
    newest = layout.stage(stage_id).attempt_numbers()[-1]
    inputs = work.workspace.part(layout.attempt(stage_id, newest), "inputs")
    if "policy" not in inputs:
        return work.config.model.name_or_path
    folder = work.workspace.output_dir(inputs["policy"])
    if folder is None:
        raise WorkspaceError(
            f"{inputs['policy']}, which {stage_id} has started from, is not recorded any more",
            expected="the stages that a model was made from",
            fix="put its folder back, or train again",
        )
    return str(folder / "model")


def run_publish(work: StageWork) -> dict[str, Any]:
    """Weights and a card to a folder in Hub layout, or to the Hub."""
    from flows.publishing import publish

    return publish(work)


def run_card(work: StageWork) -> dict[str, Any]:
    """The published card, with the evaluations' numbers in it."""
    from flows.publishing import refresh_card

    return refresh_card(work)


def run_serve(work: StageWork) -> dict[str, Any]:
    """A judge's server, for as long as somebody asks it."""
    from flows.stages.serving import run_serve

    return run_serve(work)


STAGE_FUNCTIONS: dict[StageKind, Callable[[StageWork], dict[str, Any]]] = {
    "fetch": run_fetch,
    "data": run_data,
    "sft": run_sft,
    "sample": run_sample,
    "rft": run_rft,
    "grpo": run_grpo,
    "command": run_command,
    "evaluate": run_evaluate,
    "export": run_export,
    "publish": run_publish,
    "card": run_card,
    "serve": run_serve,
}
