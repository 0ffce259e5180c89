"""History of what earlier stages took (sizes, seconds, failures), and sizes of models.

In: a workspace. Out: a :class:`History` per kind of stage (and, where it is known, per model). In:
a model reference. Out: a :class:`ModelSize`, the number of its parameters without loading it, from
a header, a configuration or a name, which says where the number is from.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from infra.disk.usage import size_of
from infra.foreign.checkpoints import recorded_checkpoints, safetensors_header
from infra.store.checkpoints import CheckpointStore
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import StageRecord

#: What a checkpoint takes per parameter: weights, two float32 moments, float32 masters if need be.
STATE_BYTES = {"float32": 12, "bfloat16": 14}
_NAMED = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", re.IGNORECASE)


class ModelSize(NamedTuple):
    """``parameters`` is None where nothing says; ``source`` is for people."""

    parameters: int | None
    source: str


def model_size(folder: Path | None, name: str) -> ModelSize:
    """The size of a model: its local files first, then ``4B`` or ``600m`` in its name."""
    if folder is not None and folder.is_dir():
        if counted := _by_headers(folder):
            return ModelSize(counted, f"counted in {folder.name}")
        if computed := _by_config(folder / "config.json"):
            return ModelSize(computed, f"from {folder.name}/config.json")
    found = _NAMED.findall(name.rpartition("/")[2])
    if found:
        # `30B-A3B`: all of a mixture's weights are stored, not only those that are active.
        sizes = (float(n) * (1e9 if unit.lower() == "b" else 1e6) for n, unit in found)
        return ModelSize(int(max(sizes)), f"from the name {name}")
    return ModelSize(None, f"nothing says how large {name} is")


def size_of_model(config: RecipeConfig) -> ModelSize:
    """Number of parameters of a recipe's model, as far as this machine can tell."""
    from refiner_core.generation.load import resolve_ref

    name = config.model.name_or_path
    try:
        path: Path | None = Path(resolve_ref(name))
    except RefinerError:
        path = None
    return model_size(path, name)


def _by_headers(folder: Path) -> int:
    """Numbers in all safetensors files, by their headers."""
    try:
        headers = [safetensors_header(path)[1] for path in folder.glob("*.safetensors")]
        return sum(math.prod(entry["shape"]) for of in headers for entry in of.values())
    except (OSError, ValueError, TypeError):
        return 0


def _by_config(path: Path) -> int:
    """A decoder's weights from its shape: embeddings, attention and a gated feed-forward part."""
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        inner, words = int(config["intermediate_size"]), int(config["vocab_size"])
        heads = int(config["num_attention_heads"])
        pairs = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or hidden // heads)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return 0
    attention = 2 * hidden * width * (heads + pairs)
    embeddings = words * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + layers * (attention + 3 * hidden * inner)


log = logging.getLogger(__name__)
N = TypeVar("N", int, float)

#: What tells other people's trainers apart, in the identity of a stage.
SCRIPT = "command.run"
#: Ends that say something about the machines, and not about the recipe or the person.
_BREAKDOWNS = (
    *("preempted", "node_failure", "killed", "out_of_memory", "gpu_out_of_memory"),
    *("gpu_error", "disk_full", "hung", "judge_outage", "environment_outage", "time_limit"),
    "launch_failure",
)


class History(NamedTuple):
    """The largest that stages of one kind have taken; None where none has.

    Bytes and inodes; ``rollout_step_bytes`` is one step's file.
    """

    checkpoint_bytes: int | None = None
    checkpoint_inodes: int | None = None
    output_bytes: int | None = None
    output_inodes: int | None = None
    rollout_step_bytes: int | None = None


class Times(NamedTuple):
    """The longest step and save that stages of one kind have taken, seconds."""

    step_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True)
class Failures:
    """Breakdowns in so many seconds of work."""

    count: int
    seconds: float

    @property
    def mtbf_s(self) -> float | None:
        """Mean time between breakdowns, seconds; None where too little was seen to say."""
        return self.seconds / self.count if self.count and self.seconds > 0 else None


def history_of(
    workspace: Workspace, kind: str, model: str | None = None, script: str | None = None
) -> History:
    """History of stages of a kind; ``model`` (the digest among a plan's sources) restricts it to
    those of that model, ``script`` to those of that `command.run`."""
    found = History()
    for stage_id, record in _alike(workspace, kind, model):
        if script is not None and record.spec.identity.get(SCRIPT) != script:
            continue
        measured = _of_stage(workspace, stage_id, record)
        found = History(*map(_larger, found, measured))
    return found


