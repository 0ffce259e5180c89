"""GPUs, memory and programs that a plan needs, before anything runs.

In: a plan, the model's files; this machine's GPUs, or those of the cluster's nodes as `sinfo` lists
them. Out: a :class:`GpuUse` (who sits where, how many are used at the same time, whether they are
there; a run refuses what this machine never has); estimates of memory by stage, which is unknown
before a job runs; notes; and refusals for missing programs. Nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.checking.attacks import attack_notes
from flows.checking.models import judge_notes, layer_notes, model_files, position_notes
from infra.disk.forecast import ModelSize, model_size
from infra.host.gpus import gpus_here, too_many_gpus
from infra.store.workspace import Workspace
from refiner_core.contract.checks.training import training_notes
from refiner_core.contract.config import RecipeConfig, RolloutServerConfig, ServeConfig
from refiner_core.contract.errors import SystemOutage, UnsupportedError
from refiner_core.contract.placement import (
    STAGES,
    MemoryNeed,
    ModelShape,
    all_gpus,
    judge_numbers,
    placement_of,
    sampling_servers,
    section_of,
    stages_at_once,
    starts_servers,
    training_memory,
)
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import picked
from refiner_core.contract.services import asks_judge, engine_of, is_service, serves
from refiner_core.report.printing import size

#: What sits on a GPU, by the first letter of its cell.
_LEGEND = {
    "r": "rank of training",
    "s": "rollout server",
    "j": "judge",
    "p": "policy",
    "t": "your trainer",
    ".": "idle",
}


@dataclass(frozen=True)
class GpuJob:
    """GPUs of one job: by node, a cell for each (``r0``: rank 0; see :data:`_LEGEND`)."""

    stage: str
    gpus_per_node: int
    layout: tuple[tuple[str, ...], ...]

    @property
    def gpus(self) -> int:
        """GPUs of all its nodes."""
        return sum(map(len, self.layout))


@dataclass(frozen=True)
class GpuUse:
    """GPUs of a plan.

    Attributes
    ----------
    executor
        ``local`` (this machine) or ``slurm``.
    jobs
        Jobs that must run at the same time, and need the most GPUs: a stage with its services.
    most
        The most GPUs that are used at once, if they are there: by these and by stages beside them.
    nodes
        GPUs of each node that there is; None if that is unknown.
    lacks
        Why the jobs can never run at the same time; empty if they can, or that is unknown.
    fix
        What to do then.
    """

    executor: str
    jobs: tuple[GpuJob, ...]
    most: int
    nodes: tuple[int, ...] | None
    lacks: str = ""
    fix: str = ""

    @property
    def at_once(self) -> int:
        """GPUs that are needed at the same time."""
        return sum(job.gpus for job in self.jobs)


def gpu_use(plan: Plan) -> GpuUse | None:
    """GPUs of a plan; None if no stage has any."""
    together = stages_at_once(plan.stages)
    jobs = tuple(_job(plan, stage) for stage in together)
    if not jobs:
        return None
    dispatch = plan.config.dispatch
    local = dispatch.executor == "local"
    most = most_at_once(plan.stages, dispatch.max_parallel if local else len(plan.stages))
    if not local:
        return _on_cluster(plan, jobs, most)
    try:
        there = len(gpus_here())
    except SystemOutage as error:
        return GpuUse("local", jobs, most, None, error.what, error.fix)
    refusal = too_many_gpus({job.stage: job.gpus for job in jobs}, there)
    why = (refusal.what, refusal.fix) if refusal else ()
    return GpuUse("local", jobs, most, (there,), *why)


def _on_cluster(plan: Plan, jobs: tuple[GpuJob, ...], most: int) -> GpuUse:
    from infra.slurm.profiles import gpus_of_nodes, load_profile

    profile = load_profile(plan.config.dispatch.profile)
    nodes = gpus_of_nodes(profile)
    lacks = "" if nodes is None or fits(jobs, nodes) else never_together(jobs, nodes)
    fix = ""
    if lacks:
        fix = f"name a larger partition in profile {profile.name!r}, or ask for fewer GPUs: "
        fix += f"{jobs[0].stage}.resources.gpus"
        fix += ", judge.resources.gpus" if len(jobs) > 1 else ""
    return GpuUse("slurm", jobs, most, nodes, lacks, fix)


def fits(jobs: Iterable[GpuJob], nodes: Sequence[int]) -> bool:
    """Tell whether empty nodes with these GPUs take all jobs at the same time."""
    free = sorted(nodes)
    for count in sorted((len(node) for job in jobs for node in job.layout), reverse=True):
        place = next((i for i, gpus in enumerate(free) if gpus >= count), None)
        if place is None:
            return False
        free[place] -= count
        free.sort()
    return True


def never_together(jobs: Sequence[GpuJob], nodes: Sequence[int]) -> str:
    """The sentence for jobs that do not fit on the nodes together."""
    there = ", ".join(f"{nodes.count(n)} of {n}" for n in sorted(set(nodes), reverse=True))
    asked = " and ".join(f"{job.stage} ({_shape(job)})" for job in jobs)
    return f"{asked} can never run at the same time: the nodes with GPUs are {there or 'none'}"


def _shape(job: GpuJob) -> str:
    nodes = f"{len(job.layout)} x " if len(job.layout) > 1 else ""
    return f"{nodes}{job.gpus_per_node}"


# ---------------------------------------------------------------- at the same time


def most_at_once(stages: Sequence[PlannedStage], parallel: int) -> int:
    """The most GPUs of stages, at most ``parallel`` of them, that may run at the same time: none
    waits for another one. A service counts once."""
    known = {stage.name: stage for stage in stages}
    before: dict[str, frozenset[str]] = {}
    for stage in stages:  # inputs first
        above = {n for n in (*stage.inputs.values(), *stage.after) if n in known}
        above -= {stage.inputs[role] for role in stage.at_step}  # read while that stage runs
        before[stage.name] = frozenset(above.union(*(before.get(n, frozenset()) for n in above)))
    related = {name: set(above) for name, above in before.items()}
    for name, others in before.items():
        for other in others:
            related[other].add(name)
    asking = [s for s in stages if s.resources.gpus and not is_service(s.id)]
    asking.sort(key=all_gpus, reverse=True)
    most, seen = 0, set[str]()
    for first in asking:  # with the largest ones that wait for none of those taken before
        if first.name in seen:
            continue
        taken: list[PlannedStage] = []
        waiting: set[str] = set()
        for stage in (first, *asking):
            if len(taken) < parallel and stage.name not in waiting:
                taken.append(stage)
                waiting |= related[stage.name] | {stage.name}
        seen |= {s.name for s in taken}
        names = {n for s in taken for n in s.after if n in known and is_service(known[n].id)}
        most = max(most, sum(map(all_gpus, [*taken, *(known[n] for n in names)])))
    return most


# ---------------------------------------------------------------- who sits where


def _job(plan: Plan, stage: PlannedStage) -> GpuJob:
    """The GPUs of a stage's job, each with a cell."""
    count, nodes = stage.resources.gpus, stage.resources.nodes
    config, kind = plan.config_of(stage), stage.kind
    if kind in STAGES:
        placed = placement_of(config, kind)
        layout = []
        for node in range(nodes):
            cells: dict[int, list[str]] = {}
            for local, gpu in enumerate(placed.trainer_gpus):
                cells.setdefault(gpu, []).append(f"r{node * placed.nproc_per_node + local}")
            for number, server in enumerate(placed.server_gpus, node * len(placed.server_gpus)):
                for gpu in server:
                    cells.setdefault(gpu, []).append(f"s{number}")
            cells |= {gpu: ["j"] for gpu in placed.judge_gpus if node == 0}
            layout.append(_cells(cells, count))
        return GpuJob(stage.name, count, tuple(layout))
    cells = {}
    if starts_servers(config, kind):
        servers = enumerate(sampling_servers(config, kind))
        cells = {gpu: [f"s{number}"] for number, one in servers for gpu in one}
    elif kind in ("serve", "command"):
        cells = {gpu: ["j" if kind == "serve" else "t"] for gpu in range(count)}
    else:
        cells = {0: ["p"]}
    cells |= {gpu: ["j"] for gpu in judge_numbers(config, kind)} if kind != "serve" else {}
    return GpuJob(stage.name, count, (_cells(cells, count),) * nodes)


