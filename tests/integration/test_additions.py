"""A kind of stage, a term of the reward and a state of Slurm, added as CONTRIBUTING.md describes.

The packages are copied and the files written there. A recipe with the new kind is planned, run,
shown, reported and published; the new term counts, and the report names it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, SMALL

KIND = '''"""``merge``: weights between a model and the one that its training started from."""

from refiner_core.contract.kinds.kind import MODEL_READS, CardWords, Kind

MERGE = Kind(
    "merge",
    order=65,
    run="flows.stages.merge:run_merge",
    fields=("model", "merge"),
    sources=("model",),
    hub_reads=MODEL_READS,
    trains="elsewhere",
    label="merged",
    card=CardWords(
        algorithm="Merging", short="Merged", tags=("merge",), made="merged with its start",
        made_by_agents="merged with its start", sections=("model", "merge"),
    ),
)
KINDS = (MERGE,)
'''
FUNCTION = '''"""``merge``: weights between a model and the one that its training started from."""

from __future__ import annotations

from typing import Any

from flows.stages.work import StageWork


def run_merge(work: StageWork) -> dict[str, Any]:
    """Weights between the recipe's base and the newest model."""
    from refiner_core.generation.load import load_model, load_tokenizer

    config = work.config.model
    tuned = load_model(work.model_ref, config)
    base = load_model(config.name_or_path, config).state_dict()
    share = work.config.merge.share
    state = {n: base[n] + share * (w - base[n]) for n, w in tuned.state_dict().items()}
    tuned.load_state_dict(state)
    tuned.save_pretrained(work.output_dir / "model")
    load_tokenizer(work.model_ref, config).save_pretrained(work.output_dir / "model")
    return {"steps": 1}
'''
SECTION = '''@dataclass(frozen=True, config=STRICT)
class MergeConfig:
    """Merging of weights."""

    share: float = identity(0.5, doc="of the way from the base to the model", legacy_value=0.5)
    resources: Resources = section(Resources, doc="resources of the merging job")


