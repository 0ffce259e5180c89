"""`refiner rescore`: stored rollouts under other rubrics, judges and weights."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from flows.cli.judge import rescore_command
from infra.attempt.attempt import AttemptRun
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Judge,
    OnCompletion,
    PromptRow,
    SamplingParams,
)
from refiner_core.data.prepared import load_prompts
from refiner_core.data.random_baseline import random_baseline_answers
from refiner_core.generation.load import load_tokenizer
from refiner_core.judges import build_judge, prompting
from refiner_core.rewards import RewardInput, compute_rewards
from refiner_core.training.batches import prompt_batch
from refiner_core.training.grpo import train_grpo
from refiner_core.training.rollouts.rollout import RolloutSample, form_groups, rollout_rows
from tests.support.command import start, wait_until
from tests.support.judge_server import JudgeServer, Reply, digest_of, score
from tests.support.recorded_run import RecordedRun

SIZE, PER_STEP, STEPS = 4, 3, 3
OWN = ("stages=[data,grpo,evaluate]", "reward.rubric_source=instance+static")


def said(prompt: PromptRow, step: int, index: int) -> str:
    """An answer; one in seven is malformed, and all differ."""
    number = random.Random(f"{prompt.sample_id}/{step}/{index}")
    if number.random() < 1 / 7:
        return "I do not know."
    text = random_baseline_answers(prompt.prompt_text, number)
    return text.replace("</answer>", f" Remark {step}.{index} ends this.</answer>")


def write_rollouts(run: RecordedRun, attempt: AttemptRun, judge: Judge, step: int) -> None:
    """A step's rollouts as training stores them: its own samples, rewards, advantages, rows."""
    data = run.workspace.output_dir(run.stage("data").id)
    prompts = load_prompts(data / "rl_train.parquet")
    first = (step - 1) * PER_STEP % len(prompts)
    samples = [
        RolloutSample(
            position,
            index,
            prompts[position],
            Completion((1, 2), (-0.5, -0.5), "stop" if (step + index) % 5 else "length"),
            said(prompts[position], step, index),
        )
        for position in range(first, first + PER_STEP)
        for index in range(SIZE)
    ]
    items = [RewardInput(s.prompt, s.text, s.stopped) for s in samples]
    results = compute_rewards(items, attempt.config.reward, judge)
    how = attempt.config.grpo.advantage_normalization_type
    batch = form_groups(samples, results, size=SIZE, normalization=how)
    attempt.io.save_rollouts(step, rollout_rows(step, batch))


def make_run(root: Path, *overrides: str, steps: int = STEPS) -> RecordedRun:
    """A run that has trained for some steps."""
    run = RecordedRun(root, *OWN, *overrides)
    if run.workspace.output_dir(run.stage("data").id) is None:
        run.data()

    def work(attempt: AttemptRun) -> dict[str, Any]:
        judge = build_judge(attempt.config.judge)
        for step in range(1, steps + 1):
            write_rollouts(run, attempt, judge, step)
        return {"steps": steps}

    run.do("grpo", work)
    return run


def rescore(root: Path, *words: str) -> Result:
    done = CliRunner().invoke(rescore_command, [*words, f"workspace={root}"])
    if done.exception is not None:
        raise done.exception
    return done


