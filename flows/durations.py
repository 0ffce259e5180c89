"""Forecast of time, GPU-hours, judge calls and busy shares of a plan's stages.

In: a plan, the name of a GPU, certificates of the workspace. Out: a :class:`StageTime` for each
stage that trains, samples or evaluates, for people and as JSON. Imports nothing heavy.

The figures of a certificate (``refiner certify``) on such a GPU replace the assumptions that they
measure; all else follows from the assumptions below, each with a fast, a likely and a slow value.
Training costs 6 N D operations (N parameters, D tokens), 8 with recomputed activations. What is
unknown has no figure: another GPU, episodes with tools, or a number of rows that only the data have
(then figures are per 100 prompts, or per step).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from flows.checking.resources import model_shape
from infra.orchestrator.timeline import rough
from infra.store.provenance import read_certificates
from infra.store.workspace import Workspace
from refiner_core.contract.config import JudgeConfig, RecipeConfig, SftConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.monitoring import monitored_rows, monitored_steps, monitors
from refiner_core.contract.placement import (
    STAGES,
    ModelShape,
    Placement,
    placement_of,
    sampling_servers,
    sft_section,
    starts_servers,
)
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.proofs import Certificate
from refiner_core.contract.protocols import golds_under
from refiner_core.contract.services import asks_judge, serves
from refiner_core.report.printing import table_lines
from refiner_core.rubrics import load_rubric_set
from sweeps.forecast import samples_per_prompt


class _GpuRates(NamedTuple):
    """Dense bfloat16 operations per second without sparsity, and bytes per second of the memory, by
    the maker's data sheet."""

    flops: float
    bandwidth: float


GPUS = {
    "A100": _GpuRates(312e12, 2.0e12),
    "H100 PCIe": _GpuRates(756e12, 2.0e12),
    "H100": _GpuRates(989e12, 3.35e12),
    "H200": _GpuRates(989e12, 4.8e12),
    "B200": _GpuRates(2250e12, 8.0e12),
    "L40S": _GpuRates(362e12, 0.86e12),
    "A10": _GpuRates(125e12, 0.6e12),
    "RTX 4090": _GpuRates(165e12, 1.0e12),
}


def known_gpu(name: str) -> str | None:
    """The key in :data:`GPUS` of a GPU by any of its names, such as ``NVIDIA H100 80GB HBM3``."""
    found = [key for key in GPUS if set(key.lower().split()) <= set(re.split(r"\W+", name.lower()))]
    return max(found, key=len, default=None)


#: The GPU of a plan that names none.
DEFAULT_GPU = "H100"


class Case(NamedTuple):
    """One value of each assumption.

    Attributes
    ----------
    utilisation
        Share of a GPU's operations that training and reading of prompts achieve.
    decode
        Tokens that a server samples while its memory could read one byte per parameter.
    token_s
        Seconds from one token of a sample to its next, on a server.
    layer_s
        Seconds of a layer per token of a batch, decoded by transformers.
    response
        Mean length of an answer, as a share of the allowed one.
    start_s
        Seconds until a GPU stage begins its work: models, servers, compilation.
    certified
        Rate on this machine, as a share of a certified one.
    """

    utilisation: float
    decode: float
    token_s: float
    layer_s: float
    response: float
    start_s: float
    certified: float


CASES = (
    Case(0.45, 12.0, 0.008, 0.0005, 0.35, 60.0, 1.15),
    Case(0.35, 6.0, 0.012, 0.0008, 0.5, 120.0, 1.0),
    Case(0.22, 3.0, 0.02, 0.0015, 0.8, 300.0, 0.8),
)
#: Mean length of a prompt, as a share of the allowed one, before its data are made.
PROMPT_SHARE = 0.25
#: Calls for an answer, as counted on real rows; a static set has a call for each of its rubrics.
CITATION_CALLS, INSTANCE_CALLS = 14.3, 4.4
#: Tokens of a call: its prompt, its reply, and what each further rubric of a batched one adds.
CALL_PROMPT, CALL_REPLY, MORE_PROMPT, MORE_REPLY = 757, 60, 80, 25
#: Bytes per second of new weights on their way to the rollout servers.
SYNC_BYTES_S = 4e9
#: Layers of a model whose files are not here.
LAYERS = 36
#: Kinds of stages with a forecast.
FORECAST_KINDS = (*STAGES, "sample", "evaluate")
#: Unit of figures if the number of prompts is unknown.
PROMPTS = 100