@dataclass(frozen=True, config=STRICT)
'''


TERM = """
from refiner_core.contract.config import RewardConfig
from refiner_core.contract.types import PromptRow
from refiner_core.judges.lexical import LexicalJudge
from refiner_core.rewards import RewardInput, compute_rewards
from flows.reporting.run.results import text_in_training

row = PromptRow("1", "What is it?", "Tell me what it is.", (1,), "{}")
said = RewardInput(row, "<answer>It is that.</answer>", True)
for reward in (RewardConfig(), RewardConfig(brevity_weight=0.5)):
    (found,) = compute_rewards([said], reward, LexicalJudge())
    stored = {f"reward/{k}": v for k, v in found.components.items()}
    stored |= {"response_text": said.text, "reward": found.total, "step": 1, "status": found.status}
    parts = {p["name"]: p["share"] for p in text_in_training(stored, reward)["parts"]}
    print(found.total, parts.get("brevity"), found.components["brevity"])
"""


STATE = """
from infra.slurm.states import facts_of, job_status_of

for state in ("EXPEDITED", "UNHEARD_OF"):
    facts = facts_of({"state": state, "id": "7"}, "squeue")
    status = job_status_of(facts, True, lambda: "")
    print(status.liveness, status.running, facts.rule.words, sep="|")
"""
_WEIGHT = 'identity(0.0, doc="of the term for short answers", legacy_value=0.0)'
_COMBINATION = "    combination: Literal"
_STATE = '"RUNNING": StateRule(False, True, None, ""),'
#: What is written, by addition and file: a whole file, or edits of one that is there.
#: CONTRIBUTING.md names the same files.
ADDITIONS: dict[str, dict[str, str | list[tuple[str, str]]]] = {
    "a kind of stage": {
        "refiner_core/contract/kinds/merge.py": KIND,
        "refiner_core/contract/config.py": [
            ('"grpo", "command"', '"grpo", "merge", "command"'),
            (
                "@dataclass(frozen=True, config=STRICT)\nclass RecipeConfig",
                f"{SECTION}class RecipeConfig",
            ),
            (
                "    command: CommandConfig",
                '    merge: MergeConfig = section(MergeConfig, doc="merging")\n'
                "    command: CommandConfig",
            ),
        ],
        "flows/stages/merge.py": FUNCTION,
    },
    "a term of the reward": {
        "refiner_core/contract/sections/judging.py": [
            (_COMBINATION, f"    brevity_weight: float = {_WEIGHT}\n{_COMBINATION}")
        ],
        "refiner_core/rewards/compute.py": [
            (
                '        "format_bonus": format_bonus',
                '        "brevity": 1 / (1 + len(plan.item.text.split())),\n'
                '        "format_bonus": format_bonus',
            )
        ],
        "refiner_core/rewards/combine.py": [
            (
                'Term("citation", weight)]',
                'Term("citation", weight)] + (\n'
                '        [Term("brevity", reward.brevity_weight)]\n'
                "        if reward.brevity_weight else []\n    )",
            )
        ],
    },
    "a state of Slurm's jobs": {
        "infra/slurm/states.py": [
            (_STATE, f'{_STATE}\n    "EXPEDITED": StateRule(False, True, None, "goes first"),')
        ]
    },
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages with one kind of stage more, one term of the reward, one state of Slurm."""
    folder = tmp_path_factory.mktemp("house")
    for package in ("flows", "sweeps", "refiner_core", "infra"):
        shutil.copytree(ROOT / package, folder / package)
    for addition in ADDITIONS.values():
        for name, changes in addition.items():
            path = folder / name
            if isinstance(changes, str):
                path.write_text(changes)
            else:
                edit(path, *changes)
    return folder


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)


def python(house: Path, code: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=house,
        env={**os.environ, "PYTHONPATH": str(house)},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMANDS = """
import contextlib, io, json, sys
from flows.cli.main import main

said = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(words)
    assert code == 0, words
    said.append(json.loads(out.getvalue()) if "--json" in words else out.getvalue())
print(json.dumps(said))
"""


def refiner(house: Path, *calls: tuple[str, ...]) -> list[Any]:
    """What commands print, one after the other in one process."""
    return json.loads(python(house, COMMANDS, json.dumps(calls)).splitlines()[-1])


STAGES = (
    "stages=[data,sft,merge,publish,evaluate]",
    "evaluate.models=[merge]",
    "evaluate.decoding=[greedy]",
)
RECIPE = ("tiny", *SMALL, *STAGES, "workspace=runs")


def test_a_kind_of_stage_is_planned_and_its_field_changes_its_models(house: Path) -> None:
    first, other, shown, explained = refiner(
        house,
        ("plan", *RECIPE, "--json"),
        ("plan", *RECIPE, "merge.share=0.25", "--json"),
        ("show", "merge"),
        ("explain", "merge", *RECIPE),
    )
    plan = {s["name"]: s["fingerprint"] for s in first["stages"]}
    assert list(plan)[:3] == ["data", "sft", "merge"]
    changed = {s["name"] for s in other["stages"] if s["fingerprint"] != plan[s["name"]]}
    assert changed == {"merge", "evaluate-merge", "publish", "card"}
    assert "share" in shown
    assert "merge" in explained


def test_a_kind_of_stage_runs_and_is_shown_reported_and_published(house: Path) -> None:
    (run,) = refiner(house, ("run", *RECIPE, "--no-server", "--json"))
    assert {s["stage"]: s["state"] for s in run["stages"]}["merge"] == "done"
    assert "merge" in {e["stage"] for e in run["evaluations"]}
    status, page = refiner(
        house,
        ("status", run["run"], "workspace=runs", "--json"),
        ("report", run["run"], "workspace=runs", "--out", "page", "--json"),
    )
    names = [s["name"] for s in status["stages"]]
    assert names.index("sft") < names.index("merge") < names.index("publish")
    assert "merge" in {row["model"] for row in page["numbers"]}
    (card,) = (house / "runs" / "published").glob("*/*/README.md")
    text = card.read_text()
    assert "Merging" in text
    assert "merged with its start" in text


def test_a_term_of_the_reward_counts_where_it_has_weight_and_is_shown(house: Path) -> None:
    without, counted = (line.split() for line in python(house, TERM).splitlines())
    assert without[1] == "None"
    brevity = float(counted[2])
    assert float(counted[0]) - float(without[0]) == pytest.approx(10 * 0.5 * brevity)
    assert float(counted[1]) == pytest.approx(10 * 0.5 * brevity)
    plain = ("plan", "tiny", "workspace=runs", "--json")
    *plans, shown = refiner(
        house, plain, (*plain, "reward.brevity_weight=0.5"), ("show", "reward.brevity_weight")
    )
    before, after = ({s["name"]: s["fingerprint"] for s in plan["stages"]} for plan in plans)
    changed = {name for name in before if before[name] != after[name]}
    assert {"grpo", "evaluate-grpo"} <= changed
    assert not changed & {"data", "sft"}
    assert "short answers" in shown


def test_a_state_of_slurm_is_a_line_of_one_table(house: Path) -> None:
    said = python(house, STATE).splitlines()
    assert said[0] == "live|True|goes first"
    assert said[1] == "live|False|a state that this version does not know"


@pytest.mark.parametrize("addition", ADDITIONS)
def test_the_guide_names_the_files_of_an_addition(addition: str) -> None:
    rows = (line.split("|") for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines())
    (named,) = [row[2] for row in rows if len(row) > 2 and row[1].strip() == addition]
    files = {name.replace("NAME", "merge") for name in re.findall(r"`([^`]+)`", named)}
    assert files == set(ADDITIONS[addition])
