"""Evaluation: what is measured, under which protocol, and what may be compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.config import EvaluateConfig, GrpoConfig, JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, JudgeOutage
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Judgement,
    JudgeRequest,
    OnCompletion,
    Progress,
    PromptRow,
    SamplingParams,
    SavedCheckpoint,
)
from refiner_core.data.prepared import write_prompts
from refiner_core.evaluation.metrics import load_samples
from refiner_core.evaluation.protocol import make_protocol
from refiner_core.evaluation.results import compare_results, load_results
from refiner_core.evaluation.run import evaluate_model
from refiner_core.judges import LexicalJudge
from refiner_core.judges.openai import OpenAIJudge
from refiner_core.judges.surroundings import MemoryStore, Surroundings
from tests.support.judge_server import JudgeServer, score
from tests.support.threaded_judge import ThreadedJudge

END = 0


class Letters:
    """A character is a token; token 0 ends a text."""

    all_special_ids = (END,)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(i) for i in ids)


def prompt(number: int, *, truth: bool = True) -> PromptRow:
    entity, value = f"Entity{number}", f"value{number}"
    text = (
        f"<query>What is the crop of {entity}?</query>\n<tool_output>"
        f"<snippet id=S_a{number}>The crop of {entity} is {value}.</snippet>\n"
        f"<snippet id=S_b{number}>Rivers run to the sea.</snippet></tool_output>"
    )
    fact = {"entity": entity, "attribute": "crop", "value": value, "ids": [f"S_a{number}"]}
    rubrics = {
        "positive_rubrics": [{"title": "crop", "description": f"States that it is {value}"}],
        "negative_rubrics": [],
    }
    return PromptRow(
        sample_id=f"row-{number}",
        question=f"What is the crop of {entity}?",
        prompt_text=text,
        prompt_ids=tuple(ord(c) for c in text),
        rubrics=json.dumps(rubrics),
        truth={"facts": [fact], "gold_ids": [f"S_a{number}"]} if truth else None,
    )


def good_answer(row: PromptRow) -> str:
    n = row.sample_id.removeprefix("row-")
    return f"<answer><snippet id=S_a{n}>The crop of Entity{n} is value{n}.</snippet></answer>"


class Script:
    """A generator that answers from a function of (row, sample seed)."""

    def __init__(self, rows: Sequence[PromptRow], answer: Any) -> None:
        self.rows = {row.prompt_ids: row for row in rows}
        self.answer, self.seen = answer, list[GenerationRequest]()
        self.params: list[SamplingParams] = []

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        self.seen += requests
        self.params.append(params)
        made = []
        for request in requests:
            text = self.answer(self.rows[request.prompt_ids], request.seed)
            cut = text.endswith("…")
            ids = tuple(ord(c) for c in text) + (() if cut else (END,))
            made.append(Completion(ids, (0.0,) * len(ids), "length" if cut else "stop"))
        if on_completion is not None:
            for index in reversed(range(len(made))):
                on_completion(index, made[index])
        return made


class FolderIO:
    """A StageIO over a folder; stops on request before a given batch."""

    def __init__(self, root: Path, *, stop_before: int | None = None) -> None:
        self.root, self.stop_before, self.looks = root, stop_before, 0
        self.saw: list[Progress] = []

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        raise AssertionError("an evaluation has no steps to log")

    def save_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        raise AssertionError("an evaluation has no rollouts")

    def latest_checkpoint(self) -> SavedCheckpoint | None:
        steps = [int(p.name) for p in self.root.glob("*")]
        return SavedCheckpoint(max(steps), self.root / str(max(steps))) if steps else None

    def room_again(self, error: OSError) -> bool:
        return False

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        path = self.root / str(step)
        path.mkdir(parents=True)
        yield path

    def progress(self, progress: Progress) -> None:
        self.saw.append(progress)

    def should_stop(self) -> bool:
        self.looks += 1
        return self.stop_before is not None and self.looks >= self.stop_before


class FailingJudge:
    """Fails on whatever mentions a word; the lexical judge does the rest."""

    def __init__(self, word: str) -> None:
        self.word = word

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        return [
            Judgement("failed", None, "timeout") if self.word in request.text else scored
            for request, scored in zip(requests, LexicalJudge().judge(requests), strict=True)
        ]


@pytest.fixture
def rows() -> list[PromptRow]:
    return [prompt(n) for n in range(8)]


CONFIG = RecipeConfig(
    evaluate=EvaluateConfig(num_samples=3, batch_size=6, bootstrap_samples=200),
    grpo=GrpoConfig(response_length=300),
)


class Bench:
    """Runs evaluations in a temporary folder."""

    def __init__(self, folder: Path, rows: Sequence[PromptRow]) -> None:
        self.folder, self.rows = folder, rows
        write_prompts(folder / "data" / "rl_test.parquet", rows)

    def run(
        self,
        name: str,
        answer: Any = None,
        *,
        config: RecipeConfig = CONFIG,
        judge: Any = None,
        stop_before: int | None = None,
        mark: str = "",
    ) -> tuple[Path, Script]:
        script = Script(self.rows, answer or (lambda row, _: good_answer(row)))
        output = self.folder / name
        evaluate_model(
            config,
            data_dir=self.folder / "data",
            data_digest="d1",
            model_ref="none",
            model_name=name,
            output_dir=output,
            io=FolderIO(self.folder / f"{name}-checkpoints", stop_before=stop_before),
            judge=judge or LexicalJudge(),
            generator=script,
            tokenizer=Letters(),
            mark=mark,
        )
        return output, script


@pytest.fixture
def bench(tmp_path: Path, rows: list[PromptRow]) -> Bench:
    return Bench(tmp_path, rows)


def numbers(folder: Path, part: str = "evaluations") -> dict[tuple[str, str], dict[str, Any]]:
    return {(e["decoding"], e["metric"]): e for e in load_results(folder)[part]}


def half_broken(row: PromptRow, _: int) -> str:
    """Even rows are answered well; odd ones forget the closing tag."""
    text = good_answer(row)
    return text if int(row.sample_id[-1]) % 2 == 0 else text.replace("</answer>", "…")


def changed(config: RecipeConfig, section: str, **values: Any) -> RecipeConfig:
    part = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: part})


# ---------------------------------------------------------------- what is measured


def test_numbers_come_with_interval_protocol_and_evidence(bench: Bench) -> None:
    folder, _ = bench.run("sft", half_broken)
    found = numbers(folder)
    valid = found["greedy", "format_valid"]
    assert (valid["stage"], valid["value"], valid["n"]) == ("sft", 0.5, 8)
    assert (valid["numerator"], valid["denominator"], valid["interval"]) == (4.0, 8, "wilson")
    assert valid["low"] < 0.5 < valid["high"]
    assert found["greedy", "stop_rate"]["value"] == 0.5
    assert found["greedy", "oracle"]["value"] == pytest.approx(0.5)
    assert found["greedy", "oracle_given_valid"]["value"] == 1.0
    assert found["greedy", "oracle_given_valid"]["n"] == 4
    sampled = found["sampled", "format_valid"]
    assert (sampled["n"], sampled["denominator"]) == (8, 24)
    assert sampled["interval"] == "bootstrap over prompts"
    assert sampled["protocol"] != valid["protocol"]
    assert load_results(folder)["protocols"][valid["protocol"]]["num_prompts"] == 8


def test_every_number_can_be_recomputed_from_its_file(bench: Bench) -> None:
    folder, _ = bench.run("sft", half_broken)
    for part in ("evaluations", "reference"):
        for entry in load_results(folder)[part]:
            table = load_samples(folder / entry["samples_file"])
            values = [row[entry["metric"]] for row in table if row[entry["metric"]] is not None]
            assert sum(values) == pytest.approx(entry["numerator"])
            assert len(values) == entry["denominator"]
            assert entry["value"] == pytest.approx(entry["numerator"] / entry["denominator"])


def test_a_malformed_answer_scores_zero_instead_of_leaving(bench: Bench) -> None:
    """Leaving it out would reward a policy for breaking its hard answers."""
    folder, _ = bench.run("sft", half_broken)
    found = numbers(folder)
    for metric in ("citation_f1", "reward", "rubric_score"):
        assert found["greedy", metric]["denominator"] == 8, metric
    table = load_samples(folder / "samples-greedy.parquet")
    broken = [row for row in table if row["finish_reason"] == "length"]
    assert {row["citation_f1"] for row in broken} == {0.0}
    assert {row["status"] for row in broken} == {"malformed"}


def test_a_perfect_model_beats_the_copier_under_the_same_protocol(bench: Bench) -> None:
    folder, _ = bench.run("grpo")
    model, floor = numbers(folder), numbers(folder, "reference")
    assert {e["stage"] for e in floor.values()} == {"random_copier"}
    for decoding in ("greedy", "sampled"):
        assert floor[decoding, "format_valid"]["value"] == 1.0
        assert model[decoding, "oracle"]["value"] == 1.0 > floor[decoding, "oracle"]["value"]
        assert model[decoding, "oracle"]["protocol"] == floor[decoding, "oracle"]["protocol"]


def test_rows_without_rubrics_or_evidence_are_not_zeros(tmp_path: Path) -> None:
    """A 0 for what was never asked would pull down the mean of what was."""
    rows = [prompt(n) for n in range(4)]
    rows[0] = dataclasses.replace(rows[0], rubrics='{"positive_rubrics": []}')
    rows[1] = dataclasses.replace(rows[1], prompt_text="no evidence at all")
    folder, _ = Bench(tmp_path, rows).run("sft")
    found = numbers(folder)
    assert found["greedy", "rubric_score"]["denominator"] == 3
    assert found["greedy", "citation_f1"]["denominator"] == 3
    assert found["greedy", "reward"]["denominator"] == 4


# ---------------------------------------------------------------- sampling


def test_every_model_meets_the_same_seeds_and_every_sample_its_own(bench: Bench) -> None:
    _, first = bench.run("sft")
    _, second = bench.run("grpo", half_broken)
    assert first.seen == second.seen
    assert len({r.seed for r in first.seen}) == len(first.seen) == 8 + 24
    fewer = changed(changed(CONFIG, "evaluate", max_prompts=3), "evaluate", batch_size=2)
    _, third = bench.run("base", config=fewer)
    assert {(r.prompt_ids, r.seed) for r in third.seen} < {
        (r.prompt_ids, r.seed) for r in first.seen
    }


def test_greedy_is_greedy_and_sampled_as_configured(bench: Bench) -> None:
    _, script = bench.run("sft", config=changed(CONFIG, "evaluate", temperature=0.8, top_p=0.9))
    assert {(p.temperature, p.top_p, p.max_new_tokens) for p in script.params} == {
        (0.0, 1.0, 300),
        (0.8, 0.9, 300),
    }


# ---------------------------------------------------------------- the judge fails


def test_answers_that_could_not_be_judged_are_counted_and_excluded(bench: Bench) -> None:
    config = changed(CONFIG, "judge", max_failed_share=0.5)
    folder, _ = bench.run("sft", config=config, judge=FailingJudge("value3"))
    found = numbers(folder)
    assert found["greedy", "judge_failed"]["numerator"] == 1
    assert found["greedy", "reward"]["denominator"] == 7
    assert found["greedy", "citation_f1"]["denominator"] == 7
    assert found["greedy", "format_valid"]["denominator"] == 8
    assert found["greedy", "oracle"]["denominator"] == 8  # no judge had a part in it


def test_too_many_failures_stop_the_evaluation(bench: Bench) -> None:
    with pytest.raises(JudgeOutage, match="max_failed_share"):
        bench.run("sft", judge=FailingJudge("crop"))
    assert not (bench.folder / "sft" / "results.json").exists()


# ---------------------------------------------------------------- interruption


def test_an_interrupted_evaluation_goes_on_where_it_was(bench: Bench) -> None:
    whole, _ = bench.run("sft", half_broken)
    with pytest.raises(Interrupted, match="4 of 8 batches"):
        bench.run("grpo", half_broken, stop_before=5)
    folder, script = bench.run("grpo", half_broken)
    assert len(script.seen) == 24  # greedy was finished before
    expected, found = load_results(whole), load_results(folder)
    for entry in expected["evaluations"]:
        entry["stage"] = "grpo"
    assert found["evaluations"] == expected["evaluations"]
    assert load_samples(folder / "samples-greedy.parquet") == load_samples(
        whole / "samples-greedy.parquet"
    )


# ---------------------------------------------------------------- a judge that works meanwhile


def test_a_judge_that_streams_gives_the_numbers_of_one_that_does_not(bench: Bench) -> None:
    plain, _ = bench.run("sft", half_broken)
    judge = ThreadedJudge()
    streamed, _ = bench.run("grpo", half_broken, judge=judge)
    expected, found = load_results(plain), load_results(streamed)
    for entry in expected["evaluations"]:
        entry["stage"] = "grpo"
    usage = found.pop("judge_usage")
    assert found == expected | {"model": "grpo"}
    assert usage["asked"] == sum(len(asked) for asked in judge.submitted) > 0
    for name in ("samples-greedy.parquet", "samples-sampled.parquet"):
        assert load_samples(streamed / name) == load_samples(plain / name)


def test_the_next_batch_is_sampled_while_the_judge_ends_the_one_before(bench: Bench) -> None:
    judge = ThreadedJudge()
    known: dict[int, int] = {}  # answers asked about so far: of them waited for, as a batch begins

    def note(row: PromptRow, _: int) -> str:
        known.setdefault(len(judge.submitted), judge.waited)
        return good_answer(row)

    bench.run("sft", note, judge=judge)
    # Batches of 6 and 2 answers (the copier's, then greedy), and four of 6 (sampled).
    assert known == {8: 6, 14: 8, 16: 14, 22: 16, 28: 22, 34: 28}
    assert judge.waited == len(judge.submitted) == 40


def test_a_stop_keeps_the_batch_that_is_being_judged(bench: Bench) -> None:
    whole, _ = bench.run("sft", half_broken, judge=ThreadedJudge())
    with pytest.raises(Interrupted, match="4 of 8 batches"):
        bench.run("grpo", half_broken, judge=ThreadedJudge(), stop_before=5)
    folder, script = bench.run("grpo", half_broken, judge=ThreadedJudge())
    assert len(script.seen) == 24
    expected, found = load_results(whole), load_results(folder)
    for entry in expected["evaluations"]:
        entry["stage"] = "grpo"
    assert found["evaluations"] == expected["evaluations"]
    assert found["judge_usage"] == expected["judge_usage"]  # of both attempts together


@pytest.mark.parametrize("error", [JudgeOutage("nobody is there"), Interrupted("asked to stop")])
def test_a_judge_that_ends_keeps_what_was_judged_and_what_was_sampled(
    bench: Bench, error: Exception
) -> None:
    whole, _ = bench.run("sft")
    judge = ThreadedJudge()
    judge.error = (18, error)  # copier and greedy have eight answers each
    with pytest.raises(type(error), match=str(error)):
        bench.run("grpo", judge=judge)
    folder, script = bench.run("grpo", judge=ThreadedJudge())
    assert len(script.seen) == 12  # of 24: one batch was being judged, and the next was sampled
    assert {k: e["value"] for k, e in numbers(folder).items()} == {
        k: e["value"] for k, e in numbers(whole).items()
    }


@pytest.mark.parametrize(("part", "batches"), [("waiting", [5, 6]), ("batch", [1, 2, 3, 4])])
def test_a_checkpoint_says_what_is_sampled_and_what_is_judged(
    bench: Bench, part: str, batches: list[int]
) -> None:
    """Whatever it was that ended the evaluation, no more is sampled again than one batch."""
    judge = ThreadedJudge()
    judge.error = (18, JudgeOutage("nobody is there"))
    with pytest.raises(JudgeOutage):
        bench.run("sft", judge=judge)
    folder = max((bench.folder / "sft-checkpoints").iterdir(), key=lambda p: int(p.name))
    assert [int(p.stem[-6:]) for p in sorted(folder.glob(f"{part}-*.json"))] == batches


# ---------------------------------------------------------------- a judge that drifts


class Drifting:
    """A served judge behind a store that outlives evaluations; ``mood`` is what it answers."""

    def __init__(self) -> None:
        self.mood, self.store = 2.0, MemoryStore()
        self.server = JudgeServer(lambda body, call: score(self.mood))

    def run(
        self, bench: Bench, name: str, mark: str, config: RecipeConfig = CONFIG
    ) -> tuple[dict[str, Any], int]:
        """An evaluation's results, and how many calls it took."""
        served = JudgeConfig(kind="openai", model="m", base_url=self.server.base_url)
        served = replace(served, structured_output="none")
        before = len(self.server.bodies)
        with OpenAIJudge(served, Surroundings(store=self.store)) as judge:
            config = replace(config, judge=served)
            folder, _ = bench.run(name, config=config, judge=judge, mark=mark)
        return load_results(folder), len(self.server.bodies) - before


