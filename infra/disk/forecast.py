"""Forecast of the disk use of plans before they run: per stage, for several trials.

In: plans and a workspace (measured history first, else sizes of models). Out: a :class:`Forecast`
with two figures: the use if nothing is ever reclaimed, and the least that suffices if finished
stages' checkpoints may go. _History is the use of earlier stages, per kind of stage and, where it
is known, per model. A model's parameters are counted without loading it, from headers or a name.

A checkpoint holds what :mod:`refiner_core.training.engines.protocol` writes: the weights, two
moments of AdamW in float32, and float32 master weights if the model is in bfloat16: 12 bytes per
parameter in float32, 14 in bfloat16, with any engine and number of processes (each writes its share
into files of its own). A step that is published during training takes weights once for its export
and once more in a folder target; on a Hub it takes no space here. Stored judgements are not
counted: 36 bytes each, and they are reclaimed last.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infra.disk.usage import size_of
from infra.external.checkpoints import recorded_checkpoints, safetensors_header
from infra.store.checkpoints import CheckpointStore
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.monitoring import monitored_steps, monitors
from refiner_core.contract.placement import STAGES, section_of, sft_section
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import StageRecord

log = logging.getLogger(__name__)

#: Bytes of a checkpoint per parameter: weights, two float32 moments, float32 masters if needed.
STATE_BYTES = {"float32": 12, "bfloat16": 14}
_NAMED = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", re.IGNORECASE)


class ModelSize(NamedTuple):
    """``parameters`` is None if unknown; ``source`` is for people."""

    parameters: int | None
    source: str


def model_size(folder: Path | None, name: str) -> ModelSize:
    """The size of a model: its local files first, then ``4B`` or ``600m`` in its name."""
    if folder is not None and folder.is_dir() and (counted := _by_headers(folder)):
        return ModelSize(counted, f"counted in {folder.name}")
    found = _NAMED.findall(name.rpartition("/")[2])
    if found:
        # `30B-A3B`: all weights of a mixture are stored, not only the active ones.
        sizes = (float(n) * (1e9 if unit.lower() == "b" else 1e6) for n, unit in found)
        return ModelSize(int(max(sizes)), f"from the name {name}")
    return ModelSize(None, f"the size of {name} is unknown")


def size_of_model(config: RecipeConfig) -> ModelSize:
    """Number of parameters of a recipe's model, as far as known on this machine."""
    from refiner_core.generation.load import resolve_ref

    name = config.model.name_or_path
    try:
        path: Path | None = Path(resolve_ref(name))
    except RefinerError:
        path = None
    return model_size(path, name)


def _by_headers(folder: Path) -> int:
    """Number of parameters in all safetensors files, from their headers."""
    try:
        headers = [safetensors_header(path)[1] for path in folder.glob("*.safetensors")]
        return sum(math.prod(entry["shape"]) for of in headers for entry in of.values())
    except (OSError, ValueError, TypeError):
        return 0


#: The field in a stage's identity that distinguishes other trainers' scripts.
SCRIPT = "command.run"


class _History(NamedTuple):
    """The largest use of stages of one kind so far, in bytes; 0 if there were none."""

    checkpoint_bytes: int = 0
    output_bytes: int = 0


def _history_of(
    workspace: Workspace, kind: str, model: str | None = None, script: str | None = None
) -> _History:
    """History of stages of a kind; ``model`` (the digest among a plan's sources) restricts it to
    stages of that model, ``script`` to stages of that `command.run`."""
    found = _History()
    for stage_id in workspace.stage_ids():
        if stage_id.rpartition("-")[0] != kind:
            continue
        try:
            record = workspace.read_record(stage_id)
        except RefinerError as error:
            log.debug("%s", error)
            continue
        if (
            record is not None
            and model in (None, record.spec.sources.get("model"))
            and script in (None, record.spec.identity.get(SCRIPT))
        ):
            found = _History(*map(max, found, _taken_by(workspace, stage_id, record)))
    return found


