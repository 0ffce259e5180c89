"""The supervisor of a sweep: start order, limits, the canary, failures, cancellation."""

import errno
from collections.abc import Sequence
from dataclasses import replace

import pytest

from flows.sweeping.launching import record_version, suspend_sweep
from flows.sweeping.status import SweepWatcher
from infra.jobs.dispatcher import AttemptRef, JobRequest
from infra.orchestrator.timeline import read_events
from infra.store import atomic
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of, take_up
from infra.store.sweep_records import read_sweep, trial_run
from infra.store.workspace import Workspace
from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import NoSpaceError
from refiner_core.contract.records import RunRecord, SweepRecord
from sweeps.forecast import ExceededLimit, History, SweepForecast, forecast_sweep
from sweeps.values import Limits, SweepPlan
from tests.support.sweeping import TRAINED, Bench, Jobs, bench, small_sweep

SCRIPT = {"grpo": TRAINED, "sft": TRAINED}


def recorded(workspace: Workspace, plan: SweepPlan) -> SweepRecord:
    return record_version(plan, workspace, (), {})


def events(workspace: Workspace, name: str) -> list[dict]:
    found = read_events(workspace.layout.run(sweep_call("small")).events)
    return [e for e in found if e["event"] == name]


def hours(plan: SweepPlan, each: float) -> SweepForecast:
    """A forecast of so many GPU-hours for every GRPO stage, and nothing for the others."""
    forecast = forecast_sweep(plan, History(), frozenset())
    stages = (
        replace(
            s,
            seconds=3600 * each,
            shape=s.shape._replace(devices=int(s.kind == "grpo")),
            judge_calls=100,
        )
        for s in forecast.stages
    )
    return replace(forecast, stages=tuple(stages))


def on_gpus(plan: SweepPlan, gpus: int) -> SweepPlan:
    def changed(trial):
        config = trial.plan.config
        grpo = replace(config.grpo, resources=replace(config.grpo.resources, gpus=gpus))
        return replace(trial, plan=replace(trial.plan, config=replace(config, grpo=grpo)))

    return replace(plan, trials=tuple(map(changed, plan.trials)))


# ---------------------------------------------------------------- what runs


def test_jobs_of_several_trials_are_submitted_together(workspace: Workspace) -> None:
    """On a cluster they become one array, and not a call of sbatch each."""

    class Counted(Jobs):
        def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
            sizes.append(len(requests))
            return super().submit(requests)

    sizes: list[int] = []
    plan = small_sweep(seeds=(1, 2, 3, 4), limits=Limits(concurrency=8))
    jobs = Counted(workspace, plan, SCRIPT, executor="slurm")
    assert set(bench(workspace, plan, SCRIPT, jobs=jobs).run().values()) == {"done"}
    assert sum(sizes) == len(jobs.begun) == 1 + 4 + 8
    assert max(sizes) >= 4


def test_no_more_trials_run_at_once_than_the_sweep_allows(workspace: Workspace) -> None:
    plan, most = small_sweep(seeds=(1, 2, 3), limits=Limits(concurrency=1)), set()
    told = bench(workspace, plan, SCRIPT)
    told.begin(lambda: most.add(len(told.admission.live)) or len(told.jobs.begun) == 9)
    assert max(most) == 1


def test_a_trial_whose_stages_are_all_there_is_a_run_without_being_begun(
    workspace: Workspace,
) -> None:
    """Another sweep made its stages; status, card and why need the run record."""
    plan = small_sweep()
    bench(workspace, plan, SCRIPT).run()
    twin = replace(plan, sweep=replace(plan.sweep, name="twin"))
    again = bench(workspace, twin, SCRIPT)
    again.run()
    assert again.jobs.begun == []
    run = workspace.read_run(trial_run(workspace, "twin", plan.trials[0].name))
    assert run.provenance["sweep"]["name"] == "twin"