@pytest.fixture
def drifting() -> Iterator[Drifting]:
    judge = Drifting()
    with judge.server:
        yield judge


def rubric_score(results: dict[str, Any], part: str) -> float:
    entries = (e for e in results[part] if e["metric"] == "rubric_score")
    return float(next(e for e in entries if e["decoding"] == "greedy")["value"])


def test_a_judge_that_drifts_shows_in_the_reference_though_the_store_answers_for_the_model(
    bench: Bench, drifting: Drifting
) -> None:
    first, calls = drifting.run(bench, "sft", "monday")
    drifting.mood = 0.0
    second, again = drifting.run(bench, "grpo", "tuesday")
    assert (rubric_score(first, "reference"), rubric_score(second, "reference")) == (1.0, 0.0)
    assert rubric_score(first, "evaluations") == rubric_score(second, "evaluations") == 1.0
    assert first["reference_fresh"] is second["reference_fresh"] is True
    assert 0 < again < calls
    assert second["judge_usage"]["calls"] == again
    asked = {b["messages"][1]["content"] for b in drifting.server.bodies[-again:]}
    copied = load_samples(bench.folder / "grpo" / "samples-random_copier.parquet")
    assert len(copied) == 8, "one answer a prompt"
    assert len(asked) == again, "each question once"