def times_of(workspace: Workspace, kind: str, model: str | None = None) -> Times:
    """Durations of their steps and saves."""
    found = Times()
    for stage_id, record in _alike(workspace, kind, model):
        save_s = workspace.longest_save_s(stage_id) or None
        found = Times(*map(_larger, found, (_step_s(workspace, stage_id, record), save_s)))
    return found


def _alike(workspace: Workspace, kind: str, model: str | None) -> Iterator[tuple[str, StageRecord]]:
    for stage_id in workspace.stage_ids():
        record = _record(workspace, stage_id) if stage_id.rpartition("-")[0] == kind else None
        if record is not None and model in (None, record.spec.sources.get("model")):
            yield stage_id, record


def failures_of(workspace: Workspace) -> Failures:
    """Number of breakdowns of attempts, over all their seconds."""
    records = [_record(workspace, stage_id) for stage_id in workspace.stage_ids()]
    attempts = [a for r in records if r is not None for a in r.attempts]
    ends = [a.outcome.failure for a in attempts if a.outcome is not None]
    seconds = sum((a.seconds or 0.0 for a in attempts), 0.0)
    return Failures(sum(end in _BREAKDOWNS for end in ends), seconds)


def suggest_save_freq(step_s: float, save_s: float, mtbf_s: float) -> int:
    """Steps between checkpoints that lose the least time, at least 1.

    Young's first-order optimum, an interval of sqrt(2 · save · MTBF) seconds (J. W. Young, "A first
    order approximation to the optimum checkpoint interval", CACM 17, 1974; J. T. Daly, FGCS 22,
    2006, refines it). ``step_s``, ``save_s`` and ``mtbf_s`` are seconds.
    """
    if step_s <= 0 or save_s < 0 or mtbf_s <= 0:
        raise ValueError(f"no times: step {step_s} s, save {save_s} s, MTBF {mtbf_s} s")
    return max(1, round(math.sqrt(2 * save_s * mtbf_s) / step_s))


def _record(workspace: Workspace, stage_id: str) -> StageRecord | None:
    try:
        return workspace.read_record(stage_id)
    except RefinerError as error:
        log.debug("%s", error)
        return None


def _of_stage(workspace: Workspace, stage_id: str, record: StageRecord) -> History:
    from infra.store.traces import list_rollouts

    paths = workspace.layout.stage(stage_id)
    theirs = recorded_checkpoints(workspace, stage_id).found
    saved = [size_of(c.path) for c in CheckpointStore(paths.checkpoints, 0).complete()]
    saved += [size_of(c.path) for c in theirs if not c.damage]
    output = None
    if record.result is not None:
        output = size_of(paths.data / record.result.output_dir)
        made = sum(f.bytes for f in record.result.files)  # it may have been reclaimed meanwhile
        output = output._replace(bytes=max(made, output.bytes))
    newest = paths.attempt(record.attempts[-1].number) if record.attempts else None
    rollouts = [size_of(p).bytes for p in list_rollouts(newest.rollouts)] if newest else []
    return History(
        checkpoint_bytes=max((s.bytes for s in saved), default=None),
        checkpoint_inodes=max((s.inodes for s in saved), default=None),
        output_bytes=output.bytes if output else None,
        output_inodes=output.inodes if output else None,
        rollout_step_bytes=sum(rollouts) // len(rollouts) if rollouts else None,
    )


def _step_s(workspace: Workspace, stage_id: str, record: StageRecord) -> float | None:
    """Seconds of a step: as logged, else those of the attempt over its steps."""
    if not record.attempts:
        return None
    from infra.store.traces import read_metrics

    last = record.attempts[-1]
    try:
        lines = read_metrics(workspace.layout.attempt(stage_id, last.number).metrics)
    except (OSError, ValueError, KeyError):
        return None
    times = [t for line in lines if (t := line.metrics.get("time/step_s")) is not None]
    if times:
        return sum(times) / len(times)
    steps = lines[-1].step - (last.resumed_from_step or 0) if lines else 0
    return last.seconds / steps if steps > 0 and last.seconds else None


def _larger(one: N | None, other: N | None) -> N | None:
    return max((v for v in (one, other) if v is not None), default=None)