def found(root: Path, *words: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(rescore(root, *words, "--json").stdout)
    return value


def only(document: dict[str, Any], setting: str) -> dict[str, Any]:
    (entry,) = [c for c in document["comparisons"] if c["setting"] == setting]
    return dict(entry)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return make_run(tmp_path_factory.mktemp("rescore") / "runs")


# ---------------------------------------------------------------- with what is stored


def test_the_runs_own_settings_give_back_what_was_stored_to_the_bit(run: RecordedRun) -> None:
    document = found(run.workspace.root)
    fidelity = document["fidelity"]["grpo"]
    assert fidelity["exact"]
    assert fidelity["totals"] == fidelity["advantages"] == STEPS * PER_STEP * SIZE
    assert document["comparisons"] == [], "nothing else was asked for"


def rows_of(document: dict[str, Any], setting: str) -> list[dict[str, Any]]:
    rows = pq.read_table(Path(document["folder"]) / "rewards.parquet").to_pylist()
    return [row for row in rows if row["setting"] == setting]


def test_an_own_file_of_rubrics_is_tried_without_a_run(run: RecordedRun, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("rubrics:\n- {title: Remark, description: 'Says \"remark\"'}\n")
    document = found(run.workspace.root, "--rubrics", f"static:{mine}", "--rubrics", "none")
    setting = next(
        s for s in document["settings"] if s["name"].endswith("mine.yaml") or "mine" in s["name"]
    )
    assert setting["reward"]["rubric_source"] == "static"
    entry = only(document, setting["name"])
    assert entry["means"]["rubric"]["setting"]["value"] > 0.5, "nearly all answers have a remark"
    assert only(document, "rubrics=none")["means"]["rubric"]["setting"] is None
    (bill,) = document["judging"]
    assert bill["calls"] == 0


def test_only_some_steps_or_some_groups(run: RecordedRun) -> None:
    last = found(run.workspace.root, "--steps", "last:1", "--citation-weight", "0")
    assert last["policies"][0]["steps"] == [STEPS]
    with pytest.raises(ConfigurationError, match="last:0 is not understood"):
        rescore(run.workspace.root, "--steps", "last:0")
    two = found(run.workspace.root, "--steps", "1,3-9", "--citation-weight", "0")
    assert two["policies"][0]["steps"] == [1, 3]
    some = found(run.workspace.root, "--sample", "2", "--citation-weight", "0")
    assert some["policies"][0]["groups"] == 2
    assert some["policies"][0]["rollouts"] == 2 * SIZE, "whole groups, else no advantage is right"


def test_files_and_screen_have_the_same_numbers(run: RecordedRun) -> None:
    document = found(run.workspace.root, "--citation-weight", "1", "--rubrics", "v3")
    folder = Path(document.pop("folder"))
    assert json.loads((folder / "rescore.json").read_text()) == document
    again = rescore(run.workspace.root, "--citation-weight", "1", "--rubrics", "v3")
    for entry in document["comparisons"]:
        changed = entry["best_changed"]
        assert f"{changed['numerator']:.0f}/{changed['denominator']}" in again.stdout
    assert "to the bit" in again.stdout
    assert "No server was asked" in again.stdout
    assert f"Files: {folder}" in again.stderr


def test_options_are_settings_of_their_own_or_combined(run: RecordedRun) -> None:
    root = run.workspace.root
    options = ["--rubrics", "none", "--citation-weight", "0", "--citation-weight", "1"]
    names = [s["name"] for s in found(root, *options, "--sample", "1")["settings"]]
    assert names == ["own", "rubrics=none", "citation_weight=0", "citation_weight=1"]
    crossed = [s["name"] for s in found(root, *options, "--cross", "--sample", "1")["settings"]]
    assert crossed[1:] == ["rubrics=none, citation_weight=0", "rubrics=none, citation_weight=1"]
    given = found(
        root, "reward.non_stop_penalty=true", "reward.verification_reward=1", "--sample", "9"
    )
    assert len(given["settings"]) == 2, "keys together are one setting"
    assert only(given, given["settings"][1]["name"])["means"]["total"]["setting"]["value"] < 1


# ---------------------------------------------------------------- with a server of judges


def opinion(body: dict[str, Any], _: int) -> Reply:
    """``plain`` says yes or no by what is asked, ``same`` says the same, ``contrary`` the opposite;
    ``broken`` cannot be read where ``plain`` says yes to rubrics."""
    yes = digest_of(body) % 2
    if body["model"] == "contrary":
        return score(2.0 * (1 - yes))
    if body["model"] == "broken" and yes and "<criterion" in body["messages"][1]["content"]:
        return score(10)
    return score(2.0 * yes)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, JudgeServer]]:
    """A run that the judge ``plain`` has rewarded, by rubrics alone."""
    root = tmp_path_factory.mktemp("judged") / "runs"
    with JudgeServer(opinion) as server:
        make_run(
            root,
            *("judge.kind=openai", "judge.model=plain", f"judge.base_url={server.base_url}"),
            *("judge.concurrency=16", "reward.apply_paper_citation_reward=false"),
        )
        yield root, server