# ---------------------------------------------------------------- protocols


def fingerprint(config: RecipeConfig, rows: Sequence[PromptRow], decoding: Any = "sampled") -> str:
    return make_protocol(config, rows, decoding, "d1").fingerprint


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("evaluate", {"temperature": 0.7}),
        ("evaluate", {"num_samples": 8}),
        ("evaluate", {"seed": 5}),
        ("grpo", {"response_length": 64}),
        ("grpo", {"stop_strings": ("</answer>",)}),
        ("judge", {"model": "lexical-2"}),
        ("reward", {"rubric_source": "instance+static"}),
        ("reward", {"rubric_aggregation": "signed_mean"}),
    ],
)
def test_what_changes_a_number_changes_the_protocol(
    rows: list[PromptRow], section: str, values: dict[str, Any]
) -> None:
    assert fingerprint(changed(CONFIG, section, **values), rows) != fingerprint(CONFIG, rows)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("evaluate", {"batch_size": 7}),
        ("judge", {"base_url": "http://127.0.0.1:1/v1", "max_failed_share": 0.9}),
        ("reward", {"paper_citation_weight": 0.5}),
        ("grpo", {"beta": 0.1}),
        ("model", {"name_or_path": "other"}),
    ],
)
def test_what_does_not_keeps_numbers_comparable(
    rows: list[PromptRow], section: str, values: dict[str, Any]
) -> None:
    assert fingerprint(changed(CONFIG, section, **values), rows) == fingerprint(CONFIG, rows)


