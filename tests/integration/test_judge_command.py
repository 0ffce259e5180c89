"""`refiner judge` with judges of known defects, a sound judge, and servers that refuse."""

import json
from pathlib import Path

import pytest

from tests.support.command import called
from tests.support.judge_server import JudgeServer, Reply, completion
from tests.support.known_judges import KnownJudge
from tests.support.recorded_run import RecordedRun

_DEFECTS = {
    "": set(),
    "early": {"order of criteria"},
    "first source": {"order of sources"},
    "long": {"length"},
    "obedient": {"obeys hostile answers"},
    "dice": {"not repeatable"},
    "mute": {"failing"},
}


KEY = "sk-very-secret-0123456789"


def nowhere(tmp_path: Path) -> str:
    return f"workspace={tmp_path}/none"


def at(server: JudgeServer, *more: str) -> list[str]:
    usual = ("judge.model=m", "judge.max_retries=0", "judge.concurrency=16")
    return [f"judge.base_url={server.base_url}", *usual, *more]


@pytest.mark.parametrize("defect", _DEFECTS)
def test_a_judges_defect_is_found_and_no_other(defect: str, tmp_path) -> None:
    with JudgeServer(KnownJudge(defect)) as server:
        words = [nowhere(tmp_path), *at(server, "judge.form=batched"), "--repeats=2", "--json"]
        done = called("judge", "report", *words)
    assert done.code == 0, done.stderr
    report = done.json
    found = {f["name"] for f in report["findings"] if f["verdict"] == "found"}
    assert found == _DEFECTS[defect], report["findings"]
    allowed = {"found", "not found", *(["not clear"] if defect == "dice" else [])}
    assert {f["verdict"] for f in report["findings"]} <= allowed
    if defect == "":
        for kind, gold in report["gold"].items():
            assert gold["raw"]["numerator"] == gold["raw"]["denominator"], kind
        assert report["resistance"]["resisted"]["numerator"] == 40
    if defect == "early":
        assert report["order_of_criteria"]["shift"]["value"] > 0.2
    if defect == "mute":
        cost = report["costs"]["rubric"]
        assert (cost["failed"], cost["reasons"]) == (6, {"unparsable": 2})
        assert report["gold"]["rubric"]["left_out"] == 6


# ---------------------------------------------------------------- reports


def test_the_lexical_judge_needs_no_server_and_a_served_one_needs_its_own(tmp_path) -> None:
    done = called("judge", "report", nowhere(tmp_path), "--sample=3", "--repeats=1")
    assert done.code == 0
    assert "3 questions, 6 answers" in done.stdout
    assert "| not repeatable | not asked |" in done.stdout
    assert "--out DIR" in done.stderr
    assert not (tmp_path / "none").exists(), "nothing is written uninvited"
    words = ["judge.kind=openai", "judge.model=m", "judge.serve.engine=vllm"]
    done = called("judge", "report", nowhere(tmp_path), *words)
    assert done.code == 2
    assert "refiner judge servers" in done.stderr


def test_two_judges_are_compared_and_the_files_hold_the_printed_report(tmp_path) -> None:
    with JudgeServer(KnownJudge()) as sound, JudgeServer(KnownJudge("first source")) as other:
        words = [nowhere(tmp_path), *at(sound), "--repeats=2", f"--out={tmp_path}/kept", "--json"]
        against = ["--against", f"judge.base_url={other.base_url}", "--against", "judge.model=n"]
        done = called("judge", "report", *words, *against)
    assert done.code == 0, done.stderr
    report = done.json
    assert report["judges"]["rubric"]["kappa"]["value"] == 1.0
    assert report["judges"]["citation_recall"]["kappa"]["value"] < 0.9
    assert report["gold"]["citation_recall"]["kappa"]["value"] == 1.0
    assert (report["judge"]["model"], report["against"]["model"]) == ("m", "n")
    written = json.loads((tmp_path / "kept" / "report.json").read_text())
    assert written == {k: v for k, v in report.items() if k not in ("id", "folder")}
    text = (tmp_path / "kept" / "report.md").read_text()
    assert "## Agreement with the other judge" in text
    rubric = report["costs"]["rubric"]
    assert rubric["calls"] == 60
    assert rubric["seconds"] > 0
    assert rubric["completion_tokens"] == 60 * 7