@dataclass(frozen=True)
class StageTime:
    """Forecast of one stage.

    Attributes
    ----------
    per
        ``stage``, or the unit of the figures if the number of units is unknown.
    seconds, gpu_hours
        Fast, likely and slow; GPU-hours include the judge's. None: no figure, ``why`` says why.
    judge_calls, judge_prompt_tokens, judge_reply_tokens
        Likely numbers; None if unknown.
    busy
        Likely share of the time in which samplers, trainers and judges work.
    device
        The name of the GPU, or ``CPU``.
    basis
        ``assumed``, or the node whose certificate was used.
    """

    stage: str
    kind: str
    device: str = ""
    per: str = "stage"
    seconds: tuple[float, ...] | None = None
    gpu_hours: tuple[float, ...] | None = None
    judge_calls: int | None = None
    judge_prompt_tokens: int | None = None
    judge_reply_tokens: int | None = None
    busy: dict[str, float] | None = None
    basis: str = "assumed"
    why: str = ""


@dataclass(frozen=True)
class Hardware:
    """A machine: the name of its GPU (``CPU`` for none), its figures if known, and the newest
    certificate of such a machine."""

    name: str
    gpu: _GpuRates | None
    certificate: Certificate | None

    def measured(self, check: str, parameters: int) -> float | None:
        """Certified tokens per second of a device, scaled to a model of that size."""
        checks = self.certificate.checks if self.certificate else ()
        for found in checks:
            rate, size = found.figures.get("tokens_per_s"), found.figures.get("parameters")
            if found.name == check and found.verdict == "pass" and rate and size:
                return float(rate * size / parameters)
        return None


class _Work(NamedTuple):
    """Seconds of one unit of work, by part, and its total."""

    total: float
    sampling: float = 0.0
    training: float = 0.0
    judging: float = 0.0


class _Unknown(Exception):
    """There is no figure; the message says why."""


def forecast_times(plan: Plan, gpu: str | None = None) -> list[StageTime]:
    """Forecast of each stage that trains, samples or evaluates, in the plan's order.

    Parameters
    ----------
    gpu
        Name of the GPU, such as ``H100``; None: that of the newest certificate, else
        :data:`DEFAULT_GPU`.
    """
    workspace = Workspace.read_only(plan.config.workspace)
    wanted = [stage for stage in plan.stages if stage.kind in FORECAST_KINDS]
    return [stage_time(stage, plan, workspace, gpu) for stage in wanted]


def stage_time(
    stage: PlannedStage, plan: Plan, workspace: Workspace, gpu: str | None = None
) -> StageTime:
    """Forecast of one stage."""
    found, config = StageTime(stage.name, stage.kind), plan.config_of(stage)
    try:
        return _forecast(found, _Stage(stage, plan, config, workspace, gpu))
    except (_Unknown, ConfigurationError) as error:
        return replace(found, why=str(error))


def hardware_of(workspace: Workspace, gpus: int, name: str | None) -> Hardware:
    """The machine of a stage with so many GPUs."""
    try:
        made = [c for c in read_certificates(workspace) if bool(c.gpus) == bool(gpus)]
    except RefinerError:
        made = []
    if not gpus:
        return Hardware("CPU", None, made[-1] if made else None)
    fitting = [c for c in made if name is None or name.lower() in c.gpus[0].lower()]
    wanted = name or (fitting[-1].gpus[0] if fitting else DEFAULT_GPU)
    known, certificate = known_gpu(wanted), fitting[-1] if fitting else None
    if known is None:
        return Hardware(wanted, None, certificate)
    return Hardware(known, GPUS[known], certificate)


# ---------------------------------------------------------------- one stage


