"""The next action per stage follows from records and observations alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from infra.jobs.dispatcher import Liveness
from infra.jobs.failures import CLASSES, outcome_of
from infra.orchestrator.reconcile import (
    Action,
    AttemptStatus,
    Block,
    CallRules,
    CloseAttempt,
    Fail,
    Finish,
    Idle,
    Launch,
    Observation,
    Release,
    Serve,
    Wait,
    paused_after,
    stages_by_id,
    union_of,
)
from infra.orchestrator.reconcile import reconcile as reconcile_union
from refiner_core.contract.config import JudgeConfig, RetryConfig
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import Attempt, FailureClass, StageRecord, StageResult, StageSpec
from tests.support.plans import SOURCES, small_config, small_plan

ME, OTHER = "here:1:1.00", "here:2:1.00"
PLAN = small_plan("data", "sft", "evaluate")
DATA, SFT = PLAN.by_name["data"], PLAN.by_name["sft"]
POLICY = CallRules(max_parallel=2)
RETRIES = RetryConfig()
RESUMABLE = [c for c, rule in CLASSES.items() if rule.decision == "resume"]
FINAL = [c for c, rule in CLASSES.items() if rule.decision == "stop"]


def spec(stage: PlannedStage) -> StageSpec:
    return StageSpec(
        *(1, stage.name, stage.kind, stage.fingerprint, stage.model, KINDS[stage.kind].version),
        *(stage.identity, stage.sources, stage.input_fingerprints),
    )


def attempt(
    number: int, outcome: FailureClass | None = None, owner: str = ME, resumed: int | None = None
) -> Attempt:
    ended = None if outcome is None else outcome_of(outcome)
    return Attempt(
        number, f"c{number}", "local", owner, "t", outcome=ended, resumed_from_step=resumed
    )


def record(stage: PlannedStage, *attempts: Attempt, done: bool = False) -> StageRecord:
    made = StageResult(1, len(attempts), "output", (), {}, {}, 1.0, "t") if done else None
    return StageRecord(spec(stage), attempts, made)


def reconcile(
    plan: Plan, records: Mapping[str, StageRecord], observed: Observation, policy: CallRules
) -> tuple[Action, ...]:
    """What is decided on a plan alone, in its order, of its own stages."""
    actions = reconcile_union(*union_of([stages_by_id(plan)]), records, observed, policy)
    return tuple(replace(actions[stage.id], stage=stage) for stage in plan.stages)


def decide(
    records: list[tuple[PlannedStage, StageRecord]],
    seen: Mapping[str, AttemptStatus] | None = None,
    policy: CallRules = POLICY,
    short: Mapping[str, str] | None = None,
) -> dict[str, Action]:
    observed = Observation(seen or {}, short=short or {})
    actions = reconcile(PLAN, {s.id: r for s, r in records}, observed, policy)
    return {a.stage.name: a for a in actions}


DATA_DONE = (DATA, record(DATA, attempt(1, "none"), done=True))


# ---------------------------------------------------------------- beginning


def test_inputs_done_launch_in_the_plans_order_up_to_the_limit() -> None:
    actions = decide([DATA_DONE])
    assert isinstance(actions["data"], Finish)
    assert isinstance(actions["sft"], Launch)
    assert isinstance(actions["evaluate-base"], Launch)
    assert isinstance(actions["evaluate-sft"], Wait)
    one = decide([DATA_DONE], policy=replace(POLICY, max_parallel=1))
    assert isinstance(one["evaluate-base"], Wait)
    assert "dispatch.max_parallel" in one["evaluate-base"].reason


@pytest.mark.parametrize(("local", "launched"), [(True, False), (False, True)])
def test_only_local_jobs_take_local_slots(local: bool, launched: bool) -> None:
    actions = decide(
        [DATA_DONE, (SFT, record(SFT, attempt(1)))],
        {SFT.id: AttemptStatus(1, "live", local)},
        replace(POLICY, max_parallel=1),
    )
    assert isinstance(actions["evaluate-base"], Launch) is launched


def test_two_light_stages_run_beside_the_local_slots() -> None:
    light = [replace(DATA, name=n, kind="fetch", fingerprint=n * 12) for n in ("a", "b", "c")]
    plan = Plan("light", PLAN.config, (DATA, *light))
    actions = reconcile(plan, {}, Observation(), CallRules(max_parallel=1))
    assert [type(a) for a in actions] == [Launch, Launch, Launch, Wait]


# ---------------------------------------------------------------- an attempt without an outcome

OPEN, NO_ROOM = attempt(1), replace(attempt(1), has_room=False)
GONE = outcome_of("killed", "gone")
QUEUES, HELD = "PENDING (Resources)", "PENDING (held)"


@pytest.mark.parametrize(
    ("tried", "seen", "expected"),
    [
        (OPEN, AttemptStatus(1, "live"), Wait(DATA, "runs", 1)),
        (attempt(1, owner=OTHER), AttemptStatus(1, "live"), Wait(DATA, "runs", 1)),
        (
            OPEN,
            AttemptStatus(1, "live", running=False, note=QUEUES),
            Wait(DATA, QUEUES, 1, queued=True),
        ),
        (OPEN, AttemptStatus(1, "dead", silent_end=GONE), CloseAttempt(DATA, 1, GONE)),
    ],
)
@pytest.mark.parametrize("stopping", [False, True])
def test_an_open_attempt_waits_or_is_closed(
    tried: Attempt, seen: AttemptStatus, expected: Action, stopping: bool
) -> None:
    policy = replace(POLICY, stopping=stopping)
    assert decide([(DATA, record(DATA, tried))], {DATA.id: seen}, policy)["data"] == expected


def test_a_held_job_is_released_and_a_job_without_room_waits() -> None:
    held = AttemptStatus(1, "live", running=False, note=HELD, held=True)
    assert decide([(DATA, record(DATA, OPEN))], {DATA.id: held})["data"] == Release(DATA, 1, HELD)
    waits = decide([(DATA, record(DATA, NO_ROOM))], {DATA.id: AttemptStatus(1, "live")})["data"]
    assert isinstance(waits, Wait)
    assert (waits.attempt, waits.short) == (1, True)


@pytest.mark.parametrize(
    ("tried", "silent", "failure"),
    [
        (OPEN, None, "hung"),
        (NO_ROOM, "killed", "disk_full"),
        (NO_ROOM, "launch_failure", "disk_full"),
        (NO_ROOM, "preempted", "preempted"),  # the scheduler knows why
    ],
)
def test_the_class_of_a_silent_end(
    tried: Attempt, silent: FailureClass | None, failure: FailureClass
) -> None:
    seen = (
        AttemptStatus(1, "dead", silent_end=outcome_of(silent))
        if silent
        else AttemptStatus(1, "hung")
    )
    action = decide([(DATA, record(DATA, tried))], {DATA.id: seen})["data"]
    assert isinstance(action, CloseAttempt)
    assert action.outcome.failure == failure


@pytest.mark.parametrize(
    "seen", [{}, {DATA.id: AttemptStatus(1, "unknown")}, {DATA.id: AttemptStatus(7, "dead")}]
)
def test_an_attempt_that_was_not_observed_is_never_given_up(
    seen: Mapping[str, AttemptStatus],
) -> None:
    assert isinstance(decide([(DATA, record(DATA, attempt(1)))], seen)["data"], Wait)


def test_an_end_that_cannot_be_recorded_waits_for_room() -> None:
    dead = {DATA.id: AttemptStatus(1, "dead")}
    action = decide([(DATA, record(DATA, attempt(1)))], dead, short={DATA.id: "full"})["data"]
    assert action == Wait(DATA, "full", short=True)


# ---------------------------------------------------------------- after an attempt


def after(*tries: Attempt, policy: CallRules = POLICY, **more: Any) -> Action:
    """The action on `data` after these attempts."""
    return decide([(DATA, record(DATA, *tries))], policy=policy, **more)["data"]


@pytest.mark.parametrize("failure", RESUMABLE)
def test_a_resumable_failure_is_retried_within_its_budget(failure: FailureClass) -> None:
    budget = getattr(RETRIES, failure, RETRIES.killed)
    count = 59 if budget < 0 else budget
    tries = [attempt(n, failure) for n in range(1, count + 1)]
    assert after(*tries) == Launch(DATA, count)
    if budget >= 0:
        last = after(*tries, attempt(budget + 1, failure))
        assert isinstance(last, Fail)
        assert last.state == CLASSES[failure].exhausted


def test_what_counts_against_a_budget() -> None:
    """Failures of the same class since the last progress, in this call."""
    tries = [attempt(n, "killed", resumed=10 * n) for n in range(1, 30)]
    assert after(*tries) == Launch(DATA, 29), "each attempt got further"
    stuck = [attempt(n, "killed", resumed=10) for n in range(30, 33)]
    assert isinstance(after(*tries, *stuck), Fail)
    classes: list[FailureClass] = ["preempted", "killed", "judge_outage", "killed", "preempted"]
    assert after(*(attempt(n, c) for n, c in enumerate(classes, 1))) == Launch(DATA, 5)
    history = replace(POLICY, ended_before={DATA.id: 7})
    assert after(*(attempt(n, "killed", OTHER) for n in range(1, 9)), policy=history) == Launch(
        DATA, 8
    )


def bug(number: int, step: int, signature: str) -> Attempt:
    outcome = replace(outcome_of("bug"), step=step, signature=signature)
    return replace(attempt(number), outcome=outcome)


@pytest.mark.parametrize(
    ("second", "again", "without_limit"),
    [
        (bug(2, 50, "a"), False, False),  # the same bug at the same step
        (replace(bug(2, 60, "a"), resumed_from_step=50), True, True),  # it got further
        (bug(2, 50, "b"), False, True),  # another bug without progress: the budget of 1 is used up
    ],
)
def test_the_same_traceback_twice_stops(second: Attempt, again: bool, without_limit: bool) -> None:
    action = after(bug(1, 50, "a"), second)
    assert isinstance(action, Launch) is again
    policy = replace(POLICY, retries=RetryConfig(bug=-1))
    action = after(bug(1, 50, "a"), second, policy=policy)
    assert action == Launch(DATA, 2) if without_limit else isinstance(action, Fail)


@pytest.mark.parametrize("failure", FINAL)
def test_a_final_failure_stops_and_blocks_the_stages_after_it(failure: FailureClass) -> None:
    actions = decide([(DATA, record(DATA, attempt(1, failure)))])
    assert isinstance(actions["data"], Fail)
    assert actions["data"].state == CLASSES[failure].exhausted
    how = "interrupted" if failure == "cancelled" else "blocked"
    assert actions["sft"] == Block(SFT, "data", how)
    assert actions["evaluate-sft"] == Block(PLAN.by_name["evaluate-sft"], "data", how)


@pytest.mark.parametrize("failure", [*RESUMABLE, *FINAL])
def test_what_ended_before_this_call_is_tried_again(failure: FailureClass) -> None:
    """A user fixes a bug, frees space, waits for the judge, and repeats the command."""
    policy = replace(POLICY, ended_before={DATA.id: 3})
    assert after(*(attempt(n, failure) for n in (1, 2, 3)), policy=policy) == Launch(DATA, 3)


def test_a_full_disk_is_waited_out() -> None:
    full, short = attempt(1, "disk_full"), {DATA.id: "waits for room"}
    assert after(full) == Launch(DATA, 1)
    assert after(full, short=short) == Wait(DATA, "waits for room", short=True)
    stages = frozenset(s.id for s in PLAN.stages)
    for change, failure, code in (
        ({"gave_up": frozenset({DATA.id})}, "disk_full", 5),
        ({"stopping": True}, "interrupted", 6),
        ({"cancelled": stages}, "cancelled", 6),
    ):
        action = after(full, short=short, policy=replace(POLICY, **change))
        assert isinstance(action, Fail)
        assert (action.state, action.outcome.failure) == ("interrupted", failure)
        assert action.outcome.exit_code == code


def test_a_refused_stage_ends_unless_another_call_makes_it() -> None:
    policy = replace(POLICY, refused={DATA.id: outcome_of("unsupported")})
    action = decide([], policy=policy)["data"]
    assert isinstance(action, Fail)
    assert action.state == "failed"
    assert isinstance(decide([DATA_DONE], policy=policy)["data"], Finish)


def test_an_outage_is_followed_by_a_pause() -> None:
    lost = attempt(1, "judge_outage")
    action = after(lost, policy=replace(POLICY, now=5.0, not_before={DATA.id: 35.0}))
    assert isinstance(action, Wait)
    assert "30 s" in action.reason
    assert paused_after(action.reason) == "judge_outage"
    assert paused_after(f"data {action.reason}") == paused_after("runs") == ""
    later = replace(POLICY, now=36.0, not_before={DATA.id: 35.0})
    assert after(lost, policy=later) == Launch(DATA, 1)


def test_a_stage_that_fills_a_cache_comes_first_though_it_is_no_input() -> None:
    fetch = replace(DATA, name="fetch", kind="fetch", fingerprint="f" * 64)
    data = replace(DATA, after=("fetch",))
    plan = Plan("p", PLAN.config, (fetch, data))
    actions = reconcile(plan, {}, Observation(), POLICY)
    assert [type(a) for a in actions] == [Launch, Wait]
    failed = {fetch.id: record(fetch, attempt(1, "bad_configuration"))}
    assert reconcile(plan, failed, Observation(), POLICY)[1] == Block(data, "fetch", "blocked")


# ---------------------------------------------------------------- stopping


def test_a_stop_begins_nothing_and_retries_nothing() -> None:
    stopped = (SFT, record(SFT, attempt(1, "interrupted")))
    actions = decide([DATA_DONE, stopped], policy=replace(POLICY, stopping=True))
    assert isinstance(actions["sft"], Fail)
    states = {n: getattr(a, "state", None) for n, a in actions.items()}
    assert states.pop("data") is None
    assert set(states.values()) == {"interrupted"}


def test_a_cancelled_stage_does_not_begin_and_what_needs_it_neither() -> None:
    actions = decide([DATA_DONE], policy=replace(POLICY, cancelled=frozenset({SFT.id})))
    assert isinstance(actions["sft"], Fail)
    assert actions["sft"].outcome.failure == "cancelled"
    assert actions["evaluate-sft"] == Block(PLAN.by_name["evaluate-sft"], "sft", "interrupted")
    assert isinstance(actions["evaluate-base"], Launch), "the others continue"


# ---------------------------------------------------------------- services

SERVED = make_plan(
    replace(
        small_config("data", "grpo", "evaluate"),
        judge=JudgeConfig(kind="openai", model="m", serve_command="serve --port {port}"),
    ),
    SOURCES,
)
JUDGE, GRPO, BASE = (SERVED.by_name[n] for n in ("judge", "grpo", "evaluate-base"))
SERVED_DATA = (SERVED.by_name["data"], record(SERVED.by_name["data"], attempt(1), done=True))


def decide_served(
    *records: tuple[PlannedStage, StageRecord],
    seen: Mapping[str, AttemptStatus] | None = None,
    ready: tuple[int, ...] = (),
    policy: CallRules = POLICY,
) -> dict[str, Action]:
    answered = frozenset((JUDGE.id, number) for number in ready)
    observed = Observation(seen or {}, ready=answered)
    actions = reconcile(SERVED, {s.id: r for s, r in records}, observed, policy)
    assert [a.stage for a in actions] == list(SERVED.stages), "one action each, in the plan's order"
    return {a.stage.name: a for a in actions}


def judge_record(*attempts: Attempt) -> tuple[PlannedStage, StageRecord]:
    return JUDGE, record(JUDGE, *attempts)


JUDGE_LIVE = {JUDGE.id: AttemptStatus(1, "live")}


def test_a_server_starts_when_a_stage_needs_it() -> None:
    """GPUs are not taken for a judge while rows are still being prepared."""
    actions = decide_served()
    assert isinstance(actions["judge"], Wait)
    assert isinstance(actions["data"], Launch)


def test_a_trainer_is_launched_when_its_judge_answers_and_not_before() -> None:
    first = decide_served(SERVED_DATA)
    assert first["judge"] == Launch(JUDGE, 0)
    assert isinstance(first["grpo"], Wait)
    starting = decide_served(SERVED_DATA, judge_record(attempt(1)), seen=JUDGE_LIVE)
    assert starting["judge"] == Serve(JUDGE, "runs", 1, wanted=True)
    assert isinstance(starting["grpo"], Wait)
    ready = decide_served(SERVED_DATA, judge_record(attempt(1)), seen=JUDGE_LIVE, ready=(1,))
    assert ready["judge"] == Serve(JUDGE, "runs", 1, ready=True, wanted=True)
    assert ready["grpo"] == Launch(GRPO, 0)


@pytest.mark.parametrize(
    "seen", [None, AttemptStatus(1, "unknown"), AttemptStatus(1, "live", running=False)]
)
def test_a_ready_server_counts_while_it_runs(seen: AttemptStatus | None) -> None:
    """It may queue again, or its node may not be reached."""
    looked = {} if seen is None else {JUDGE.id: seen}
    actions = decide_served(SERVED_DATA, judge_record(attempt(1)), seen=looked, ready=(1,))
    assert isinstance(actions["grpo"], Wait)


def test_no_server_is_started_for_a_trainer_that_has_no_slot_yet() -> None:
    busy = {"sft-of-another-recipe": AttemptStatus(1, "live")}
    other = record(SFT, attempt(1))
    records = {SERVED_DATA[0].id: SERVED_DATA[1], "sft-of-another-recipe": other}
    one = replace(POLICY, max_parallel=1)
    actions = reconcile(SERVED, records, Observation(busy), one)
    assert isinstance(actions[SERVED.stages.index(JUDGE)], Wait)


@pytest.mark.parametrize("end", ["killed", "preempted", "gpu_out_of_memory", "none"])
def test_a_lost_server_is_replaced(end: FailureClass) -> None:
    """``none``: it ended while the trainer's job queued."""
    actions = decide_served(
        SERVED_DATA,
        judge_record(attempt(1, end)),
        (GRPO, record(GRPO, attempt(1))),
        seen={GRPO.id: AttemptStatus(1, "live")},
        ready=(1,),
        policy=replace(POLICY, max_parallel=1),
    )
    assert isinstance(actions["evaluate-base"], Wait)
    assert actions["judge"] == Launch(JUDGE, 1)
    assert actions["grpo"] == Wait(GRPO, "runs", 1)