def _taken_by(workspace: Workspace, stage_id: str, record: StageRecord) -> _History:
    output = 0
    if record.result is not None:
        there = size_of(workspace.layout.stage(stage_id).data / record.result.output_dir).bytes
        made = sum(f.bytes for f in record.result.files)  # they may have been reclaimed since
        output = max(made, there)
    return _History(largest_checkpoint(workspace, stage_id), output)


def largest_checkpoint(workspace: Workspace, stage_id: str) -> int:
    """Bytes of the largest complete checkpoint of a stage; 0 if there is none."""
    store = CheckpointStore(workspace.layout.stage(stage_id).checkpoints, 0)
    theirs, _ = recorded_checkpoints(workspace, stage_id)
    saved = [c.path for c in store.complete()] + [c.path for c in theirs if not c.damage]
    return max((size_of(path).bytes for path in saved), default=0)


# ---------------------------------------------------------------- the future use

#: Default number of prompts.
_PROMPTS = 1000


def rollouts_of_step(config: RecipeConfig) -> int:
    """Most rollouts of a GRPO step: active sampling may take several rounds."""
    grpo = config.grpo
    rounds = grpo.active_sampling_max_rounds if grpo.active_sampling else 1
    return rounds * grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout


def training_prompts(config: RecipeConfig) -> int:
    """Upper limit of training prompts or tasks, where only the data have the number."""
    data = config.data
    if config.environment.name:
        return config.environment.max_train_tasks or _PROMPTS
    if data.rl_path == "builtin:synthetic":
        return min(data.synthetic_rl_rows, data.max_rl_rows or data.synthetic_rl_rows)
    return data.max_rl_rows or _PROMPTS


def evaluation_samples(config: RecipeConfig) -> int:
    """Answers sampled by an evaluation, greedy ones included."""
    evaluate = config.evaluate
    prompts = evaluate.max_prompts or config.data.max_rl_rows or 1000
    return prompts * (evaluate.num_samples + 1)


#: Size of a stage's records and log, and of the metrics of a step.
_CONTROL_BYTES, _METRICS_BYTES = 256 << 10, 2 << 10
#: Bytes of a rollout on the disk: per sampled token (id, log-probability, text), and fixed.
_TOKEN_BYTES, _ROLLOUT_BYTES = 12, 2048
_ROW_BYTES = 8 << 10  # of a prepared row
#: Bytes of a parameter in the model's own type.
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
#: Muon keeps one moment of hidden matrices where AdamW keeps two; the rest is about an eighth.
_MUON_SAVES = 3.5


class StageNeed(NamedTuple):
    """Disk use of one stage that is still to run, bytes.

    ``peak`` is the most at any moment; ``final`` the size at the end; ``kept`` the rest of that
    once its checkpoints are reclaimed. ``basis`` is the source of the figures; ``known`` is False
    if there was none. ``sure`` is a lower bound: checkpoints and the final weights.
    """

    stage: PlannedStage
    peak: int
    final: int
    kept: int
    basis: str
    known: bool = True
    sure: int = 0


