"""One schedule: people run a plan, everything goes wrong for a while, then nothing does any more.

The plan is a run of its own, a night of two runs, or a sweep of two trials, as the seed has it.

In: a seed. Out: a :class:`Summary`, or a :class:`~tests.simulation.world.Violation` with what must
be typed to see it again. People start the same command again when it has ended without being done,
or was killed; a second person may run it, too; they press Ctrl-C now and then.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flows.running.calls import CodeSnapshot
from flows.sweeping.admission import Admission, find_canary
from flows.sweeping.budget import Budget, UsageReader
from infra.disk.manager import DiskManager
from infra.jobs.dispatch import Router
from infra.orchestrator.members import Member, MemberSource
from infra.orchestrator.orchestrator import Orchestrator
from infra.store.layout import sweep_call
from infra.store.orchestrators import take_up
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig, PublishConfig, RecipeConfig, SftConfig
from refiner_core.contract.errors import ConfigurationError, NoSpaceError
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import PlannedStage
from sweeps.forecast import SweepForecast
from sweeps.planning import plan_sweep
from sweeps.values import Limits, SweepFile, SweepPlan
from tests.simulation.disk import GIB, SimDisk
from tests.simulation.files import simulated_machine
from tests.simulation.invariants import Watch
from tests.simulation.slurm import Cluster, SimJob, SimSlurm
from tests.simulation.weather import draw_weather
from tests.simulation.worker import Shape, Worker
from tests.simulation.world import Process, Stalls, Violation, World
from tests.support.plans import SOURCES, run_record, small_config

REPLAY = "python -m tests.prove.simulation --seed {seed} --verbose"
CALM_AFTER_S = 3 * 3600.0
#: Virtual time that a campaign may need after the faults have stopped, and calls in that time.
PATIENCE_S = 24 * 3600.0
CALLS_AFTER = 12
#: Saved by every trainer here whose checkpoints are published.
PUBLISHED_STEP = 2
POLL_S = 120.0
HOSTS = ("login1", "login2")
#: Points near which a kill is most instructive.
_NEAR = ("sbatch", "after sbatch", "rename 0", "after rename 0", "link outcome", "link started")


@dataclass(frozen=True)
class Summary:
    """What a schedule was like."""

    seed: int
    form: str
    virtual_s: float
    attempts: int
    calls: int
    setbacks: int
    killed: int


SEEDS = (1, 2)
FORMS = ("run", "night", "sweep")


def base_config() -> RecipeConfig:
    """What all trials have in common."""
    config = replace(
        small_config("data", "sft", "publish", poll_s=POLL_S, heartbeat_timeout_s=500.0),
        disk=DiskConfig(wait_min=120.0, watch_s=60.0),
    )
    return replace(
        config,
        sft=replace(SftConfig(), keep=2, save_freq=1),
        publish=PublishConfig(which="listed", steps=(PUBLISHED_STEP,)),
        dispatch=replace(config.dispatch, hung_after_s=2000.0, backoff_s=60.0, grace_s=120.0),
    )


def without_publishing(plan: Plan) -> Plan:
    """``data`` and ``sft``; the checkpoint of step 2 of the first trial is exported while training
    goes on."""
    kinds = (
        ("data", "fetch", "sft", "export") if plan.config.seed == 1 else ("data", "fetch", "sft")
    )
    return replace(plan, stages=tuple(s for s in plan.stages if s.kind in kinds))


def trial_plans() -> dict[int, Plan]:
    """Seed -> the plan of its trial; they share ``data``."""
    plans = {s: make_plan(replace(base_config(), seed=s), SOURCES) for s in SEEDS}
    return {seed: without_publishing(plan) for seed, plan in plans.items()}


def whole_plan() -> Plan:
    """The stages of all trials as one plan: ``sft-1``, ``sft-2``."""
    stages: dict[str, PlannedStage] = {}
    for seed, plan in trial_plans().items():
        for stage in plan.stages:
            renamed = _of_trial(stage, seed)
            stages[renamed.name] = renamed
    return Plan("trials", base_config(), tuple(stages.values()))


def sweep_plan() -> SweepPlan:
    """The same trials as a sweep."""
    sweep = SweepFile(name="trials", recipe="tiny", factors={}, seeds=SEEDS, limits=Limits())
    plan = plan_sweep(sweep, base_config(), lambda _: SOURCES)
    trials = (replace(t, plan=without_publishing(t.plan)) for t in plan.trials)
    return replace(plan, trials=tuple(trials))


def _of_trial(stage: PlannedStage, seed: int) -> PlannedStage:
    def name_of(name: str) -> str:
        return name if name in ("data", "fetch") else f"{name}-{seed}"

    inputs = {role: name_of(name) for role, name in stage.inputs.items()}
    after = tuple(name_of(n) for n in stage.after)
    return replace(stage, name=name_of(stage.name), inputs=inputs, after=after)


class Schedule:
    """Everything of one seed."""

    def __init__(
        self, seed: int, root: Path, print_line: Callable[[str], None] | None = None
    ) -> None:
        self.world = world = World(seed, print_line)
        self.weather = draw_weather(world.random)
        self.plan = whole_plan()
        self.form = world.random.choice(FORMS)
        self.root = root
        workspace = Workspace.open(root)
        self.shapes = {s.id: self._shape(s) for s in self.plan.stages}
        self.watch = Watch(world, workspace.layout, self.shapes, self.plan.config.dispatch.retries)
        self.disk = SimDisk(world, workspace.layout, limit=16 * GIB, checkpoint=2 * GIB)
        self.disk.small_too = self.weather.small_files_too
        worker = Worker(world, workspace, self.disk, self.shapes)
        self.cluster = Cluster(world, self.weather, self.watch, worker)
        self.watch.is_slurm_down = lambda: self.cluster.down
        self.calls = 0
        self.killed = 0
        self._running: dict[int, Process] = {}
        world.stalls = Stalls(long=self.weather.long_stalls)
        world.after_event = self.watch.check
        world.on_stall = self._stalled

    def _stalled(self, process: Process, seconds: float) -> None:
        """A job that stands still for so long is rightly taken for hung."""
        if (
            isinstance(process.job, SimJob)
            and seconds > self.plan.config.dispatch.heartbeat_timeout_s
        ):
            self.watch.setback(process.job.request.stage_id, "stalled")

    def _shape(self, stage: PlannedStage) -> Shape:
        rng = self.world.random
        if stage.kind == "export":
            source = self.plan.by_name[stage.inputs["policy"]].id
            return Shape(0, rng.choice([40.0, 400.0]), 99, 1.0, (source, PUBLISHED_STEP))
        if stage.kind != "sft":
            return Shape(rng.randint(1, 3), 40.0, 99, 1.0)
        published = any(s.at_step and stage.name in s.inputs.values() for s in self.plan.stages)
        every = rng.randint(1, 2 if published else 3)
        return Shape(rng.randint(4, 9), rng.choice([60.0, 200.0]), every, 15.0)

    # ------------------------------------------------------------ the whole of it

    def run(self) -> Summary:
        """Faults, then calm, to the end.

        Raises
        ------
        Violation
            Something that must never happen did.
        """
        with simulated_machine(self.world, self.disk, self.watch, self.cluster):
            self._call(HOSTS[0], 0.0)
            if self.weather.second_call:
                self._call(
                    HOSTS[self.world.random.randint(0, 1)], 1500 * self.world.random.random()
                )
            self._fill_disk()
            if not self.world.run(CALM_AFTER_S, self._over):
                self._calm()
            self.world.tell("all is done")
            self.watch.check_end(self.plan.stages)
        return Summary(
            seed=self.world.seed,
            form=self.form,
            virtual_s=self.world.now,
            attempts=sum(s.newest for s in self.watch.stages.values()),
            calls=self.calls,
            setbacks=sum(s.setbacks.total() for s in self.watch.stages.values()),
            killed=self.killed,
        )

    def _calm(self) -> None:
        self.world.tell("the faults stop")
        self.cluster.clear_up()
        self.world.stalls = Stalls(short=0.0)
        self.disk.others, before = 0, self.calls
        for process in self.world.processes.values():
            process.dies_at = process.dies_near = None
        if not self._running:
            self._call(HOSTS[0], 0.0)
        self.world.run(
            self.world.now + PATIENCE_S, lambda: self._over() or self.calls - before > CALLS_AFTER
        )
        if self.calls - before > CALLS_AFTER:
            raise Violation(f"it took {self.calls - before} calls after the faults had stopped")

    def _over(self) -> bool:
        return all(self.watch.stages[s.id].result for s in self.plan.stages)

    # ------------------------------------------------------------ people

    def _call(self, host: str, delay_s: float) -> None:
        """Start the command."""
        self.calls += 1
        name = f"call{self.calls}"
        process = self.world.spawn(name, host, lambda: self._orchestrate(), delay_s)
        self._running[process.pid] = process
        rng = self.world.random
        if self.world.chance(self.weather.orchestrator_dies):
            if rng.random() < 0.5:
                process.dies_near = (rng.choice(_NEAR), rng.randint(1, 4))
            else:
                process.dies_at = rng.randint(1, 1500)
        process.at_end.append(lambda: self._call_ended(process))

    def _call_ended(self, process: Process) -> None:
        self.killed += not process.finished
        del self._running[process.pid]
        if not self._over() and not self._running:
            again_s = 60.0 if self.weather.clear else self.world.random.choice([5.0, 300.0, 2000.0])
            self._call(self.world.random.choice(HOSTS), again_s)

    def _orchestrate(self) -> None:
        """What `refiner run` does, as a process."""
        world, process = self.world, self.world.current
        world.tell(f"begins on {process.host}")
        try:
            workspace = Workspace(self.root)
            slurm = SimSlurm(self.cluster, workspace)
            source = self._source(workspace)
            campaign = Orchestrator(
                source,
                workspace,
                Router({"slurm": slurm}, lambda _: "slurm"),
                self.plan.config,
                disk_manager=DiskManager(
                    workspace, self.plan.config.disk, clock=lambda: world.now, sleep=world.sleep
                ),
                clock=lambda: world.now,
            )
            campaign.begin()
            self.watch.call_begins(process)  # it has looked now; before that it may have stalled
            stop_at = None
            if world.chance(self.weather.interrupts):
                stop_at = world.now + world.random.random() * 3000
            while not campaign.step():
                world.sleep(campaign.wake_after())
                if stop_at is not None and world.now >= stop_at:
                    world.tell("Ctrl-C")
                    self._interrupted()
                    campaign.request_stop("Ctrl-C")
                    stop_at = None
        except (NoSpaceError, ConfigurationError) as error:
            process.finished = True
            world.tell(f"refuses to begin: {error}")
            return
        process.finished = True
        states = ", ".join(f"{n} {v.state}" for n, v in campaign.views().items())
        world.tell(f"ends: {states}")

    def _source(self, workspace: Workspace) -> MemberSource:
        """What the command is called on."""

        def clock() -> float:
            return self.world.now

        if self.form == "sweep":
            return self._admission(workspace, clock)
        plans = {"": self.plan}
        if self.form == "night":
            plans = {f"seed{seed}": plan for seed, plan in trial_plans().items()}
        return MemberSource(
            [
                Member(plan, run_record(workspace, plan), workspace, name, clock)
                for name, plan in plans.items()
            ]
        )

    def _admission(self, workspace: Workspace, clock: Callable[[], float]) -> Admission:
        """Take the sweep up, or over where no other call works on it."""
        plan, alone = sweep_plan(), len(self._running) == 1
        take_up(workspace, sweep_call(plan.sweep.name), regardless=alone)
        nothing = SweepForecast((), (), 0.0, 0.0, 0, 0.0, "")
        return Admission(
            plan=plan,
            workspace=workspace,
            take_over=alone,
            pin=lambda _: CodeSnapshot("", ("refiner", "sweep"), {"code": ""}),
            budget=Budget(plan.sweep.limits, UsageReader(workspace)),
            canary=find_canary(plan, workspace),
            forecast=nothing,
            corrected=lambda _: nothing,
            passed=lambda _: (),
            poll_s=POLL_S,
            clock=clock,
        )

    def _interrupted(self) -> None:
        for stage in self.plan.stages:
            self.watch.setback(stage.id, "Ctrl-C")

    # ------------------------------------------------------------ the disk

    def _fill_disk(self) -> None:
        """Other people take room, and give it back."""
        if not self.weather.disk_fills:
            return
        rng = self.world.random

        def change() -> None:
            if self.weather.clear:
                return
            full = rng.random() < self.weather.disk_fills
            self.disk.others = rng.choice([self.disk.limit, 10 * GIB]) if full else 0
            self.world.tell(f"others use {self.disk.others / GIB:.0f} GiB")
            if full:
                for stage in self.plan.stages:
                    self.watch.setback(stage.id, "disk")
            self.world.at(rng.expovariate(1 / 1500.0), change)

        self.world.at(rng.expovariate(1 / 1000.0), change)


def run_schedule(seed: int, print_line: Callable[[str], None] | None = None) -> Summary:
    """Run one schedule.

    Raises
    ------
    Violation
        Says what happened, and how to see it again.
    """
    with _scratch() as root:
        try:
            return Schedule(seed, root, print_line).run()
        except Exception as error:
            raise Violation(
                f"seed {seed}: {type(error).__name__}: {error}\n"
                f"  replay it with: {REPLAY.format(seed=seed)}"
            ) from error


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder in memory, where there is one."""
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="refiner-simulation-", dir=where))
    try:
        yield folder / "workspace"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