def _cells(cells: Mapping[int, Sequence[str]], count: int) -> tuple[str, ...]:
    return tuple("+".join(cells.get(gpu, ["."])) for gpu in range(count))


# ---------------------------------------------------------------- shown


def gpu_lines(plan: Plan) -> list[str]:
    """A plan's GPUs for people: the totals, a line per node, and what does not fit."""
    use = gpu_use(plan)
    if use is None:
        return []
    parts = " + ".join(f"{job.stage} {_shape(job)}" for job in use.jobs)
    jobs = f"{len(use.jobs)} job{'s' * (len(use.jobs) > 1)}: {parts} GPUs"
    more = f"; up to {use.most} with stages that may run beside" * (use.most > use.at_once)
    lines = [f"GPUs: {use.at_once} at the same time ({jobs}){more}"]
    cells = [
        (job, number, "".join(f"{c:<4}" for c in node))
        for job in use.jobs
        for number, node in enumerate(job.layout, start=1)
    ]
    if use.executor == "local":
        known = f" ({sum(use.nodes)} GPUs)" if use.nodes is not None else ""
        there = f"this machine{known}"
        lines.append(
            f"  {there}  " + " ".join(f"| {j.stage}: {text.rstrip()}" for j, _, text in cells)
        )
    else:
        names = [f"{job.stage}, node {number}" for job, number, _ in cells]
        width = max(map(len, names))
        lines += [
            f"  {n:<{width}} | {t.rstrip()}" for n, (_, _, t) in zip(names, cells, strict=True)
        ]
    used = {
        part[0] for job in use.jobs for node in job.layout for c in node for part in c.split("+")
    }
    lines.append("  " + ", ".join(f"{key} {word}" for key, word in _LEGEND.items() if key in used))
    if use.lacks:
        lines.append(f"Impossible here: {use.lacks}. To fix it: {use.fix}.")
    return lines


