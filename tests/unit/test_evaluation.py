"""Evaluations of answers: numbers, failed judges, interruption, protocols, quality."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.config import EvaluateConfig, GrpoConfig, JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, JudgeOutage
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    OnCompletion,
    PromptRow,
    SamplingParams,
)
from refiner_core.data.prepared import write_prompts
from refiner_core.evaluation.metrics import load_samples
from refiner_core.evaluation.protocol import make_protocol
from refiner_core.evaluation.results import compare_results, load_results
from refiner_core.evaluation.run import evaluate_model
from refiner_core.judges import LexicalJudge
from refiner_core.judges.context import JudgeContext, MemoryStore
from refiner_core.judges.openai import OpenAIJudge
from refiner_core.rewards.course import course_of_quality
from tests.support.judge_server import JudgeServer, score
from tests.support.rewarding import ScriptedJudge
from tests.support.stage_io import FolderStageIO
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


class FolderIO(FolderStageIO):
    """Asks for a stop before a given batch; an evaluation logs neither metrics nor rollouts."""

    def __init__(self, root: Path, *, stop_before: int | None = None) -> None:
        super().__init__(root)
        self.stop_before, self.looks = stop_before, 0

    def should_stop(self) -> bool:
        self.looks += 1
        assert not self.metrics()
        assert not self.rollouts()
        return self.stop_before is not None and self.looks >= self.stop_before


def failing_on(word: str) -> ScriptedJudge:
    """The lexical judge, which fails on texts with a word."""
    return ScriptedJudge(
        lambda asked: None if word in asked.text else LexicalJudge().judge([asked])[0].score
    )


@pytest.fixture(scope="module")
def rows() -> list[PromptRow]:
    return [prompt(n) for n in range(8)]


CONFIG = RecipeConfig(
    evaluate=EvaluateConfig(
        num_samples=3, batch_size=6, bootstrap_samples=200, temperature=0.8, top_p=0.9
    ),
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


Run = tuple[Path, Script]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, rows: list[PromptRow]) -> Run:
    """The evaluation of a perfect model."""
    return Bench(tmp_path_factory.mktemp("sound"), rows).run("grpo")


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, rows: list[PromptRow]) -> Run:
    """The evaluation of a model that breaks half of its answers."""
    return Bench(tmp_path_factory.mktemp("half"), rows).run("sft", half_broken)


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


def test_numbers_have_interval_and_protocol_and_can_be_recomputed_from_their_samples(
    half: Run,
) -> None:
    folder, script = half
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
    for part in ("evaluations", "reference"):
        for entry in load_results(folder)[part]:
            table = load_samples(folder / entry["samples_file"])
            values = [row[entry["metric"]] for row in table if row[entry["metric"]] is not None]
            assert sum(values) == pytest.approx(entry["numerator"])
            assert len(values) == entry["denominator"]
            assert entry["value"] == pytest.approx(entry["numerator"] / entry["denominator"])
    # A malformed answer scores 0: without it, broken hard answers would raise the mean.
    for metric in ("citation_f1", "reward", "rubric_score"):
        assert found["greedy", metric]["denominator"] == 8, metric
    table = load_samples(folder / "samples-greedy.parquet")
    broken = [row for row in table if row["finish_reason"] == "length"]
    assert {(row["citation_f1"], row["status"]) for row in broken} == {(0.0, "malformed")}
    assert {(p.temperature, p.top_p, p.max_new_tokens) for p in script.params} == {
        (0.0, 1.0, 300),
        (0.8, 0.9, 300),
    }


def test_a_perfect_model_beats_the_copier_under_the_same_protocol(sound: Run) -> None:
    model, floor = numbers(sound[0]), numbers(sound[0], "reference")
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


def test_every_model_meets_the_same_seeds_and_every_sample_its_own(
    bench: Bench, sound: Run, half: Run
) -> None:
    first = sound[1]
    assert first.seen == half[1].seen
    assert len({r.seed for r in first.seen}) == len(first.seen) == 8 + 24
    fewer = changed(changed(CONFIG, "evaluate", max_prompts=3), "evaluate", batch_size=2)
    _, third = bench.run("base", config=fewer)
    assert {(r.prompt_ids, r.seed) for r in third.seen} < {
        (r.prompt_ids, r.seed) for r in first.seen
    }


# ---------------------------------------------------------------- the judge fails


def test_answers_that_could_not_be_judged_are_counted_and_excluded(bench: Bench) -> None:
    config = changed(CONFIG, "judge", max_failed_share=0.5)
    folder, _ = bench.run("sft", config=config, judge=failing_on("value3"))
    found = numbers(folder)
    assert found["greedy", "judge_failed"]["numerator"] == 1
    assert found["greedy", "reward"]["denominator"] == 7
    assert found["greedy", "citation_f1"]["denominator"] == 7
    assert found["greedy", "format_valid"]["denominator"] == 8
    assert found["greedy", "oracle"]["denominator"] == 8  # no judge had a part in it


def test_too_many_failures_stop_the_evaluation(bench: Bench) -> None:
    with pytest.raises(JudgeOutage, match="max_failed_share"):
        bench.run("sft", judge=failing_on("crop"))
    assert not (bench.folder / "sft" / "results.json").exists()


# ---------------------------------------------------------------- interruption


def as_model(folder: Path, name: str) -> dict[str, Any]:
    """Results of a folder under the name of another model."""
    results = load_results(folder)
    for entry in results["evaluations"]:
        entry["stage"] = name
    return results | {"model": name}


@pytest.mark.parametrize("make_judge", [LexicalJudge, ThreadedJudge])
def test_a_stopped_evaluation_continues_to_the_same_numbers(
    bench: Bench, half: Run, make_judge: Any
) -> None:
    """A judge that streams gives the numbers of one that does not, and keeps its last batch."""
    whole = half[0]
    with pytest.raises(Interrupted, match="4 of 8 batches"):
        bench.run("grpo", half_broken, judge=make_judge(), stop_before=5)
    folder, script = bench.run("grpo", half_broken, judge=make_judge())
    assert len(script.seen) == 24  # greedy was finished before
    expected, found = as_model(whole, "grpo"), load_results(folder)
    usage = found.pop("judge_usage", None)
    found.pop("reference_fresh", None)  # noted for judges that remember answers
    assert found == expected
    for name in ("samples-greedy.parquet", "samples-sampled.parquet"):
        assert load_samples(folder / name) == load_samples(whole / name)
    if make_judge is ThreadedJudge:
        judge = ThreadedJudge()
        undisturbed = load_results(bench.run("base", half_broken, judge=judge)[0])
        assert usage == undisturbed["judge_usage"], "usage of both attempts together"
        assert usage["asked"] == sum(len(asked) for asked in judge.submitted) > 0


# ---------------------------------------------------------------- a judge that works meanwhile


def test_after_an_outage_judged_and_sampled_batches_are_kept(bench: Bench, sound: Run) -> None:
    judge = ThreadedJudge()
    judge.error = (18, JudgeOutage("no server"))  # copier and greedy have eight answers each
    with pytest.raises(JudgeOutage, match="no server"):
        bench.run("grpo", judge=judge)
    checkpoints = bench.folder / "grpo-checkpoints" / "checkpoints"
    last = max(checkpoints.iterdir(), key=lambda p: int(p.name))
    kept = {part: [int(p.stem[-6:]) for p in sorted(last.glob(f"{part}-*.json"))]
            for part in ("batch", "waiting")}  # fmt: skip
    assert kept == {"batch": [1, 2, 3, 4], "waiting": [5, 6]}
    folder, script = bench.run("grpo", judge=ThreadedJudge())
    assert len(script.seen) == 12  # of 24: one batch was being judged, the next was sampled
    assert {k: e["value"] for k, e in numbers(folder).items()} == {
        k: e["value"] for k, e in numbers(sound[0]).items()
    }


# ---------------------------------------------------------------- a judge that drifts


def test_a_judge_that_drifts_shows_in_the_fresh_reference(bench: Bench) -> None:
    """The store answers for the model; the reference is judged anew."""
    mood, store, found = {"sft": 2.0, "grpo": 0.0}, MemoryStore(), {}
    for name, said in mood.items():
        with JudgeServer(lambda body, call, said=said: score(said)) as server:
            served = JudgeConfig(
                kind="openai", model="m", base_url=server.base_url, structured_output="none"
            )
            with OpenAIJudge(served, JudgeContext(store=store)) as judge:
                folder, _ = bench.run(
                    name, config=replace(CONFIG, judge=served), judge=judge, mark=name
                )
        asked = [body["messages"][1]["content"] for body in server.bodies]
        found[name] = (load_results(folder), asked)
        scores = [numbers(folder, part)["greedy", "rubric_score"]["value"]
                  for part in ("reference", "evaluations")]  # fmt: skip
        assert scores == [said / 2, 1.0]
        assert found[name][0]["reference_fresh"] is True
        assert found[name][0]["judge_usage"]["calls"] == len(asked) > 0
    again = found["grpo"][1]
    assert len(again) < len(found["sft"][1])
    assert len(set(again)) == len(again), "each question once"
    copied = load_samples(bench.folder / "grpo" / "samples-random_copier.parquet")
    assert len(copied) == 8, "one answer a prompt"


# ---------------------------------------------------------------- protocols


@pytest.mark.parametrize(
    ("section", "values", "other"),
    [
        ("evaluate", {"temperature": 0.7}, True),
        ("evaluate", {"seed": 5}, True),
        ("grpo", {"response_length": 64}, True),
        ("judge", {"model": "lexical-2"}, True),
        ("reward", {"rubric_source": "instance+static"}, True),
        ("evaluate", {"batch_size": 7}, False),
        ("judge", {"base_url": "http://127.0.0.1:1/v1", "max_failed_share": 0.9}, False),
        ("reward", {"paper_citation_weight": 0.5}, False),
        ("model", {"name_or_path": "other"}, False),
    ],
)
def test_settings_that_change_numbers_change_the_protocol(
    rows: list[PromptRow], section: str, values: dict[str, Any], other: bool
) -> None:
    one = make_protocol(changed(CONFIG, section, **values), rows, "sampled", "d1")
    assert (one.fingerprint != make_protocol(CONFIG, rows, "sampled", "d1").fingerprint) is other


def test_prompts_of_a_protocol_are_known_by_their_content(rows: list[PromptRow]) -> None:
    one, two = (make_protocol(CONFIG, rows, "greedy", digest) for digest in ("d1", "d2"))
    assert one.fingerprint == two.fingerprint
    edited = [dataclasses.replace(rows[0], rubrics="{}"), *rows[1:]]
    assert make_protocol(CONFIG, edited, "greedy", "d1").fingerprint != one.fingerprint


# ---------------------------------------------------------------- comparison


def test_models_are_compared_prompt_by_prompt_under_equal_protocols(
    bench: Bench, half: Run
) -> None:
    first = Path(shutil.copytree(half[0], bench.folder / "sft"))
    second, _ = bench.run("grpo", config=changed(CONFIG, "evaluate", temperature=0.5))
    with pytest.raises(ConfigurationError, match=r"sampling\.temperature"):
        compare_results([first], [second])
    # An ablation of the reward is compared on all metrics but the reward.
    third, _ = bench.run("base", config=changed(CONFIG, "reward", paper_citation_weight=0.5))
    found = {(r["decoding"], r["metric"]): r for r in compare_results([third], [first])}
    valid = found["greedy", "format_valid"]
    assert valid["difference"] == pytest.approx(0.5)
    assert (valid["a"], valid["b"], valid["n"], valid["seeds"]) == (1.0, 0.5, 8, 1)
    assert valid["low"] < 0.5 < valid["high"]
    given_valid = found["greedy", "oracle_given_valid"]
    assert (given_valid["n"], given_valid["excluded"]) == (4, 4)
    assert ("greedy", "citation_f1") in found
    assert ("greedy", "reward") not in found
    with pytest.raises(ConfigurationError, match=r"differ in reward\.paper_citation_weight"):
        compare_results([first], [third], metrics=["reward"])


# ---------------------------------------------------------------- the course of quality


PROMPT = (
    "<query>q</query>\n<tool_output>\n<snippet id=S_1> the old lamp of Buldos is namp "
    "bade</snippet>\n<snippet id=S_2> a second text about something else "
    "entirely</snippet>\n</tool_output>"
)
HONEST = "<answer>Its lamp <snippet id=S_1>is called namp bade by all</snippet></answer>"
COPIED = (
    "<answer><snippet id=S_1>the old lamp of Buldos is namp bade</snippet>"
    "<snippet id=S_2>a second text about something else entirely</snippet></answer>"
)


def of(*answers: str, judgements: tuple[dict[str, object], ...] = ()) -> dict[str, float]:
    return course_of_quality([PROMPT] * len(answers), answers, [judgements] * len(answers))


def test_copying_is_seen() -> None:
    assert of(HONEST)["quality/copied_share"] < 0.3
    assert of(COPIED)["quality/copied_share"] == 1.0


def test_repetition_and_text_outside_are_seen() -> None:
    claim = "<snippet id=S_1>namp bade</snippet>"
    found = of(f"<answer>{claim}{claim}</answer>")
    assert (found["quality/claims"], found["quality/repeated_share"]) == (1.0, 0.5)
    assert of(HONEST)["quality/outside_share"] == 0.0
    assert of(f"{'x' * 3000}{HONEST}")["quality/outside_share"] > 0.9
    assert of("no answer at all")["quality/outside_share"] == 1.0


def test_citations_are_counted_if_they_are_sound() -> None:
    assert of(COPIED)["quality/cited_share"] == 1.0
    assert of("<answer>plain</answer>")["quality/cited_share"] == 0.0


def test_judgements_without_a_score_and_criteria_that_all_meet() -> None:
    met = {"kind": "rubric", "criterion": "a", "polarity": "positive", "score": 1.0}
    avoided = {"kind": "rubric", "criterion": "b", "polarity": "negative", "score": 0.0}
    unusable = {"kind": "rubric", "criterion": "c", "polarity": "positive", "score": None}
    found = of(HONEST, HONEST, judgements=(met, avoided, unusable))
    assert found["quality/unusable_judgements"] == pytest.approx(1 / 3)
    assert found["quality/saturated"] == pytest.approx(2 / 3)


def test_a_step_without_answers_or_judgements_has_no_such_metrics() -> None:
    assert of() == {}
    assert not {"quality/saturated", "quality/unusable_judgements"} & of(HONEST).keys()