class _Stage:
    """A stage with everything that its forecast needs."""

    def __init__(
        self,
        stage: PlannedStage,
        plan: Plan,
        config: RecipeConfig,
        workspace: Workspace,
        gpu: str | None,
    ) -> None:
        self.stage, self.config = stage, config
        if config.environment.name and stage.kind in ("grpo", "sample", "evaluate"):
            raise _Unknown("the length of episodes depends on their tools and users")
        shape = model_shape(config)
        if shape is None:
            raise _Unknown(f"the size of {config.model.name_or_path} is unknown")
        self.shape: ModelShape = shape
        self.gpus = stage.resources.gpus * stage.resources.nodes
        self.hardware = hardware_of(workspace, self.gpus, gpu)
        self.report: dict[str, Any] = {}
        data = plan.by_name.get(stage.inputs.get("data", ""))
        if data is not None and (result := workspace.read_result(data.id)) is not None:
            self.report = dict(result.report)
        self.used = False  # a certificate's figure

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        known = ((self.report.get("rl") or {}).get("prompt_tokens") or {}).get("p50")
        return float(known or PROMPT_SHARE * self.config.data.max_prompt_token_length)

    def rows(self, name: str) -> int | None:
        """Rows of a prepared file, once it is made."""
        file = (self.report.get("files") or {}).get(f"{name}.parquet") or {}
        return int(file["rows"]) if "rows" in file else None

    def require_gpu(self) -> _GpuRates:
        """Figures of the stage's GPU, without which there is no forecast."""
        if self.hardware.gpu is None:
            what = "of CPUs" if self.hardware.name == "CPU" else f"of {self.hardware.name}"
            raise _Unknown(f"nothing is known {what}; `refiner certify` measures a node")
        return self.hardware.gpu

    def certified(self, check: str, case: Case) -> float | None:
        """A certificate's tokens per second of a device."""
        rate = self.hardware.measured(check, self.shape.parameters)
        self.used |= rate is not None
        return None if rate is None else rate * case.certified

    @property
    def basis(self) -> str:
        """The source of the figures."""
        made = self.hardware.certificate if self.used else None
        return f"certificate of {made.host['name']}" if made else "assumed"

    def train_s(self, tokens: float, passes: float, devices: int, case: Case) -> float:
        """Seconds of so many passes (2 N operations a token) on so many devices."""
        rate = self.require_gpu().flops * case.utilisation * max(1, devices)
        return tokens * 2 * self.shape.parameters * passes / rate


def _forecast(found: StageTime, s: _Stage) -> StageTime:
    """Forecast of a stage whose machine and model are known."""
    units, per, asked = _units(s)
    work_of = {"grpo": _grpo_step, "evaluate": _answers, "sample": _answers}
    work = [work_of.get(s.stage.kind, _sft_step)(s, case) for case in CASES]
    starts = [case.start_s if s.gpus and per == "stage" else 0.0 for case in CASES]
    seconds = [start + units * one.total for start, one in zip(starts, work, strict=True)]
    judge = s.config.judge
    judges = judge.resources.gpus * judge.resources.nodes
    judged = asked and judge.kind != "lexical" and asks_judge(s.config, s.stage.kind)
    own_job = serves(judge) and judge.serve.where == "job"
    gpus, likely = s.gpus + (judges if judged and own_job else 0), work[1]
    calls, prompt, reply = judge_use(s.config) if judged else (0.0, 0.0, 0.0)
    shares = {
        "samplers": likely.sampling / likely.total,
        "trainers": likely.training / likely.total,
        "judges": likely.judging / likely.total,
    }
    return replace(
        found,
        device=s.hardware.name,
        per=per,
        seconds=tuple(seconds),
        gpu_hours=tuple(value * gpus / 3600 for value in seconds),
        judge_calls=round(asked * calls),
        judge_prompt_tokens=round(asked * prompt),
        judge_reply_tokens=round(asked * reply),
        busy={name: round(min(1.0, share), 3) for name, share in shares.items() if share},
        basis=s.basis,
        why="without the judge's time: its machine is unknown" if judged and not _served(s) else "",
    )


