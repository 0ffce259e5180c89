"""A stage waits for GPUs of this machine, with its judge, and says for which."""

from dataclasses import replace

from infra.host.gpus import FreeGpus
from infra.orchestrator.reconcile import (
    Action,
    AttemptStatus,
    CallRules,
    Fail,
    Launch,
    Observation,
    Serve,
    Wait,
)
from refiner_core.contract.config import JudgeConfig, Resources
from refiner_core.contract.plan import make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import StageRecord
from tests.support.plans import SOURCES, small_config
from tests.unit.test_reconcile import attempt, reconcile, record

CONFIG = small_config("data", "grpo", "evaluate")
JUDGED = replace(
    CONFIG,
    grpo=replace(CONFIG.grpo, resources=Resources(gpus=6)),
    evaluate=replace(CONFIG.evaluate, resources=Resources(gpus=1)),
    judge=JudgeConfig(kind="openai", model="m", serve_command="serve", resources=Resources(gpus=2)),
)
PLAN = make_plan(JUDGED, SOURCES)
DATA, JUDGE, GRPO, BASE = (PLAN.by_name[n] for n in ("data", "judge", "grpo", "evaluate-base"))
DONE = [(DATA, record(DATA, attempt(1), done=True)), (BASE, record(BASE, attempt(1), done=True))]
SERVING = [*DONE, (JUDGE, record(JUDGE, attempt(1)))]


def decide(
    room: FreeGpus,
    records: list[tuple[PlannedStage, StageRecord]] = DONE,
    *,
    ready: bool = False,
    local: bool = True,
) -> dict[str, Action]:
    observed = Observation(
        {JUDGE.id: AttemptStatus(1, "live")},
        ready=frozenset({(JUDGE.id, 1)} if ready else ()),
        gpus=room,
    )
    rules = CallRules(runs_local=lambda _: local)
    actions = reconcile(PLAN, {s.id: r for s, r in records}, observed, rules)
    return {a.stage.name: a for a in actions}


def test_a_judge_starts_only_with_its_trainers_gpus_and_these_are_kept() -> None:
    """Two runs whose judges took two GPUs each would leave four for two trainers of six."""
    enough = decide(FreeGpus(8, 8))
    assert enough["judge"] == Launch(JUDGE, 0)
    assert enough["grpo"] == Wait(GRPO, "waits until judge answers", gpus=6)
    short = decide(FreeGpus(8, 7, "3 used by sft-1 of ann"))
    assert isinstance(short["judge"], Wait)
    assert short["grpo"] == Wait(GRPO, "waits for 8 GPUs: 7 of 8 free, 3 used by sft-1 of ann")


def test_a_judge_that_serves_has_its_gpus_already() -> None:
    starts = decide(FreeGpus(8, 6, "0-1 used by serve-1 of me"), SERVING, ready=True)
    assert starts["grpo"] == Launch(GRPO, 0)
    waits = decide(FreeGpus(8, 5, "…"), SERVING, ready=True)
    assert isinstance(waits["grpo"], Wait)
    assert isinstance(waits["judge"], Serve)
    assert not waits["judge"].wanted, "its GPUs must not block another run for ever"


def test_stages_of_one_call_share_what_is_free() -> None:
    actions = decide(FreeGpus(8, 8), [DONE[0]])
    assert [n for n, a in actions.items() if isinstance(a, Wait) and a.gpus] == ["grpo"]
    assert actions["evaluate-base"] == Wait(BASE, "waits for 1 GPU: 0 of 8 free")


def test_a_stage_that_never_fits_fails_at_once_and_says_what_to_do() -> None:
    action = decide(FreeGpus(4, 4))["grpo"]
    assert isinstance(action, Fail)
    assert action.outcome.exit_code == 8
    assert "8 GPUs of this machine at the same time (6 for grpo and 2 for judge)" in str(
        action.outcome.message
    )


def test_a_clusters_jobs_do_not_wait_for_this_machines_gpus() -> None:
    assert decide(FreeGpus(0, 0), SERVING, ready=True, local=False)["grpo"] == Launch(GRPO, 0)