def test_a_server_that_answered_clears_the_count() -> None:
    """Over weeks a judge is lost many times; only one that never comes up again is given up."""
    lost = [attempt(n, "killed") for n in range(1, 30)]
    often = decide_served(SERVED_DATA, judge_record(*lost), ready=tuple(range(1, 30)))
    assert often["judge"] == Launch(JUDGE, 29)
    never = decide_served(SERVED_DATA, judge_record(*lost[: RETRIES.killed + 1]))
    assert isinstance(never["judge"], Fail)


def test_a_server_that_cannot_start_fails_and_blocks() -> None:
    failed = judge_record(attempt(1, "bad_configuration"))
    before = replace(POLICY, ended_before={JUDGE.id: 1})
    assert decide_served(SERVED_DATA, failed, policy=before)["judge"] == Launch(JUDGE, 1)
    actions = decide_served(SERVED_DATA, failed)
    assert isinstance(actions["judge"], Fail)
    assert actions["judge"].outcome.exit_code == 2
    assert actions["grpo"] == Block(GRPO, "judge", "blocked")
    assert actions["evaluate-grpo"] == Block(SERVED.by_name["evaluate-grpo"], "judge", "blocked")


def all_done() -> list[tuple[PlannedStage, StageRecord]]:
    return [(s, record(s, attempt(1), done=True)) for s in SERVED.stages if s != JUDGE]