def _units(s: _Stage) -> tuple[float, str, int]:
    """Units of the stage, what one is if their number is unknown, and judged answers of all."""
    config, kind = s.config, s.stage.kind
    if kind == "grpo":
        grpo = config.grpo
        rollouts = grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout
        return grpo.num_training_steps, "stage", grpo.num_training_steps * rollouts
    if kind in ("evaluate", "sample"):
        evaluates = kind == "evaluate"
        each = samples_per_prompt(s.stage.identity) if evaluates else config.sample.attempts
        rows = s.rows("rl_test" if evaluates else "rl_train")
        most = config.evaluate.max_prompts if evaluates else None
        prompts = most if rows is None else min(rows, most or rows)
        judged = each + evaluates  # the reference's answers are judged, too
        if prompts is None:
            return PROMPTS, f"{PROMPTS} prompts", PROMPTS * judged
        return prompts, "stage", prompts * judged
    section = sft_section(config, kind)
    known = [n for n in (section.max_train_steps, _sft_steps(s)) if n is not None]
    return (min(known), "stage", 0) if known else (1, "step", 0)


def _sft_steps(s: _Stage) -> int | None:
    """Steps of all epochs over the prepared demonstrations; None before they are made."""
    rows, section = s.rows("sft_train"), s.config.sft
    if s.stage.kind != "sft" or rows is None:
        return None
    lengths = s.report.get("sft") or {}
    total, prompt, loss = (
        int((lengths.get(f"{name}_tokens") or {}).get("p50", 0))
        for name in ("total", "prompt", "loss")
    )
    step = _tokens_of_step(section)
    return max(1, round(section.num_train_epochs * rows * (total or prompt + loss) / step))


def _tokens_of_step(section: SftConfig) -> int:
    """Tokens of full packs."""
    packs = section.per_device_train_batch_size * section.gradient_accumulation_steps
    return section.pack_length * packs


# ---------------------------------------------------------------- work


def _sft_step(s: _Stage, case: Case) -> _Work:
    """One step of fine-tuning: full packs."""
    section = sft_section(s.config, s.stage.kind)
    tokens = _tokens_of_step(section)
    world = placement_of(s.config, s.stage.kind).world
    if rate := s.certified("SFT throughput", case):
        seconds = tokens / (rate * world)
    else:
        seconds = s.train_s(tokens, 3 + s.config.model.gradient_checkpointing, world, case)
    return _Work(seconds, training=seconds)


def _grpo_step(s: _Stage, case: Case) -> _Work:
    """One step of GRPO, with what `async_steps` hides."""
    grpo, placed = s.config.grpo, placement_of(s.config, "grpo")
    rollouts = grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout
    sampling = _sampling(s, case, rollouts, grpo.num_unique_prompts_rollout, placed)
    update, judging = _update_s(s, case, rollouts, placed), _judging_s(s, case, rollouts)
    sync = s.shape.parameters * 2 / SYNC_BYTES_S if grpo.generation_backend == "vllm" else 0.0
    if grpo.async_steps == 0:  # the judge has the first answers at about half of the sampling
        total = sampling + max(0.0, judging - sampling / 2) + update
    elif grpo.async_steps == 1:
        total = max(sampling, judging + update)
    else:
        total = max(sampling, judging, update)
    return _Work(sync + total, sampling, update, judging)


def _update_s(s: _Stage, case: Case, rollouts: int, placed: Placement) -> float:
    grpo, response = s.config.grpo, case.response * s.config.grpo.response_length
    reference = int(bool(grpo.beta))
    if rate := s.certified("GRPO update", case):  # measured without a reference model
        return rollouts * (s.prompt + response) / (rate * placed.world) * (1 + reference / 3)
    old = grpo.old_logprobs == "recomputed" and grpo.num_epochs * grpo.num_mini_batches > 1
    passes = grpo.num_epochs * (3 + s.config.model.gradient_checkpointing) + reference + old
    tokens = grpo.num_unique_prompts_rollout * s.prompt + rollouts * response  # prompts are shared
    return s.train_s(tokens, passes, placed.world, case)


