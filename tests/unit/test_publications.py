"""Publications during training: their stages, when each may begin, and held checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.orchestrator.reconcile import (
    Action,
    AttemptStatus,
    Block,
    CallRules,
    Fail,
    Launch,
    Observation,
    Wait,
)
from infra.store.checkpoints import CheckpointStore, RetainedCheckpoints, retained_steps
from infra.store.layout import StagePaths
from infra.store.workspace import Workspace
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import StageRecord
from tests.support.plans import small_config
from tests.unit.test_reconcile import attempt, reconcile, record

ALL = ("data", "grpo", "publish", "evaluate")


def config(*stages: str, **publish: Any) -> RecipeConfig:
    """Six steps of GRPO, saved every second one."""
    base = small_config(*(stages or ALL))
    grpo = replace(base.grpo, num_training_steps=6, save_freq=2)
    return replace(base, grpo=grpo, publish=replace(base.publish, **publish))


def plan(*stages: str, **publish: Any) -> Plan:
    return make_plan(config(*stages, **publish), {"model": "m"})


def names(made: Plan) -> list[str]:
    return [s.name for s in made.stages]


# ---------------------------------------------------------------- which stages


def test_every_saved_step_is_exported_published_and_evaluated_besides_the_last() -> None:
    made = plan(which="every-save")
    for step in (2, 4):
        export, publish = made.by_name[f"export-step{step}"], made.by_name[f"publish-step{step}"]
        assert export.inputs == {"policy": "grpo"}
        assert export.at_step == {"policy": step}
        assert publish.inputs == {"weights": f"export-step{step}"}
        measured = made.by_name[f"evaluate-grpo-step{step}"]
        assert measured.model == f"grpo-step{step}"
        assert made.by_name[f"card-step{step}"].inputs["publish"] == f"publish-step{step}"
    assert made.by_name["publish"].inputs["weights"] == "grpo"
    assert "export-step6" not in names(made), "the last step is what training itself exports"
    course = made.by_name["card-progression"]
    assert {f"evaluation-grpo-step{s}" for s in (2, 4)} <= course.inputs.keys()
    assert course.after == ("card",)
    assert not any("step" in role for role in made.by_name["card"].inputs), "it waits for no step"


def test_how_many_steps_are_published_changes_no_fingerprint_of_what_was_there_before() -> None:
    one, every = plan(), plan(which="every-save")
    for name in ("data", "grpo", "publish", "evaluate-base", "evaluate-grpo", "card"):
        assert one.by_name[name].id == every.by_name[name].id
    two = plan(which="listed", steps=(2,))
    assert two.by_name["publish-step2"].id == every.by_name["publish-step2"].id
    assert "publish" not in names(two), "what is listed, and nothing else"
    assert "publish" in names(plan(which="listed", steps=(2, 6)))


def test_the_best_is_one_publication_that_knows_every_candidate_and_its_numbers() -> None:
    made = plan(which="best")
    inputs = made.by_name["publish-best"].inputs
    assert {"weights", "weights-step2", "weights-step4"} <= inputs.keys()
    assert {"evaluation-grpo", "evaluation-grpo-step2", "evaluation-grpo-step4"} <= inputs.keys()
    assert "publish" not in names(made)


@pytest.mark.parametrize(
    ("stages", "publish", "words"),
    [
        ((), {"which": "listed", "steps": (3,)}, "save_freq` is 2"),
        ((), {"which": "listed", "steps": (2, 2)}, "each once"),
        (("data", "sft", "publish"), {"which": "every-save"}, "depends on its data"),
        (("data", "grpo", "publish"), {"which": "best"}, "publish.evaluate=true"),
        ((), {"which": "every-save", "per_step": "repository"}, "{step}"),
    ],
)
def test_wrong_steps_refused(stages: tuple[str, ...], publish: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make_plan(check_config(config(*stages, **publish)), {})
    assert words in str(refused.value)


def test_a_call_may_be_about_some_stages_alone() -> None:
    whole = config(which="every-save")
    made = make_plan(replace(whole, only=("export-step2", "publish-step2")), {})
    assert names(made) == ["export-step2", "publish-step2"]
    assert made.by_name["export-step2"].id == make_plan(whole, {}).by_name["export-step2"].id
    with pytest.raises(ConfigurationError, match="`only`"):
        make_plan(replace(whole, only=("export-step3",)), {})


# ---------------------------------------------------------------- when

PLAN = plan(which="every-save")
GRPO, EXPORT = PLAN.by_name["grpo"], PLAN.by_name["export-step4"]
DATA = (PLAN.by_name["data"].id, record(PLAN.by_name["data"], attempt(1, "none"), done=True))
TRAINS = {GRPO.id: AttemptStatus(1, "live")}


def decide(
    grpo: StageRecord,
    *there: int,
    seen: dict[str, AttemptStatus] | None = None,
    made: Plan = PLAN,
    policy: CallRules | None = None,
) -> dict[str, Action]:
    observed = Observation(seen or {}, checkpoints=frozenset((GRPO.id, step) for step in there))
    actions = reconcile(
        made, dict([DATA, (GRPO.id, grpo)]), observed, policy or CallRules(max_parallel=1)
    )
    return {a.stage.name: a for a in actions}


def test_a_checkpoint_is_exported_while_training_goes_on_and_takes_none_of_its_slots() -> None:
    running = record(GRPO, attempt(1))
    before = decide(running, 2, seen=TRAINS)
    assert isinstance(before["export-step2"], Launch), "though the only slot is taken"
    assert before["export-step4"] == Wait(EXPORT, "waits for step 4 of grpo")
    assert isinstance(before["publish"], Wait)


def test_steps_of_an_ended_training_are_published_if_they_were_kept() -> None:
    after = decide(record(GRPO, attempt(1, "not_finite")), 4)
    assert isinstance(after["grpo"], Fail)
    assert isinstance(after["export-step4"], Launch)
    assert isinstance(after["export-step2"], Block)
    after = decide(record(GRPO, attempt(1, "none"), done=True), 4)
    failed = after["export-step2"]
    assert isinstance(failed, Fail)
    assert "step 2 of grpo" in failed.outcome.message
    assert isinstance(after["export-step4"], Launch)
    assert isinstance(after["publish"], Launch), "the last one needs none of that"


def test_a_call_about_a_publication_begins_no_training() -> None:
    only = ("export-step2", "publish-step2")
    made = make_plan(replace(config(which="every-save"), only=only), {"model": "m"})
    nothing = decide(record(GRPO, attempt(1, "killed")), made=made)
    assert nothing.keys() == set(only)
    assert isinstance(nothing["export-step2"], Block | Fail)
    assert isinstance(decide(record(GRPO, attempt(1)), 2, made=made)["export-step2"], Launch)


# ---------------------------------------------------------------- the checkpoint stays


def save(folder: Path, *steps: int, keep: int = 2, stage: StagePaths | None = None) -> None:
    store = CheckpointStore(
        folder, 1, keep=keep, held=lambda: retained_steps(stage) if stage else frozenset()
    )
    for step in steps:
        with store.new(step) as made:
            (made / "weights").write_text("w")


def test_retention_spares_what_a_publication_waits_for_until_it_has_it(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "runs")
    holds, stage = RetainedCheckpoints(PLAN, workspace.layout), workspace.layout.stage(GRPO.id)
    stage.control.mkdir(parents=True)
    stage.holds.write_text("in the way")
    holds.keep(done=())
    assert retained_steps(stage) == frozenset(), "it did not fit and is written later"
    stage.holds.unlink()
    holds.keep(done=())
    assert retained_steps(stage) == {2, 4}
    save(stage.checkpoints, 2, 3, 4, 5, stage=stage)
    assert {c.step for c in CheckpointStore(stage.checkpoints, 1).complete()} == {2, 3, 4, 5}
    assert holds.there(done=()) == {(GRPO.id, 2), (GRPO.id, 4)}
    holds.keep(done={PLAN.by_name["export-step2"].id})
    save(stage.checkpoints, 6, 7, stage=stage)
    left = {c.step for c in CheckpointStore(stage.checkpoints, 1).complete()}
    assert left == {4, 6, 7}, "two to resume from, and the one that is waited for"