@dataclass(frozen=True)
class Forecast:
    """Disk use of several plans.

    Attributes
    ----------
    stages
        Those still to run, each once however many trials share it.
    parallel
        Most stages that run at a time.
    reclaim
        Whether finished stages' checkpoints may be reclaimed when space is short.
    """

    stages: tuple[StageNeed, ...]
    parallel: int
    reclaim: bool

    @property
    def peak_bytes(self) -> int:
        """The peak if nothing is reclaimed."""
        extra = sorted((s.peak - s.final for s in self.stages), reverse=True)
        return self.final_bytes + sum(extra[: self.parallel])

    @property
    def least_bytes(self) -> int:
        """The peak if all that may be reclaimed is."""
        extra = sorted((s.peak - s.kept for s in self.stages), reverse=True)
        return sum(s.kept for s in self.stages) + sum(extra[: self.parallel])

    @property
    def final_bytes(self) -> int:
        """Bytes at the end."""
        return sum(s.final for s in self.stages)

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free for the plans to finish, under the present policy."""
        return self.least_bytes if self.reclaim else self.peak_bytes

    @property
    def sure_bytes(self) -> int:
        """Lower bound of the largest stage's need, bytes; no guess that errs on the large side."""
        return max((s.sure for s in self.stages), default=0)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Stages without any known figures."""
        return tuple(s.stage.name for s in self.stages if not s.known)


SizeOf = Callable[[RecipeConfig], ModelSize]


class _Known:
    """The basis of a forecast, looked up once: measured history, and sizes of models."""

    def __init__(self, workspace: Workspace, size_of_model: SizeOf) -> None:
        self.workspace, self._size_of_model = workspace, size_of_model
        self._sizes: dict[str, ModelSize] = {}
        self._history = functools.cache(functools.partial(_history_of, workspace))
        self._result = functools.cache(workspace.read_result)

    def history(self, stage: PlannedStage) -> _History:
        """History of stages of its kind that started at its model and ran its script."""
        return self._history(stage.kind, stage.sources.get("model"), stage.identity.get(SCRIPT))

    def size(self, config: RecipeConfig) -> ModelSize:
        """Size of a recipe's model."""
        name = config.model.name_or_path
        if name not in self._sizes:
            self._sizes[name] = self._size_of_model(config)
        return self._sizes[name]

    def is_done(self, stage_id: str) -> bool:
        """Tell whether the stage has nothing left to write."""
        return self._result(stage_id) is not None


def forecast_disk(
    plans: Sequence[Plan], workspace: Workspace, size_of_model: SizeOf = size_of_model
) -> Forecast:
    """Forecast the stages of ``plans`` that are not done, from measured history and the number of
    parameters of each recipe's model."""
    known = _Known(workspace, size_of_model)
    needs: dict[str, StageNeed] = {}
    for plan in plans:
        for stage in plan.stages:
            if stage.id not in needs and not known.is_done(stage.id):
                needs[stage.id] = _need(stage, plan, known)
    config = plans[0].config if plans else RecipeConfig()
    local = config.dispatch.executor == "local"
    parallel = config.dispatch.max_parallel if local else max(1, len(plans))
    return Forecast(tuple(needs.values()), max(1, parallel), config.disk.reclaim)


def _need(stage: PlannedStage, plan: Plan, known: _Known) -> StageNeed:
    config, history = plan.config_of(stage), known.history(stage)
    if stage.kind in STAGES:
        return _training_need(stage, plan, known.size(plan.config), history)
    if stage.kind == "command":
        return _command_need(stage, config, history)
    if stage.kind == "export":  # the same weights as the training stage's own at the end
        return _flat_need(stage, *_weights_of(plan.by_name[stage.inputs["policy"]], plan, known))
    if stage.kind == "publish" and plan.config.publish.target == "folder":
        # A copy of the weights. On another disk it is counted all the same: the free space there
        # is unknown.
        made = plan.by_name[stage.inputs["weights"]]
        while made.kind == "export":
            made = plan.by_name[made.inputs["policy"]]
        return _flat_need(stage, *_weights_of(made, plan, known))
    # An attempt is an answer, or an episode up to the length of its context. Each is stored once,
    # and twice while being written; demonstrations are a part of that.
    length = config.grpo.response_length
    tokens = config.grpo.max_token_length if config.environment.name else length
    attempts = training_prompts(config) * config.sample.attempts
    size, basis = (
        {
            "data": (config.data.synthetic_sft_rows + config.data.synthetic_rl_rows) * _ROW_BYTES,
            "sample": 2 * attempts * _sample_bytes(tokens),
            "evaluate": evaluation_samples(config) * _sample_bytes(length),
        }.get(stage.kind, 0),
        "estimated",
    )
    if history.output_bytes and stage.kind != "publish":
        size, basis = history.output_bytes, "measured"
    need = _flat_need(stage, size, basis)
    if stage.kind != "sample":
        return need
    half = size // 2  # checkpoints hold links to the same files
    return need._replace(peak=need.peak + size, final=need.final + half)