def test_a_trial_whose_stages_are_others_by_now_is_another_run(workspace: Workspace) -> None:
    """Also where all of its stages are done: `refiner why` shows the present stages."""
    before, now = small_sweep(), small_sweep("data", "sft", "grpo", "evaluate")
    bench(workspace, before, SCRIPT).run()
    other = replace(now, sweep=replace(now.sweep, name="other"))
    bench(workspace, other, SCRIPT).run()
    bench(workspace, now, SCRIPT).run()
    for trial in now.trials:
        run = workspace.read_run(trial_run(workspace, "small", trial.name))
        assert dict(run.stages) == {s.name: s.id for s in trial.plan.stages}


# ---------------------------------------------------------------- what fails


def test_a_shared_stage_that_fails_fails_those_that_need_it_and_is_not_tried_by_each(
    workspace: Workspace,
) -> None:
    plan = small_sweep(betas=(0.1, 0.2, 0.3))
    second = next(t for t in plan.trials if t.seed == 2)
    told = bench(workspace, plan, {**SCRIPT, f"{second.name}/sft": ("bad_data",)})
    states = told.run()
    assert {s for t, s in states.items() if t.endswith("seed2")} == {"failed"}
    assert {s for t, s in states.items() if t.endswith("seed1")} == {"done"}
    assert told.jobs.begun.count(f"{second.name}/sft") == 1


def test_a_failed_trial_is_retried_by_the_next_call_as_a_new_run(workspace: Workspace) -> None:
    """The code may have been fixed; a stopped run keeps its own code."""
    plan = small_sweep()
    bad = plan.trials[1].name
    bench(workspace, plan, {**SCRIPT, f"{bad}/grpo": ("bad_configuration",)}).run()
    before = trial_run(workspace, "small", bad)
    again = bench(workspace, plan, SCRIPT)
    assert set(again.run().values()) == {"done"}
    assert again.jobs.begun == [f"{bad}/grpo"]
    assert trial_run(workspace, "small", bad) != before


# ---------------------------------------------------------------- the canary


def test_one_trial_goes_ahead_until_it_has_trained_two_steps_and_saved(
    workspace: Workspace,
) -> None:
    plan = small_sweep()
    told = bench(workspace, plan, SCRIPT)
    told.orchestrator.begin()
    first = plan.trials[0]
    alone = 0
    while len(told.admission.live) < 2:
        told.orchestrator.step()
        alone += 1
        assert alone < 50
    assert told.jobs._steps, "two steps of GRPO were done before anybody else began"
    assert [n for n in told.jobs.begun if not n.startswith(first.name)] == []
    config = told.admission.live[first.name].plan.config
    assert (config.grpo.first_save, config.sft.first_save) == (2, 2)
    assert any("5 s a step, 1.5 s a save" in text for text in told.said)
    other = next(x for n, x in told.admission.live.items() if n != first.name)
    assert other.plan.config.grpo.first_save is None


def test_a_canary_that_fails_releases_nothing(workspace: Workspace) -> None:
    plan = small_sweep()
    told = bench(workspace, plan, {**SCRIPT, "grpo": ("bad_configuration",)})
    states = told.run()
    assert states.pop(plan.trials[0].name) == "failed"
    assert set(states.values()) == {"held"}
    assert told.jobs.begun == [f"{plan.trials[0].name}/{s}" for s in ("data", "sft", "grpo")]
    assert told.admission.exit_code == 1
    assert "no other trial was begun" in told.admission.held


@pytest.mark.parametrize(("ends", "past"), [("bad_configuration", True), ("not_finite", False)])
def test_other_trials_continue_past_the_canary_or_where_its_arm_is_the_cause(
    workspace: Workspace, ends: str, past: bool
) -> None:
    plan = small_sweep()
    first = plan.trials[0].name
    states = bench(workspace, plan, {**SCRIPT, f"{first}/grpo": (ends,)}, past_canary=past).run()
    assert states.pop(first) == "failed"
    assert set(states.values()) == {"done"}