def _answers(s: _Stage, case: Case) -> _Work:
    """Sampling and judging of one prompt's answers, both at the same time."""
    each, _, asked = _units(s)
    answers = asked / each
    kind, evaluate, sample = s.stage.kind, s.config.evaluate, s.config.sample
    if kind == "evaluate":
        answers -= 1
    if starts_servers(s.config, kind):
        servers = sum(map(len, sampling_servers(s.config, kind)))
        s_sampling = _server_s(s, case, answers, 1, servers)
    else:
        together = evaluate.batch_size if kind == "evaluate" else sample.generation_batch_size
        s_sampling = _batches_s(s, case, answers, together, max(1, s.gpus))
    judging = _judging_s(s, case, asked / each)
    return _Work(max(s_sampling, judging), sampling=s_sampling, judging=judging)


def _sampling(s: _Stage, case: Case, rollouts: int, prompts: int, placed: Placement) -> float:
    """Sampling of a step; its longest answer takes its time on a server."""
    grpo = s.config.grpo
    if grpo.generation_backend == "vllm":
        gpus = placed.nodes * sum(map(len, placed.server_gpus))
        spread = _server_s(s, case, rollouts, prompts, gpus)
        return max(spread, grpo.response_length * case.token_s)
    return _batches_s(s, case, rollouts, grpo.generation_batch_size, placed.world)


def _server_s(s: _Stage, case: Case, answers: float, prompts: float, gpus: int) -> float:
    """Seconds of servers: prompts are read once each, answers token by token."""
    tokens = answers * case.response * s.config.grpo.response_length
    rate = case.decode * s.require_gpu().bandwidth / s.shape.parameters * max(1, gpus)
    return tokens / rate + s.train_s(prompts * s.prompt, 1, gpus, case)


def _batches_s(s: _Stage, case: Case, answers: float, together: int, devices: int) -> float:
    """Seconds of batches decoded by transformers, each as long as its longest answer."""
    longest = s.config.grpo.response_length
    if rate := s.certified("sampling by transformers", case):
        return answers * case.response * longest / (rate * devices)
    s.require_gpu()
    batches = answers / devices / together
    return batches * longest * (s.shape.layers or LAYERS) * case.layer_s


# ---------------------------------------------------------------- judge


def judge_use(config: RecipeConfig) -> tuple[float, float, float]:
    """Calls for an answer, with the tokens of their prompts and of their replies."""
    source, rubrics = config.reward.rubric_source, 0.0
    if "instance" in source:
        rubrics += INSTANCE_CALLS
    if "static" in source and not config.reward.instance_rubrics_only:
        rubrics += len(load_rubric_set(config.reward.static_rubrics).rubrics)
    batched = config.judge.form == "batched" and rubrics > 1
    calls = CITATION_CALLS + (1 if batched else rubrics)
    more = rubrics - 1 if batched else 0.0
    reply = min(CALL_REPLY, config.judge.max_tokens)
    return calls, calls * CALL_PROMPT + more * MORE_PROMPT, calls * reply + more * MORE_REPLY


@dataclass(frozen=True)
class MonitorCost:
    """Judge calls of GRPO's monitor: ``share`` is that of the training's own, None if these are
    none."""

    looks: int
    prompts: int
    calls: int
    share: float | None

    @property
    def text(self) -> str:
        """The cost in a line."""
        share = f", {self.share:.1%} of the training's" if self.share is not None else ""
        calls = f"about {self.calls:,} judge calls{share}" if self.calls else "no judge calls"
        return f"monitor: {self.looks} looks at {self.prompts} prompts, {calls}"


def monitor_cost(config: RecipeConfig) -> MonitorCost | None:
    """The cost of a recipe's monitor; None without one."""
    if not monitors(config):
        return None
    looks, prompts = len(monitored_steps(config)), monitored_rows(config)
    each = sum(_calls_for_total(c) for c in (config, *golds_under(config).values()))
    grpo, calls = config.grpo, looks * prompts * each
    rollouts = grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout
    served = config.judge.kind != "lexical"
    own = grpo.num_training_steps * rollouts * judge_use(config)[0] if served else 0.0
    return MonitorCost(looks, prompts, round(calls), calls / own if own else None)


def _calls_for_total(config: RecipeConfig) -> float:
    """Calls for the reward of an answer, without those for citations that it does not pay."""
    if config.judge.kind == "lexical":
        return 0.0
    reward = config.reward
    pays = reward.apply_paper_citation_reward and reward.paper_citation_weight > 0
    return judge_use(config)[0] - (0.0 if pays else CITATION_CALLS)