def gpus_json(plan: Plan) -> dict[str, Any] | None:
    """A plan's GPUs as JSON; None if no stage has any."""
    use = gpu_use(plan)
    if use is None:
        return None
    return {
        **picked(use, "executor", "at_once", "most", "lacks", "fix"),
        "nodes": None if use.nodes is None else list(use.nodes),
        "jobs": [
            {**picked(job, "stage", "gpus", "gpus_per_node"), "layout": [*map(list, job.layout)]}
            for job in use.jobs
        ],
    }


# ---------------------------------------------------------------- memory and programs


_GIB = 2**30


def memory_needs(plan: Plan) -> list[MemoryNeed]:
    """Estimates for the training stages of a plan; none if the model's size is unknown."""
    found = model_shape(plan.config)
    if found is None:
        return []
    kinds = {stage.kind for stage in plan.stages}
    return [training_memory(plan.config, stage, found) for stage in STAGES if stage in kinds]


def memory_json(plan: Plan) -> list[dict[str, Any]]:
    """The estimates as JSON."""
    return [
        {
            **picked(need, "stage", "processes", "gpu_bytes", "host_bytes"),
            "asked_bytes": _asked(plan.config, need),
            **picked(need, "on_gpu", "on_host", "shared"),
        }
        for need in memory_needs(plan)
    ]


def planning_notes(plan: Plan) -> list[str]:
    """Notes on how a plan trains; they refuse nothing."""
    config = plan.config
    notes = [
        *(*training_notes(config), *layer_notes(config)),
        *(*judge_notes(config), *position_notes(config), *attack_notes(config)),
    ]
    if config.environment.name:
        from refiner_core.environments.registry import environment_notes

        notes += environment_notes(config)
    for need in memory_needs(plan):
        asked = _asked(plan.config, need)
        if need.host_bytes > asked:
            parts = {name: one * need.processes for name, one in need.on_host.items()}
            largest = sorted({**parts, **need.shared}.items(), key=lambda part: -part[1])[:3]
            said = ", ".join(f"{name} {size(one)}" for name, one in largest)
            notes.append(
                f"{need.stage} will take about {size(need.host_bytes)} of host memory, and asks "
                f"for {size(asked)} ({need.stage}.resources.memory_gb): {said}."
            )
    return notes


def _asked(config: RecipeConfig, need: MemoryNeed) -> int:
    return section_of(config, need.stage).resources.memory_gb * _GIB


def model_shape(config: RecipeConfig) -> ModelShape | None:
    """Sizes of a recipe's model, by its files or its name; None if unknown."""
    files = model_files(config.model.name_or_path, config.model.revision)
    model: ModelSize = model_size(files.folder if files else None, config.model.name_or_path)
    if model.parameters is None:
        return None
    text = files.text_config if files else {}

    def number(name: str) -> int:
        value = text.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    width = number("head_dim") or (hidden // heads if heads else 0)
    return ModelShape(
        parameters=model.parameters,
        hidden=hidden,
        inner=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        pairs=width * (number("num_key_value_heads") or heads),
        words=number("vocab_size"),
    )


def check_server_programs(plan: Plan) -> None:
    """Refuse a plan whose servers cannot be started on this machine.

    Raises
    ------
    UnsupportedError
        An interpreter, a container's program or the engine's command is missing.
    """
    if plan.config.dispatch.executor != "local":
        return  # compute nodes cannot be checked from here
    workspace = Workspace.read_only(plan.config.workspace)
    kinds = {s.kind for s in plan.stages if workspace.read_result(s.id) is None}
    for section, field, engine in _programs(plan.config, kinds):
        from infra.services.process import ServerProgram

        program = ServerProgram(section, field, engine)
        if program.lacking:
            setting = f"{program.field}.python=/PATH/bin/python"
            raise UnsupportedError(
                f"{program.field} is to serve models with {program.engine}, and {program.lacking}.",
                expected=f"an environment with {program.engine}: `{program.field}.python`, `setup` "
                "or `container`",
                fix=f"make one (`python3 -m venv DIR && DIR/bin/pip install {program.engine}`) and "
                f"set {setting}; `refiner doctor RECIPE` tries it",
            )


def _programs(
    config: RecipeConfig, kinds: Collection[str]
) -> Iterator[tuple[RolloutServerConfig | ServeConfig, str, str]]:
    """The section, its name and the engine of each server that stages of these kinds start."""
    if any(starts_servers(config, kind) for kind in kinds):
        yield config.grpo.rollout_server, "grpo.rollout_server", "vllm"
    engine = engine_of(config.judge)
    asked = any(asks_judge(config, kind) for kind in kinds)
    if asked and serves(config.judge) and engine in ("vllm", "transformers"):
        yield config.judge.serve, "judge.serve", engine