def test_a_measured_training_needs_no_canary(workspace: Workspace) -> None:
    bench(workspace, small_sweep(), SCRIPT).run()
    again = bench(workspace, small_sweep(seeds=(1, 2, 3)), SCRIPT)
    again.orchestrator.begin()
    again.orchestrator.step()
    assert len(again.admission.live) == 2


def test_a_forecast_that_passes_a_limit_by_what_the_canary_has_shown_holds_the_sweep(
    workspace: Workspace,
) -> None:
    """Its work is saved, and the same command continues."""
    plan = small_sweep()

    def passed(forecast: SweepForecast) -> list[ExceededLimit]:
        return (
            [ExceededLimit("gpu_hours", "GPU-hours", 200, 310, False, "not one")]
            if forecast.canary
            else []
        )

    script = {**SCRIPT, "grpo": ("step", "step", "save", "wait", "wait", "wait", "done")}
    told = bench(workspace, plan, script, passed=passed)
    states = told.run()
    assert states.pop(plan.trials[0].name) == "interrupted"
    assert set(states.values()) == {"held"}
    assert told.admission.exit_code == 6
    assert "needs 310 GPU-hours" in told.admission.held
    again = bench(workspace, plan, SCRIPT, passed=passed)
    assert set(again.run().values()) == {"done"}, "it is measured now, and was agreed to"


# ---------------------------------------------------------------- limits


def test_a_limit_holds_trials_until_it_is_raised(workspace: Workspace) -> None:
    def launched(limit: float) -> Bench:
        plan = on_gpus(small_sweep(limits=Limits(gpu_hours=limit, concurrency=4)), 1)
        jobs = Jobs(workspace, plan, SCRIPT, seconds=3600.0)
        return bench(workspace, plan, jobs=jobs, forecast=lambda: hours(plan, 1.0))

    told = launched(2.5)
    states = told.run()
    assert sorted(states.values()) == ["done", "done", "held", "held"]
    assert told.admission.exit_code == 6
    assert "limits.gpu_hours is 2.5 GPU-hours: 2 used, 1 forecast for it" in told.admission.held
    again = launched(4.0)
    assert set(again.run().values()) == {"done"}
    assert len([n for n in again.jobs.begun if n.endswith("grpo")]) == 2


def test_running_trials_count_by_their_forecast(workspace: Workspace) -> None:
    """Concurrent trials share one limit."""
    plan = on_gpus(small_sweep(limits=Limits(gpu_hours=2.5, concurrency=4)), 1)
    script = {"grpo": ("step", "step", "save", *["wait"] * 20, "done")}
    jobs = Jobs(workspace, plan, script, seconds=36.0)
    told = bench(workspace, plan, jobs=jobs, forecast=lambda: hours(plan, 1.0))
    told.orchestrator.begin()
    for _ in range(20):
        told.orchestrator.step()
        assert len(told.admission.live) <= 2


def test_the_rest_of_a_stopped_trial_counts_before_it_continues(workspace: Workspace) -> None:
    plan = on_gpus(small_sweep(limits=Limits(gpu_hours=1.5)), 1)
    script = {"grpo": ("step", "step", "save", *["wait"] * 99)}
    told = bench(workspace, plan, jobs=Jobs(workspace, plan, script, seconds=36.0))
    told.begin(lambda: len(told.admission.live) >= 2)
    told.orchestrator.request_stop("Ctrl-C")
    told.finish()
    again = bench(workspace, plan, SCRIPT, forecast=lambda: hours(plan, 10.0))
    assert set(again.run().values()) == {"held"}
    assert again.jobs.begun == []


# ---------------------------------------------------------------- stopping, and reading it