_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)B(?:-A(\d+(?:\.\d+)?)B)?", re.IGNORECASE)


def judge_size(judge: JudgeConfig) -> float | None:
    """Parameters of a judge that a token uses, from its name (3e9 for ``35B-A3B``); None if
    unknown."""
    found = _SIZE.search(judge.model.rpartition("/")[2])
    return float(found[2] or found[1]) * 1e9 if found else None


def _served(s: _Stage) -> bool:
    """Whether the judge's speed is known: a server that refiner starts, of a known size."""
    judge = s.config.judge
    return serves(judge) and judge.resources.gpus > 0 and judge_size(judge) is not None


def _judging_s(s: _Stage, case: Case, answers: float) -> float:
    """Seconds of the judge for so many answers; 0 without one, or if its machine is unknown."""
    judge, size = s.config.judge, judge_size(s.config.judge)
    if judge.kind == "lexical" or not asks_judge(s.config, s.stage.kind) or not _served(s):
        return 0.0
    assert size is not None
    _, prompt, reply = judge_use(s.config)
    gpus = judge.resources.gpus * judge.resources.nodes
    reading = gpus * s.require_gpu().flops * case.utilisation / (2 * size)
    writing = gpus * case.decode * s.require_gpu().bandwidth / size
    return answers * (prompt / reading + reply / writing)


# ---------------------------------------------------------------- for people and scripts


def times_json(found: Sequence[StageTime]) -> list[dict[str, Any]]:
    """One object per stage; triples are the fast, likely and slow case."""
    return [asdict(one) for one in found]


def time_lines(found: Sequence[StageTime], plan: Plan, gpu: str | None = None) -> Iterator[str]:
    """A table, and the assumptions in one line."""
    known = [one for one in found if one.seconds is not None]
    heads = ("stage", "time", "GPU-hours", "judge calls", "judge tokens", "busy", "by")
    rows = [
        (
            one.stage,
            _span(one.seconds, partial(rough)) + ("" if one.per == "stage" else f" per {one.per}"),
            _span(one.gpu_hours, lambda hours: f"{hours:.3g}"),
            f"{one.judge_calls:,}" if one.judge_calls else "-",
            _millions((one.judge_prompt_tokens or 0) + (one.judge_reply_tokens or 0)),
            ", ".join(f"{name} {share:.0%}" for name, share in (one.busy or {}).items()),
            one.basis + (f"; {one.why}" if one.why else ""),
        )
        for one in known
    ]
    if rows:
        yield from table_lines(rows, heads)
    if any(one.kind == "grpo" for one in found) and (cost := monitor_cost(plan.config)):
        yield cost.text
    for why in dict.fromkeys(one.why for one in found if one.seconds is None):
        names = ", ".join(one.stage for one in found if one.seconds is None and one.why == why)
        yield f"no figure for {names}: {why}"
    if known:
        yield assumed_line(Workspace.read_only(plan.config.workspace), gpu)


def assumed_line(workspace: Workspace, gpu: str | None) -> str:
    """The assumptions in a line."""
    hardware, likely = hardware_of(workspace, 1, gpu), CASES[1]
    figures = hardware.gpu
    device = hardware.name
    if figures is not None:
        rate = likely.decode * figures.bandwidth / 4e9
        device += f" ({figures.flops / 1e12:.0f} Tflop/s, {likely.utilisation:.0%} of it used; "
        device += f"{rate:,.0f} sampled tokens/s of 4B on a server)"
    return (
        f"assumed: {device}; answers of {likely.response:.0%} and prompts of {PROMPT_SHARE:.0%} of "
        f"their limits; {CITATION_CALLS} citation and {INSTANCE_CALLS} instance questions an "
        f"answer, {CALL_PROMPT} + {CALL_REPLY} tokens each. --gpu names another GPU."
    )


def _span(values: Sequence[float] | None, write: Callable[[float], str]) -> str:
    """``2 h (1 h to 5 h)``."""
    fast, likely, slow = map(write, values or ())
    return likely if fast == slow else f"{likely} ({fast} to {slow})"


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:,.0f} M" if tokens else "-"