def test_prompts_are_known_by_content_not_by_who_wrote_them(rows: list[PromptRow]) -> None:
    one, two = (make_protocol(CONFIG, rows, "greedy", digest) for digest in ("d1", "d2"))
    assert one.fingerprint == two.fingerprint
    edited = [dataclasses.replace(rows[0], rubrics="{}"), *rows[1:]]
    assert make_protocol(CONFIG, edited, "greedy", "d1").fingerprint != one.fingerprint


# ---------------------------------------------------------------- comparison


def test_two_models_are_compared_on_the_same_prompts(bench: Bench) -> None:
    good, _ = bench.run("grpo")
    poor, _ = bench.run("sft", half_broken)
    found = {(r["decoding"], r["metric"]): r for r in compare_results([good], [poor])}
    valid = found["greedy", "format_valid"]
    assert valid["difference"] == pytest.approx(0.5)
    assert (valid["a"], valid["b"], valid["n"], valid["seeds"]) == (1.0, 0.5, 8, 1)
    assert valid["low"] < 0.5 < valid["high"]
    given_valid = found["greedy", "oracle_given_valid"]
    assert (given_valid["n"], given_valid["excluded"]) == (4, 4)


def test_other_protocols_are_refused_and_the_field_is_named(bench: Bench) -> None:
    first, _ = bench.run("sft")
    second, _ = bench.run("grpo", config=changed(CONFIG, "evaluate", temperature=0.5))
    with pytest.raises(ConfigurationError, match=r"sampling\.temperature"):
        compare_results([first], [second])


def test_numbers_of_older_rules_are_not_compared_with_those_of_newer_ones(bench: Bench) -> None:
    """A citation_f1 in which each repetition of a claim counts is another number."""
    first, _ = bench.run("sft")
    file = first / "results.json"
    older = json.loads(file.read_text())
    older["protocols"] = {f"old-{k}": {**v, "version": 1} for k, v in older["protocols"].items()}
    for entry in older["evaluations"]:
        entry["protocol"] = f"old-{entry['protocol']}"
    second, _ = bench.run("grpo")
    file.write_text(json.dumps(older))
    with pytest.raises(ConfigurationError, match="differ in version"):
        compare_results([first], [second])


def test_arms_of_a_reward_ablation_are_compared_on_all_but_the_reward(bench: Bench) -> None:
    first, _ = bench.run("sft")
    second, _ = bench.run("grpo", config=changed(CONFIG, "reward", paper_citation_weight=0.5))
    metrics = {r["metric"] for r in compare_results([first], [second])}
    assert "citation_f1" in metrics
    assert "reward" not in metrics
    with pytest.raises(ConfigurationError, match=r"differ in reward\.paper_citation_weight"):
        compare_results([first], [second], metrics=["reward"])
