"""The command on a card makes the same model: planned again, it has the recorded fingerprint."""

import hashlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.cards.reproduction import CheckpointOrigin, differing, planned, reproduce
from flows.checking.own_data import example_rows
from flows.running.calls import make_recipe_plan
from refiner_core.cards.public import public_command
from refiner_core.contract.errors import StageFailed
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.recipes import shipped_recipes
from refiner_core.contract.records import RECORD_VERSION, StageSpec

TRAINS = ("data", "sft", "sample", "rft", "grpo", "command")


def spec_of(stage: PlannedStage) -> StageSpec:
    return StageSpec(
        version=RECORD_VERSION,
        name=stage.name,
        kind=stage.kind,
        fingerprint=stage.fingerprint,
        model=stage.model,
        stage_version=KINDS[stage.kind].version,
        identity=stage.identity,
        sources=stage.sources,
        input_fingerprints=stage.input_fingerprints,
    )


def made_by(plan: Plan, recipe: str, overrides: tuple[str, ...] = ()) -> CheckpointOrigin:
    """What the records of a run of this plan would say of its last model."""
    specs = {s.name: spec_of(s) for s in plan.stages if s.kind in TRAINS}
    return CheckpointOrigin(recipe, overrides, plan.config, list(specs)[-1], specs)


def run_of(recipe: str, *overrides: str) -> CheckpointOrigin:
    return made_by(make_recipe_plan(recipe, overrides), recipe, overrides)


def fingerprint(found: dict[str, Any], made: CheckpointOrigin) -> str:
    return planned(found["command"], made, found["recipe_file"]).by_name[made.trained].fingerprint


# ---------------------------------------------------------------- shipped recipes


@pytest.mark.parametrize("recipe", sorted(shipped_recipes()))
def test_a_shipped_recipe_comes_back_by_name(recipe: str) -> None:
    made = run_of(recipe)
    found = reproduce(made)
    assert found["command"] == f"refiner run {recipe}"
    assert found["recipe_file"] is None
    assert fingerprint(found, made) == made.fingerprint


def test_execution_settings_are_left_out() -> None:
    given = ("seed=7", "grpo.save_freq=5", "publish.which=every-save")
    hidden = ("workspace=/scratch/me/runs", "dispatch.max_parallel=1", "tracking.wandb=disabled")
    hidden += ("grpo.resources.cpus=3", "publish.repo_id=me/{recipe}-{step}", "log_level=debug")
    hidden += ("publish.per_step=repository", "publish.path=/home/me/published")
    assert reproduce(run_of("tiny", *given, *hidden))["command"] == (
        f"refiner run tiny {' '.join(given)}"
    )


#: Values that a user may give, as they are written on the command line.
OVERRIDES: dict[str, st.SearchStrategy[str]] = {
    "seed": st.integers(0, 10**6).map(str),
    "grpo.beta": st.floats(0, 1, allow_nan=False).map(repr),
    "grpo.learning_rate": st.sampled_from(["5e-6", "1.0e-05", "3E-4", "0.001", ".5"]),
    "grpo.stop_strings": st.sampled_from(
        ["[]", '["a b", "c\'d"]', '["1e3", "yes", "null"]', '["$HOME", "</answer>"]', '["é\\n"]']
    ),
    "grpo.kl_estimator": st.sampled_from(["kl1", "kl2", "kl3"]),
    "grpo.num_training_steps": st.integers(10, 10**4).map(str),
    "data.max_rl_rows": st.sampled_from(["null", "3", "17"]),
    "data.sft_path": st.sampled_from(["builtin:synthetic"]),
    "data.refiner_mode": st.sampled_from(["null", "answer_only"]),
    "model.chat_template": st.text(
        st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), exclude_characters="${}\\"),
        min_size=1,
        max_size=20,
    ).map(lambda text: json.dumps(text, ensure_ascii=False)),
    "reward.paper_citation_weight": st.sampled_from(["0", "0.2", "1"]),
    "reward.rubric_source": st.sampled_from(["instance", "static", "instance+static", "none"]),
    "evaluate.decoding": st.sampled_from(["[greedy]", "[sampled, greedy]"]),
    "publish.license": st.sampled_from(["mit", "cc-by-4.0", "other"]),
    "grpo": st.sampled_from(["{beta: 0.5, keep: 7}", "{temperature: 0.7, resources: {cpus: 2}}"]),
    "workspace": st.sampled_from(["/scratch/me", "here"]),
    "dispatch.max_parallel": st.integers(1, 9).map(str),
}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(OVERRIDES)), st.data(), max_size=5), st.data())
def test_any_overrides_come_back_as_a_command(keys: dict[str, Any], data: st.DataObject) -> None:
    overrides = tuple(f"{key}={data.draw(OVERRIDES[key], label=key)}" for key in keys)
    made = run_of("tiny", *overrides)
    found = reproduce(made)
    assert fingerprint(found, made) == made.fingerprint
    assert public_command(found["command"]) == found["command"], "the card shows what was checked"
    assert "/scratch" not in found["command"] + (found["recipe_file"] or "")
    assert reproduce(made) == found, "the same every time"


# ---------------------------------------------------------------- local files


def rows_file(folder: Path) -> Path:
    path = folder / "private" / "my rows.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(example_rows("rl", 1)[0]) + "\n")
    return path