def test_a_stop_saves_running_trials_and_starts_no_more(workspace: Workspace) -> None:
    plan = small_sweep()
    script = {**SCRIPT, "grpo": ("step", "step", "save", *["wait"] * 99, "done")}
    told = bench(workspace, plan, script)
    told.begin(lambda: len(told.admission.live) >= 2)
    told.orchestrator.request_stop("Ctrl-C")
    told.finish()
    assert sorted(told.states().values()) == ["interrupted", "interrupted", "waiting", "waiting"]
    assert told.admission.exit_code == 6
    runs = dict.fromkeys(workspace.run_ids())
    again = bench(workspace, plan, SCRIPT)
    assert set(again.run().values()) == {"done"}
    assert set(runs) < set(workspace.run_ids()), "stopped trials go on as the runs that they were"
    assert len(workspace.run_ids()) == 4


def test_a_suspended_sweep_lets_running_stages_finish(workspace: Workspace) -> None:
    plan = small_sweep(limits=Limits(concurrency=1))
    recorded(workspace, plan)
    told = bench(workspace, plan, SCRIPT)
    told.begin(lambda: any(name.endswith("sft") for name in told.jobs.begun))
    suspend_sweep(workspace, "small")
    told.finish()
    assert set(told.states().values()) == {"interrupted", "held"}
    begun = {name.rpartition("/")[2] for name in told.jobs.begun}
    assert begun == {"data", "sft"}, "no further stage was begun"
    assert workspace.read_result(plan.trials[0].plan.by_name["sft"].id), "what ran has ended"
    workspace.withdraw_cancel(sweep_call("small"))
    assert set(bench(workspace, plan, SCRIPT).run().values()) == {"done"}


def test_cancelling_a_sweep_ends_no_job_that_another_run_waits_for(workspace: Workspace) -> None:
    """A cancelled job is not started again, so the other run would end too."""
    plan = small_sweep()
    told = bench(workspace, plan, {**SCRIPT, "grpo": ("step", "step", "save", *["wait"] * 99)})
    told.begin(lambda: len(told.jobs.begun) >= 5)
    mine = told.admission.live[plan.trials[0].name].run
    workspace.write_run(replace(mine, run="20261121-000000-by-hand", provenance={}))
    take_up(workspace, "20261121-000000-by-hand")
    workspace.request_cancel(sweep_call("small"), "somebody")
    told.finish()
    stopped = {ref.stage_id for ref in told.jobs.stopped}
    assert stopped.isdisjoint(mine.stages.values())
    assert stopped, "jobs that the sweep alone wants are ended"


def test_a_version_is_written_only_when_something_has_changed(workspace: Workspace) -> None:
    first = recorded(workspace, small_sweep())
    assert recorded(workspace, small_sweep()).number == first.number == 1
    assert recorded(workspace, small_sweep(seeds=(1, 2, 3))).number == 2
    assert recorded(workspace, small_sweep(seeds=(1, 2, 3), limits=Limits(gpu_hours=3))).number == 3
    assert read_sweep(workspace, "small", 1).seeds == (1, 2)


def test_states_and_costs_of_trials_are_read_from_records(workspace: Workspace) -> None:
    plan = on_gpus(small_sweep(), 2)
    record = recorded(workspace, plan)
    bad = plan.trials[3].name
    jobs = Jobs(workspace, plan, {**SCRIPT, f"{bad}/grpo": ("bad_configuration",)})
    bench(workspace, plan, jobs=jobs).run()
    found = {t.name: t for t in SweepWatcher(workspace, record.name).standings(record)}
    assert [t.state for t in found.values()] == ["done", "done", "done", "failed"]
    assert "grpo" in found[bad].reason
    first, second = (found[t.name] for t in plan.trials[:2])
    assert first.use.attempts == 3
    assert (second.use.attempts, second.shared) == (1, ("data", "sft")), "shared: with the first"
    assert first.use.gpu_hours == 2.0
    assert found[bad].use.incidents == 1


# ---------------------------------------------------------------- what one trial does to others


def test_a_shared_stage_that_was_cancelled_with_one_trial_is_begun_by_the_next(
    workspace: Workspace,
) -> None:
    """Cancelling one trial does not cancel later ones."""
    plan = small_sweep(limits=Limits(concurrency=1))
    second = next(t for t in plan.trials if t.seed == 2)
    script = {**SCRIPT, f"{second.name}/sft": ("cancelled",)}
    told = bench(workspace, plan, script)
    told.begin(lambda: told.states()[second.name] == "interrupted")
    del script[f"{second.name}/sft"]
    told.jobs.script = script
    told.finish()
    states = told.states()
    assert states.pop(second.name) == "interrupted"
    assert set(states.values()) == {"done"}