def test_repeats_bypass_the_store(tmp_path: Path) -> None:
    """With a store in between every judge would be perfectly repeatable."""
    with JudgeServer(KnownJudge()) as server:
        words = [nowhere(tmp_path), *at(server), "--sample=1", "--repeats=3", "--json"]
        first = called("judge", "report", *words)
        asked = len(server.bodies)
        called("judge", "report", *words)
        assert len(server.bodies) == 2 * asked
        said = [json.dumps(body["messages"]) for body in server.bodies]
    assert first.json["repeatability"]["all"]["repeats"] == 3
    assert said.count(said[0]) == 6


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_run_is_measured_on_its_own_answers(evaluated: bool, tmp_path) -> None:
    run = RecordedRun(tmp_path / "runs", "reward.rubric_source=instance+static")
    run.data()
    run.train("sft")
    run.train("grpo")
    if evaluated:
        run.evaluate("evaluate-grpo")
    where = f"workspace={tmp_path}/runs"
    words = ["judge", "report", run.run.run, where, "--repeats=2", "--sample=4"]
    done = called(*words, "--json")
    assert done.code == 0, done.stderr
    report = done.json
    assert report["material"]["name"] == f"answers of run {run.run.run}"
    assert 1 <= report["material"]["questions"] <= 4
    assert report["material"]["requests"]["rubric"] > 0
    assert report["gold"] == {}  # no gold scores
    assert report["repeatability"]["all"]["identical"]["value"] == 1.0
    folder = Path(report["folder"])
    assert folder.parent == tmp_path / "runs" / "judge-reports"
    assert (folder / "report.md").is_file()
    assert called(*words, "--json").json["folder"] == str(folder)
    other = called(*words, "reward.static_rubrics=reader-v1", "--json").json
    assert other["folder"] != str(folder), "other questions are another report"


# ---------------------------------------------------------------- one question by hand


def test_a_question_by_hand_shows_score_and_tokens_or_the_reply(tmp_path) -> None:
    usage = {"prompt_tokens": 321, "completion_tokens": 9}
    given = ["--question=Which crop?", "--answer=Wheat.", "--criterion=Names wheat."]
    with JudgeServer(lambda body, call: completion('{"score": 1}', usage=usage)) as server:
        done = called("judge", "ask", nowhere(tmp_path), *at(server), *given)
        assert "Names wheat." in server.bodies[0]["messages"][-1]["content"]
    assert done.code == 0, done.stderr
    for said in ("score        0.5", "321 read, 9 written", "schema       taken"):
        assert said in done.stdout
    with JudgeServer(lambda body, call: completion("The answer is fine, I think.")) as server:
        done = called("judge", "ask", nowhere(tmp_path), *at(server))
    assert done.code == 1
    assert "The answer is fine" in done.stdout


def test_a_missing_server_and_a_refused_key_are_named(tmp_path, monkeypatch) -> None:
    words = ["judge.base_url=http://127.0.0.1:9/v1", "judge.model=m", "judge.outage_patience_s=0.2"]
    done = called("judge", "ask", nowhere(tmp_path), *words)
    assert done.code == 7
    assert "127.0.0.1:9" in done.stderr
    monkeypatch.setenv("REFINER_JUDGE_API_KEY", KEY)
    refusal = Reply(status=401, body=f"Incorrect API key provided: {KEY}")
    with JudgeServer(lambda body, call: refusal) as server:
        done = called("judge", "ask", nowhere(tmp_path), *at(server))
    assert done.code != 0
    assert "REFINER_JUDGE_API_KEY" in done.stderr
    assert KEY not in done.stdout + done.stderr


@pytest.mark.parametrize("replies", ["0.5", "1"])
def test_a_judge_on_another_scale_is_found_before_a_run_asks_it(replies, tmp_path) -> None:
    """Rubrics take 0.5 and 1, sources only 0 or 2. A run asks both."""
    with JudgeServer(lambda body, call: completion(f'{{"score": {replies}}}')) as server:
        done = called("judge", "ask", nowhere(tmp_path), *at(server))
        assert done.code == 1
        assert f"the score is none of (0.0, {'1.0, ' * (replies == '0.5')}2.0): {replies}" in (
            done.stdout + done.stderr
        )
        looked = called("doctor", "tiny", *at(server), "judge.kind=openai",
                         "--only=judge")  # fmt: skip
    assert looked.code == 8
    assert f"2.0): {replies}" in looked.stdout