def calls_of(server: JudgeServer, act: Callable[[], Any]) -> tuple[Any, int]:
    before = len(server.bodies)
    value = act()
    return value, len(server.bodies) - before


def test_a_contrary_judge_turns_everything_around(judged: tuple[Path, JudgeServer]) -> None:
    """Every score s becomes 1 - s, so every total t becomes 10 - t: exact expectations."""
    root, _ = judged
    document = found(root, "--judge", "model=contrary")
    entry = only(document, "judge=contrary")
    own = {(r["group"], r["sample_index"]): r for r in rows_of(document, "own")}
    other = rows_of(document, "judge=contrary")
    scored = [r for r in other if r["status"] == "scored"]
    for row in scored:
        before = own[row["group"], row["sample_index"]]
        assert row["total"] == pytest.approx(10.0 - before["total"])
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in other:
        groups.setdefault(row["group"], []).append(row)
    lost = sum(
        not best(members) & best([own[m["group"], m["sample_index"]] for m in members])
        for members in groups.values()
    )
    assert entry["best_changed"]["numerator"] == lost > 0
    kinds = {a["kind"]: a for a in entry["agreement"]}
    assert kinds["rubric"]["raw"]["numerator"] == 0
    assert kinds["rubric"]["kappa"]["value"] < 0
    assert kinds["rubric"]["pairs"] == kinds["rubric"]["raw"]["denominator"]
    assert {a["kind"] for a in entry["agreement"]} >= {"rubric", "citation_recall"}


def best(members: list[dict[str, Any]]) -> set[int]:
    highest = max(m["total"] for m in members)
    return {m["sample_index"] for m in members if m["total"] > highest - 1e-9}


def test_a_judge_that_fails_gives_no_number(judged: tuple[Path, JudgeServer]) -> None:
    root, _ = judged
    keys = ["judge.max_retries=0", "--judge", "model=broken"]
    document = found(root, *keys)
    entry = only(document, "judge=broken")
    rows = rows_of(document, "judge=broken")
    unscored = [r for r in rows if r["status"] == "unscored"]
    assert entry["unscored"]["setting"] == len(unscored) > 0
    assert all(r["total"] is None and r["advantage"] is None for r in unscored)
    bill = next(b for b in document["judging"] if b["judge"] == "broken")
    assert bill["failed"] > 0
    assert "are unscored" in rescore(root, *keys).stdout


def test_a_dry_run_counts_calls_and_makes_none(tmp_path: Path) -> None:
    with JudgeServer(opinion) as server:
        root = tmp_path / "runs"
        make_run(root, steps=1)
        spec = f"model=plain,base_url={server.base_url}"
        plan = found(root, "--judge", spec, "--dry-run")
        assert plan["calls"] > 0
        assert not server.bodies
        assert not (root / "rescores").exists()
        shown = rescore(root, "--judge", spec, "--dry-run").stdout
        assert f"{plan['calls']} calls" in shown
        document = found(root, "--judge", spec)
        assert len(server.bodies) == plan["calls"]
        bill = next(b for b in document["judging"] if b["judge"] == "plain")
        assert bill["calls"] == plan["calls"]
        assert found(root, "--judge", spec, "--dry-run")["calls"] == 0, "the store knows them now"