@pytest.mark.parametrize(
    ("tries", "status", "live"),
    [
        ([], None, False),
        ([attempt(1)], "live", True),
        ([attempt(1)], "unknown", True),
        ([attempt(1, "bad_configuration")], None, False),
    ],
)
def test_finished_recipes_need_no_server(
    tries: list[Attempt], status: Liveness | None, live: bool
) -> None:
    """A server that failed when all had their answers fails nothing."""
    seen = {JUDGE.id: AttemptStatus(1, status)} if status else {}
    servers = [judge_record(*tries)] if tries else []
    actions = decide_served(*all_done(), *servers, seen=seen, ready=(1,) if status else ())
    assert actions["judge"] == Idle(JUDGE, live=live)


def test_a_server_may_rest_between_two_stages() -> None:
    """A picture that follows a stage to its end must not take this for it."""
    data = SERVED_DATA[0]
    plan = Plan("late", SERVED.config, (data, JUDGE, BASE, replace(GRPO, inputs={"data": "data"})))
    done = {BASE.id: record(BASE, attempt(1), done=True)}
    actions = reconcile(
        plan, {**done, JUDGE.id: judge_record(attempt(1, "none"))[1]}, Observation(), POLICY
    )
    assert isinstance(actions[1], Wait)


def test_a_stop_leaves_no_server_behind_and_starts_none() -> None:
    stopping = replace(POLICY, stopping=True)
    none = decide_served(SERVED_DATA, policy=stopping)
    assert none["judge"] == Idle(JUDGE, live=False)
    lives = decide_served(
        SERVED_DATA, judge_record(attempt(1)), seen=JUDGE_LIVE, ready=(1,), policy=stopping
    )
    assert isinstance(lives["judge"], Serve), "it is waited for until it has ended"
    ended = decide_served(SERVED_DATA, judge_record(attempt(1, "interrupted")), policy=stopping)
    assert isinstance(ended["judge"], Idle)


# ---------------------------------------------------------------- whole campaigns under faults
