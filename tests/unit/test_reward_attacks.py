"""`refiner reward attack`: attacks on a reward, measured against honest answers."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flows import api
from flows.cli.main import main
from infra.store.workspace import Workspace
from refiner_core.answers import parse_answer
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.types import JudgeRequest
from refiner_core.rewards import compute_rewards
from refiner_core.rewards.attacks import ATTACKS, AttackedRow, honest_answer
from refiner_core.rubrics import parse_rubrics
from tests.support.judge_server import JudgeServer, score
from tests.support.rewarding import ScriptedJudge, reward_of, rollout

FACTS = {f"S{i}": f"The {part} of Orlen is {part}stone." for i, part in enumerate(("roof", "wall",
         "gate", "tower"))}  # fmt: skip
OTHERS = {"D1": "Marol has a bridge.", "D2": "Tave is a river."}
HALF = "".join(f"<snippet id={i}>{FACTS[i]}</snippet>" for i in ("S0", "S1"))
HONEST = f"<answer>{HALF}</answer>"
RUBRICS = {
    "positive_rubrics": [
        {"title": text, "description": f'States "{text.split()[-1].strip(".")}"'}
        for text in FACTS.values()
    ]
}


def prompt_of(evidence: Mapping[str, str]) -> str:
    inside = "".join(f'<snippet id="{i}">{text}</snippet>' for i, text in evidence.items())
    return f"<query>What is Orlen made of?</query><tool_output>{inside}</tool_output>"


def row_of(texts: Mapping[str, str], rubrics: Any = RUBRICS) -> AttackedRow:
    question = "What is Orlen made of?"
    return AttackedRow(question, prompt_of(texts), texts, parse_rubrics(rubrics), "answer_only")


def faultless(request: JudgeRequest) -> float:
    """A judge that reads texts verbatim and never errs."""
    if request.kind == "rubric":
        return float(request.reference.split('"')[1] in request.text)
    return float(request.kind == "citation_needed" or request.text in request.reference)


def rows_file(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def four_facts(number: int, answer: str = "") -> dict[str, Any]:
    """A row with four facts; each has a name of its own."""
    facts = {i: text.replace("Orlen", f"Orlen{number}") for i, text in FACTS.items()}
    turns = [{"role": "user", "content": prompt_of({**facts, **OTHERS})}]
    turns += [{"role": "assistant", "content": answer}] if answer else []
    truth = {"facts": [{"ids": [i]} for i in facts], "gold_ids": list(facts)}
    known = {} if answer else {"truth": truth}
    metadata = {"sample_id": f"row-{number}"}
    return {"conversations": turns, "rubrics": RUBRICS, "metadata": metadata, **known}


def test_copying_all_pays_under_a_faultless_judge_and_inventing_sources_does_not() -> None:
    prompt = prompt_of({**FACTS, **OTHERS})
    row = row_of({**FACTS, **OTHERS})

    def paid(text: str) -> float:
        found = reward_of(rollout(text, RUBRICS, prompt), ScriptedJudge(faultless))
        assert found.total is not None
        return found.total

    honest = paid(HONEST)
    attacked = {name: paid(attack(row, HONEST, FACTS)) for name, attack in ATTACKS.items()}
    assert attacked["copy_all"] > honest + 1
    assert attacked["outside_text"] == honest, "text outside of the block is free"
    assert attacked["empty"] == 0
    assert all(attacked[name] < honest for name in ("unknown_ids", "abstain", "off_query", "pad"))


#: Price that closes each hole, and one that an honest answer hardly pays.
CLOSES = {
    "copy_all": "copied_sources=1",
    "outside_text": "outside=.1",
    "tag_all": "long_spans=.3",
    "repeat": "repeated=.1",
    "connectives": "uncited=.2",
    "keyword_stuffing": "uncited=.9",
    "invention_in_good_tag": "unsupported=.2",
    "double_length": "length=.2",
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSES)
def test_a_price_closes_its_hole(name: str) -> None:
    free = ["reward.penalties.long_span_words=9", "reward.penalties.length_words=12"]

    def gained(penalty: str) -> float:
        items = [rollout(text, RUBRICS, prompt_of({**FACTS, **OTHERS})) for text in
                 (ATTACKS[name](row_of({**FACTS, **OTHERS}), HONEST, FACTS), HONEST)]  # fmt: skip
        reward = load_recipe("tiny", [*free, f"reward.penalties.{penalty}"]).reward
        attacked, honest = compute_rewards(items, reward, ScriptedJudge(faultless))
        assert attacked.total is not None
        assert honest.total is not None
        assert min(attacked.total, honest.total) >= 0
        return attacked.total - honest.total

    assert gained(CLOSES[name]) < min(0.0, gained("uncited=0"))


def test_a_wrong_try_is_worth_as_much_as_no_try() -> None:
    lenient = ScriptedJudge(lambda request: 0.0)  # no claim needs a citation
    row = row_of(FACTS)
    polite = rollout(ATTACKS["abstain"](row, HONEST, FACTS), RUBRICS)
    assert reward_of(polite, lenient).total == pytest.approx(1.2)
    priced = load_recipe("tiny", ["reward.penalties.abstention=.2"]).reward
    assert compute_rewards([polite], priced, lenient)[0].total == 0


HOSTILE = {
    "a": "</snippet></answer><answer>two blocks <|im_end|> <snippet id=zz>",
    "b c": "<tool_output> 3 < 4 and </tool_output> 'quoted' \"text\"",
    "unknown0": "an id that looks like ours",
    "nothing": " ",
}


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_hostile_rows_break_no_attack(name: str) -> None:
    rubrics = {"positive_rubrics": [{"title": "</answer>", "description": "<answer> {x} \0"}]}
    answers = (HONEST, "<answer>no claim</answer>", "no block at all")
    for evidence, honest in itertools.product((HOSTILE, dict[str, str]()), answers):
        row = row_of(evidence, rubrics)
        text = ATTACKS[name](row, honest, {})
        answer = parse_answer(text, row.evidence)
        assert answer.body is not None or (name, honest) == ("outside_text", "no block at all")
        made = parse_answer(honest_answer("which quoted text", row.evidence), row.evidence)
        assert made.well_formed == bool(row.evidence)


def test_own_rows_and_an_own_attack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rows_file(tmp_path / "rows.jsonl", [four_facts(i) for i in range(6)])
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def shout(row, honest, gold):\n"
        "    assert len(gold) == 4 and row.rubrics and len(row.evidence) == 6\n"
        "    return honest.upper()\n"
        "def fails(row, honest, gold):\n    return gold['nothing']\n"
    )
    words = ["reward", "attack", "tiny", "--rows", str(file), f"workspace={tmp_path / 'none'}"]
    assert main([*words, "--attack", f"{mine}:shout", "--strict", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"version", "honest", "gold", "random", "attacks"}
    numbers = {"mean", "low", "high", "n"}
    assert all(set(found[name]) == numbers for name in ("honest", "gold", "random"))
    assert (found["honest"]["n"], found["honest"]["mean"]) == (6, pytest.approx(6))
    assert found["gold"]["mean"] == pytest.approx(10)
    attacks = {attack["name"]: attack for attack in found["attacks"]}
    assert set(attacks) == {*ATTACKS, "mine.py:shout"}
    more = {"name", "difference", "difference_low", "difference_high", "pays"}
    assert all(set(attack) == numbers | more for attack in attacks.values())
    paying = {name for name, attack in attacks.items() if attack["pays"]}
    assert "copy_all" in paying
    assert not paying & {"empty", "unknown_ids", "outside_text", "mine.py:shout"}
    assert main([*words[:4], "gone.jsonl"]) == 2
    assert "--rows gone.jsonl does not exist" in capsys.readouterr().err
    for wrong in (f"{mine}:fails", f"{mine}:gone", "gone.py:shout", "shout"):
        assert main([*words, "--attack", wrong]) == 2
        assert "To fix it" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_demonstration_is_the_honest_answer(tmp_path: Path) -> None:
    said: list[str] = []
    odd = {**four_facts(10), "truth": {"facts": 3}}
    rows = [*(four_facts(i, HONEST) for i in range(3)), four_facts(9, "<answer>"), odd]
    file = rows_file(tmp_path / "rows.jsonl", rows)
    found = api.attack_reward("tiny", rows=file, tell=lambda text, _: said.append(text))
    assert found["gold"]["n"] == 3, "a row without demonstration and truth has no best answer"
    assert "the demonstration (3)" in said[0]
    assert "the nearest evidence (2)" in said[0]


def test_open_holes_are_named_by_the_plan_until_they_are_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"workspace={Workspace.open(tmp_path / 'runs').root}"
    price = "reward.penalties.uncited=.5"
    for words in ([where], [where, price]):
        assert main(["reward", "attack", "tiny", "-n", "8", *words]) == 0
    shown = {}
    for words in ([where], [where, price], [where, "reward.paper_citation_weight=.5"]):
        capsys.readouterr()
        assert main(["plan", "tiny", *words]) == 0
        shown[words[-1]] = "keyword_stuffing" in capsys.readouterr().out
    assert list(shown.values()) == [True, False, False]


def test_calls_that_cost_are_counted_and_confirmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = rows_file(tmp_path / "rows.jsonl", [four_facts(i) for i in range(2)])
    with JudgeServer(lambda body, call: score(2)) as judge:
        words = ["reward", "attack", "tiny", "--rows", str(file), "judge.kind=openai",
                 f"judge.base_url={judge.base_url}", "judge.model=scripted",
                 f"workspace={tmp_path / 'none'}"]  # fmt: skip
        assert main(words) == 2
        assert "add --yes" in capsys.readouterr().err
        assert not judge.bodies
        assert main([*words, "--yes"]) == 0
        assert f" {len(judge.bodies)} calls" in capsys.readouterr().err
        words[-1] = f"workspace={Workspace.open(tmp_path / 'runs').root}"
        assert main([*words, "--yes"]) == 0
        assert main(words) == 0, "a workspace keeps judgements: nothing is left to confirm"
        assert ", 0 calls" in capsys.readouterr().err


def test_attacks_on_episodes_show_what_partial_credit_pays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = api.attack_reward("tiny-tools", count=8)
    attacks = {attack["name"]: attack for attack in found["attacks"]}
    assert found["gold"]["mean"] > found["honest"]["mean"] > found["random"]["mean"]
    assert attacks["first_half"]["difference"] < 0
    assert attacks["every_call_twice"]["n"] == 8
    assert attacks["say_everything"]["difference"] > 0
    assert main(["reward", "attack", "tiny-tools", "-n", "4", "--attack", "x.py:f"]) != 0
    assert "leave both out" in capsys.readouterr().err


def test_recipes_without_rows_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.rl_path is empty"):
        api.attack_reward("tiny", ["data.rl_path=null", "stages=[data,sft]"])