def test_many_calls_need_a_confirmation(
    judged: tuple[Path, JudgeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, server = judged
    monkeypatch.setattr("flows.cli.judge.ASK_ABOVE", 10)
    words = ("--judge", "model=plain,revision=other")
    with pytest.raises(ConfigurationError, match=r"takes \d+ new judge calls.*--yes"):
        calls_of(server, lambda: found(root, *words))
    _, calls = calls_of(server, lambda: found(root, *words, "--yes"))
    assert calls > 10


def test_prompts_that_were_edited_since_are_not_taken_for_those_of_the_run(tmp_path: Path) -> None:
    """What is known of the run's judge was said under the old prompts; new questions would be asked
    under the new ones, as if one judge had said both."""
    prompts, root = tmp_path / "prompts", tmp_path / "runs"
    shutil.copytree(Path(prompting.__file__).parent / "prompts" / "v1", prompts)
    with JudgeServer(opinion) as server:
        judge = ("judge.kind=openai", "judge.model=plain", f"judge.base_url={server.base_url}")
        make_run(root, *judge, f"judge.prompt={prompts}", steps=1)
        with (prompts / "rubric.user.md").open("a") as file:
            file.write("\nBe lenient.\n")

        def calls(*words: str) -> int:
            return calls_of(server, lambda: found(root, *words))[1]

        assert calls("--citation-weight", "0.5") == 0, "what is known needs no prompts"
        with pytest.raises(ConfigurationError, match="have changed since"):
            rescore(root, "--rubrics", "reader-v1")
        other = shutil.copytree(prompts, tmp_path / "lenient")
        assert calls("--judge", f"prompt={other}") > 0


def test_stored_judgements_need_no_server(tmp_path: Path) -> None:
    """The server of a run that served its judge ends with the run."""
    root = tmp_path / "runs"
    with JudgeServer(opinion) as server:
        judge = ("judge.kind=openai", "judge.model=plain", f"judge.base_url={server.base_url}")
        make_run(root, *judge, steps=1)
        other = ("--judge", "model=same", "--citation-weight", "0.5")
        asked = found(root, *other)
    gone = ("judge.base_url=null", "judge.serve.engine=vllm")
    (bill,) = found(root, "--citation-weight", "0.5", *gone)["judging"]
    assert (bill["reused"], bill["asked"]) == (bill["questions"], 0)
    again = found(root, *other, *gone)
    assert [b["calls"] for b in again["judging"]] == [0, 0], "all of it is in the store"
    assert again["comparisons"] == asked["comparisons"]
    with pytest.raises(ConfigurationError, match="No server of the judge third is running"):
        rescore(root, "--judge", "model=third", *gone)


def test_results_that_cannot_be_written_are_reported_before_the_judge_is_paid(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "runs", steps=1)
    (tmp_path / "file").write_text("mine")
    with JudgeServer(opinion) as server:
        words = ["--judge", f"model=plain,base_url={server.base_url}", "--out"]
        with pytest.raises(ConfigurationError, match="--out DIR"):
            rescore(tmp_path / "runs", *words, str(tmp_path / "file" / "below"))
        assert server.bodies == []
    assert (tmp_path / "file").read_text() == "mine"


def test_ctrl_c_loses_nothing_that_was_judged(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with JudgeServer(lambda body, call: replace(opinion(body, call), delay_s=0.05)) as server:
        make_run(root, steps=1)
        words = ["rescore", f"workspace={root}", "judge.concurrency=4"]
        words += ["--judge", f"model=plain,base_url={server.base_url}"]
        process = start(*words)
        wait_until(lambda: len(server.bodies) >= 24, "some calls")
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=400)
        assert process.returncode == 6
        assert "the same command" in told
        before = len(server.bodies)
        document = found(root, *words[2:])
        bill = next(b for b in document["judging"] if b["judge"] == "plain")
        assert bill["stored"] >= before - 8, "only what was on its way is asked again"
        assert len(server.bodies) == before + bill["calls"]


# ---------------------------------------------------------------- several policies, evaluations


def test_policies_on_the_same_prompts_form_one_matrix(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    a = make_run(root)
    b = make_run(root, "seed=7", "reward.paper_citation_weight=0.9")
    document = found(root, a.run.run, b.run.run, "--rubrics", "none", "--metric", "citation")
    matrix = document["matrix"]
    assert len(matrix["cells"]) == 2
    assert [s["name"][:6] for s in document["settings"]] == ["own of", "own of", "rubric"]
    for cells in matrix["cells"].values():
        assert set(cells) == {s["name"] for s in document["settings"]}
        assert all(cell["denominator"] for cell in cells.values())
    # Both have said the same, so no setting can tell them apart.
    assert all(set(ranks.values()) == {1} for ranks in matrix["ranks"].values())


def test_models_are_compared_on_the_samples_of_their_evaluations(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs")
    run.data()
    run.train("sft")
    run.train("grpo")
    run.evaluate("evaluate-base", quality=0.0)
    run.evaluate("evaluate-grpo", quality=0.7)
    words = ("--from", "evaluation", "--citation-weight", "1")
    document = found(run.workspace.root, *words)
    assert list(document["matrix"]["cells"]) == ["base greedy", "grpo greedy"]
    assert all(f["exact"] and f["advantages"] is None for f in document["fidelity"].values())
    assert document["matrix"]["ranks"]["own"] == {"grpo greedy": 1, "base greedy": 2}
    alone = found(run.workspace.root, *words, "--model", "grpo")
    assert [p["name"] for p in alone["policies"]] == ["grpo greedy"]


# ---------------------------------------------------------------- runs that are not whole


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "40-50"], "no rollouts of steps 40-50.*1 to 3"),
        (["--steps", "some"], "--steps some is not understood"),
        (["--judge", "kind=openai,model=m"], "a running server"),
        (["--rubrics", "v33"], "no rubric set or file 'v33'"),
        (["grpo.beta=0.1"], "does not know 'grpo.beta=0.1'"),
        (["--from", "evaluation"], "no finished evaluation"),
    ],
)
def test_invalid_options_are_refused_with_a_fix(
    run: RecordedRun, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rescore(run.workspace.root, *words)


class Talker:
    """A generator of well-formed answers; the rest of training is real.

    Every third answer is cut off.
    """

    def __init__(self, prompts: list[PromptRow]) -> None:
        self._prompts = prompts
        self._tokenizer = load_tokenizer("builtin:tiny", RecipeConfig().model)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        completions = []
        for number, request in enumerate(requests):
            prompt = self._prompts[number * len(self._prompts) // len(requests)]
            text = random_baseline_answers(prompt.prompt_text, random.Random(request.seed))
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            end = [] if number % 3 == 0 else [self._tokenizer.eos_token_id]
            reason: Any = "stop" if end else "length"
            completions.append(Completion((*ids, *end), (-1.0,) * (len(ids) + len(end)), reason))
            if on_completion is not None:
                on_completion(number, completions[-1])
        return completions


def test_rollouts_of_real_training_come_out_as_they_were_stored(tmp_path: Path) -> None:
    """Through the real loop: tokens to text, rewards, advantages, files."""
    grpo = ("grpo.num_training_steps=1", "grpo.num_unique_prompts_rollout=3")
    grpo += ("grpo.num_samples_per_prompt_rollout=4",)
    run = RecordedRun(tmp_path / "runs", *OWN, *grpo)
    run.data()

    def work(attempt: AttemptRun) -> dict[str, Any]:
        data = attempt.inputs["data"]
        prompts = load_prompts(data / "rl_train.parquet")
        chosen = prompt_batch(attempt.config.seed, len(prompts), 3, 0)[-1]
        return train_grpo(
            attempt.config,
            data_dir=data,
            model_ref="builtin:tiny",
            output_dir=attempt.output_dir,
            io=attempt.io,
            judge=build_judge(attempt.config.judge),
            generator=Talker([prompts[i] for i in chosen]),
        )

    run.do("grpo", work)
    document = found(run.workspace.root, "--citation-weight", "1", "--rubrics", "v3")
    fidelity = document["fidelity"]["grpo"]
    assert fidelity["exact"], fidelity["warning"]
    assert (fidelity["totals"], fidelity["advantages"]) == (12, 12)
    entry = only(document, "citation_weight=1")
    assert entry["no_signal"]["setting"]["value"] == 1.0, "copies are cited without a fault"
    assert entry["no_signal"]["baseline"]["value"] < 1.0
    assert entry["kendall"] is None, "no order, so no correlation, and no number for it"