def test_the_command_needs_the_files_and_no_records(tmp_path, monkeypatch) -> None:
    """The command line alone, in a folder with the same files."""
    from refiner_core.models import tiny_model_dir

    path = rows_file(tmp_path)
    (path.parent / "model").symlink_to(tiny_model_dir())
    made = run_of(
        "tiny", f"data.rl_path={path}", f"model.name_or_path={path.parent / 'model'}", "seed=3"
    )
    _, _, recipe, *overrides = shlex.split(reproduce(made)["command"])
    monkeypatch.chdir(path.parent)
    plan = make_recipe_plan(recipe, overrides)
    assert plan.by_name["grpo"].fingerprint == made.fingerprint


def test_names_in_the_fingerprint_lose_their_folders(tmp_path: Path) -> None:
    """Rubrics of one's own and a judge that is served from a folder are known by their names."""
    rubrics = tmp_path / "mine.yaml"
    text = {"rubrics": [{"title": "Short", "description": "Is short", "weight": 1.0}]}
    rubrics.write_text(yaml.safe_dump({"name": "mine", "version": 1, **text}))
    made = run_of(
        "tiny",
        "reward.rubric_source=static",
        f"reward.static_rubrics={rubrics}",
        "judge.kind=openai",
        "judge.model=/models/judge",
        "judge.base_url=http://127.0.0.1:1/v1",
    )
    found = reproduce(made)
    assert "/" not in found["command"]
    assert fingerprint(found, made) == made.fingerprint


# ---------------------------------------------------------------- recipes of one's own


def own_recipe(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_a_recipe_of_the_user_comes_as_a_file(tmp_path: Path) -> None:
    path = own_recipe(
        tmp_path,
        "include: tiny\nworkspace: /scratch/me\ngrpo:\n  beta: 1.0e-05\n  stop_strings: ['1e3', "
        "'a: b', \"x ${seed}\"]\npublish:\n  repo_id: me/secret\n",
    )
    made = run_of(str(path), "seed=5")
    found = reproduce(made)
    assert found["command"] == "refiner run recipe.yaml"
    assert found["recipe_file"] is not None
    assert fingerprint(found, made) == made.fingerprint
    again = tmp_path / "elsewhere" / "recipe.yaml"
    again.parent.mkdir()
    again.write_text(found["recipe_file"])
    plan = make_recipe_plan(str(again))
    assert plan.by_name["grpo"].fingerprint == made.fingerprint, "by the command line itself"
    assert "/scratch" not in found["recipe_file"]
    assert "me/secret" not in found["recipe_file"]


def test_an_edited_shipped_recipe_comes_as_a_file() -> None:
    made = run_of("tiny", "seed=5")
    other = make_recipe_plan("tiny", ["seed=5", "grpo.clip_lower=0.3"])
    edited = made_by(other, "tiny", ("seed=5",))
    found = reproduce(edited)
    assert found["command"] == "refiner run recipe.yaml"
    assert fingerprint(found, edited) == edited.fingerprint != made.fingerprint
    assert found["not_the_shipped_recipe"] == ["grpo: grpo.clip_lower: 0.3 → 0.2"]


def test_another_trainers_command_comes_back(tmp_path: Path) -> None:
    made = run_of(
        "own-trainer",
        "command.run=python /home/me/train.py --out {output} --n {{3}} {resume}",
        "command.version=v2",
        "command.workdir=/home/me",
    )
    found = reproduce(made)
    assert "/home" not in found["command"] + (found["recipe_file"] or "")
    assert fingerprint(found, made) == made.fingerprint


# ---------------------------------------------------------------- what does not come back


def test_a_command_for_another_model_is_found_by_field() -> None:
    made = run_of("tiny", "seed=5")
    assert differing("refiner run tiny seed=5", made) == ()
    said = differing("refiner run tiny seed=6 data.split_seed=9", made)
    assert "data: data.split_seed: 0 → 9" in said
    assert "grpo: seed: 5 → 6" in said
    assert "grpo" in differing("refiner run tiny seed=5 stages=[data,sft]", made)[0]
    assert "no field 'grpo.betta'" in differing("refiner run tiny grpo.betta=1", made)[0]


def test_a_model_without_a_command_is_not_published() -> None:
    """It was trained by another version: the same configuration means something else now."""
    made = run_of("tiny", "seed=5")
    older = replace(made.specs["grpo"], stage_version=0, fingerprint="0" * 64)
    with pytest.raises(StageFailed, match="stage version: 0"):
        reproduce(replace(made, specs={**made.specs, "grpo": older}))


def test_files_of_an_environment_are_named(tmp_path: Path) -> None:
    """The command cannot run without them."""
    (tmp_path / "away").mkdir()
    file, tasks = tmp_path / "away" / "lamps.py", tmp_path / "away" / "lamps.jsonl"
    file.write_bytes((Path(__file__).parents[1] / "support" / "own_environment.py").read_bytes())
    tasks.write_text("{}\n")
    made = run_of(
        "tiny-tools",
        f"environment.name={file}:Lamps",
        f"environment.tasks={tasks}",
        "environment.demonstrations=0",
        "stages=[data,grpo]",
    )
    found = reproduce(made)
    assert fingerprint(found, made) == made.fingerprint
    assert found["sources"] == {
        "lamps.py": hashlib.sha256(file.read_bytes()).hexdigest(),
        "lamps.jsonl": hashlib.sha256(tasks.read_bytes()).hexdigest(),
    }