def _flat_need(stage: PlannedStage, size: int | None, basis: str) -> StageNeed:
    """Need of a stage that writes once, and whose files stay."""
    total = (size or 0) + _CONTROL_BYTES
    return StageNeed(stage, total, total, total, basis, size is not None)


def _command_need(stage: PlannedStage, config: RecipeConfig, history: _History) -> StageNeed:
    """Need of another trainer's stage: it saves at any time, and older saves are deleted when space
    is short. Only existing files show the size of one."""
    known, rest = history.checkpoint_bytes > 0, history.output_bytes + _CONTROL_BYTES
    saved = (config.command.keep + 1) * history.checkpoint_bytes + rest
    basis = "measured" if known else "unknown until its first checkpoint"
    return StageNeed(stage, saved, saved, rest, basis, known, saved if known else 0)


def _weights_of(made: PlannedStage, plan: Plan, known: _Known) -> tuple[int | None, str]:
    """Bytes of the weights that a training stage makes, and the source of that figure."""
    if measured := known.history(made).output_bytes:
        return measured, "measured"
    model = known.size(plan.config)
    if made.kind not in STAGES or model.parameters is None:
        return None, model.source
    return model.parameters * WEIGHT_BYTES[plan.config.model.dtype], model.source


def _training_need(
    stage: PlannedStage, plan: Plan, model: ModelSize, history: _History
) -> StageNeed:
    config = plan.config
    section = section_of(config, stage.kind)
    parameters, each = model.parameters or 0, STATE_BYTES[config.model.dtype]
    less = _MUON_SAVES if getattr(section, "optimizer", "") == "muon" else 0.0
    one = history.checkpoint_bytes or int(parameters * (each - less))
    weights = parameters * WEIGHT_BYTES[config.model.dtype]
    steps = _steps(stage.kind, config)
    saves = max(1, -(-steps // max(1, section.save_freq))) if steps else section.keep
    # One checkpoint beside `keep` waits for its export, which takes less than the steps between two
    # saves and has a slot of its own. If exports queue for longer, each adds one.
    held = int(
        any(other.inputs[role] == stage.name for other in plan.stages for role in other.at_step)
    )
    if stage.kind == "grpo" and monitors(config):  # saves the best by gold, and the one before
        saves, held = saves + len(monitored_steps(config)) - 1, held + 2
    # With `keep` >= 2, space is freed before a save; with 1, the old one stays until the new one
    # is complete.
    most = min(saves, max(2, section.keep) + held)
    left = min(saves, section.keep + held)
    rollouts = rollouts_of_step(config) * _sample_bytes(config.grpo.response_length)
    logged = steps * (_METRICS_BYTES + rollouts * (stage.kind == "grpo"))
    rest = logged + (history.output_bytes or weights) + _CONTROL_BYTES
    least = history.checkpoint_bytes or int(parameters * (each - _MUON_SAVES))
    measured = history.checkpoint_bytes > 0
    return StageNeed(
        stage,
        peak=most * one + rest,
        final=left * one + rest,
        kept=rest,
        basis="measured" if measured else model.source,
        known=measured or model.parameters is not None,
        sure=min(saves, 2) * least + weights,
    )


def _steps(kind: str, config: RecipeConfig) -> int:
    """Optimiser steps; 0 if only the data have the number."""
    if kind == "grpo":
        return config.grpo.num_training_steps
    return sft_section(config, kind).max_train_steps or 0


def _sample_bytes(tokens: int) -> int:
    return _TOKEN_BYTES * tokens + _ROLLOUT_BYTES