def test_a_shared_stage_continues_when_one_of_its_trials_is_cancelled(workspace: Workspace) -> None:
    plan = small_sweep(seeds=(1,), limits=Limits(concurrency=2))
    first, second = (t.name for t in plan.trials)
    told = bench(workspace, plan, {**SCRIPT, "sft": (*["wait"] * 8, *TRAINED)})
    told.admission.canary = None
    told.orchestrator.begin()
    while f"{first}/sft" not in told.jobs.begun:
        told.orchestrator.step()
    run = told.admission.live[second].run.run
    workspace.request_cancel(run, "somebody")
    while told.states()[second] != "interrupted":
        told.orchestrator.step()
    word = told.admission.standing()[second]
    assert "which still runs" in word.reason
    assert word.exit_code == 6
    told.finish()
    assert told.jobs.stopped == []
    assert told.states() == {first: "done", second: "interrupted"}
    assert told.jobs.begun == [f"{first}/{stage}" for stage in ("data", "sft", "grpo")]


def test_a_trial_ends_while_others_still_need_the_judges_server_that_they_share(
    workspace: Workspace,
) -> None:
    """Later trials start before the server ends."""
    judge = JudgeConfig(kind="openai", model="m", serve_command="serve --port {port}")
    plan = small_sweep("data", "grpo", seeds=(1,), limits=Limits(concurrency=2), judge=judge)
    first, second = (t.name for t in plan.trials)
    script = {"judge": ("wait",) * 999, f"{second}/grpo": ("wait",) * 40}
    told = bench(workspace, plan, script)
    told.admission.canary = None
    told.begin(lambda: any(name.endswith("/judge") for name in told.jobs.begun))
    server = plan.trials[0].plan.by_name["judge"].id
    atomic.write_json(workspace.layout.attempt(server, 1).endpoint, {"url": "http://127.0.0.1:1"})
    while told.states()[first] != "done":
        assert not told.orchestrator.step()
    assert told.states()[second] == "running"
    assert sum(name.endswith("/judge") for name in told.jobs.begun) == 1, "one server for both"


def test_a_trial_that_was_given_up_has_no_live_orchestrator(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the sweep lives on, and the trial can be resumed at once."""
    plan = small_sweep()
    told = bench(workspace, plan, {**SCRIPT, "grpo": ("step", "step", "save", *["wait"] * 99)})
    told.begin(lambda: len(told.admission.live) >= 2)
    live = told.admission.live[plan.trials[1].name]

    def breaks(_: object) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(live.holds, "keep", breaks)
    told.orchestrator.step()
    assert told.states()[plan.trials[1].name] == "failed"
    assert not orchestrator_of(workspace, live.run.run).works
    assert orchestrator_of(workspace, told.admission.live[plan.trials[0].name].run.run).works


@pytest.mark.parametrize(
    "error", [OSError(errno.EROFS, "Read-only file system"), NoSpaceError("The disk is full.")]
)
def test_a_trial_that_cannot_be_recorded_starts_later_with_its_cause(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plan = small_sweep()
    moments = iter(range(0, 100_000_000, 10))
    told = bench(workspace, plan, SCRIPT, clock=lambda: float(next(moments)))
    real, left = workspace.write_run, [20]

    def write_run(run: RunRecord) -> None:
        if left[0]:
            left[0] -= 1
            raise error
        real(run)

    monkeypatch.setattr(workspace, "write_run", write_run)
    assert set(told.run().values()) == {"done"}
    waits = [e for e in events(workspace, "trial") if e["state"] == "waiting"]
    assert len(waits) == 1, "once"
    assert str(error.args[-1]) in waits[0]["reason"]
