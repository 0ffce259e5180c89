"""The stage `sample`: it keeps what was sampled, and no interruption changes or loses it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.config import JudgeConfig, RecipeConfig, SampleConfig
from refiner_core.contract.errors import (
    DataError,
    EnvironmentOutage,
    Interrupted,
    JudgeOutage,
    StageFailed,
)
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.sections.environment import EnvironmentConfig
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Judge,
    Judgement,
    JudgeRequest,
    OnCompletion,
    SamplingParams,
)
from refiner_core.data.prepared import load_demonstrations, load_prompts, write_prompts
from refiner_core.environments.conversation import prompt_ids
from refiner_core.environments.protocol import row_of_task
from refiner_core.judges import LexicalJudge
from refiner_core.rejection.attempts import RejectionAttempt, load_attempts
from refiner_core.rejection.stage import sample_attempts
from tests.support.counting import RULES, TOOLS, Counting, call, task_of
from tests.support.qwen_like import qwen_like
from tests.support.stage_io import FolderStageIO
from tests.support.threaded_judge import ThreadedJudge
from tests.support.tiny_training import (
    AnsweringSampler,
    recipe,
    save_answering_inputs,
    tiny_model,
    tiny_tokenizer,
)

FILES = ("attempts.parquet", "report.json", "sft_train.parquet")


def answer_recipe(**sample: Any) -> RecipeConfig:
    """Four attempts at each of seven prompts, two prompts a batch."""
    rule = SampleConfig(attempts=4, generation_batch_size=8, temperature=1.0, **sample)
    config = recipe(grpo={"response_length": 6})
    return replace(config, sample=rule, rft=config.sft, judge=JudgeConfig(max_failed_share=0.0))


class Bench:
    """Runs the stage in a folder."""

    generator: Any
    environment: Any = None

    def __init__(self, root: Path) -> None:
        self.root = save_answering_inputs(root)
        self.tokenizer = tiny_tokenizer(answers=True)
        self.fail_at_call: int | None = None

    @property
    def calls(self) -> int:
        """Batches that the last run has begun to sample."""
        return int(self.generator.calls)

    def run(
        self,
        config: RecipeConfig,
        name: str = "out",
        *,
        io: FolderStageIO | None = None,
        judge: Judge | None = None,
    ) -> dict[str, Any]:
        self.generator = AnsweringSampler()
        self.generator.model, self.generator.fail_at_call = tiny_model(), self.fail_at_call
        return self.sample(config, name, io, judge or LexicalJudge())

    def sample(
        self, config: RecipeConfig, name: str, io: FolderStageIO | None, judge: Judge | None
    ) -> dict[str, Any]:
        (self.root / name).mkdir(exist_ok=True)
        return sample_attempts(
            config,
            data_dir=self.root / "data",
            model_ref=str(self.root / "model"),
            output_dir=self.root / name,
            io=io or self.io(name),
            judge=judge,
            generator=self.generator,
            tokenizer=self.tokenizer,
            environment=self.environment,
        )

    def io(self, name: str) -> FolderStageIO:
        return FolderStageIO(self.root / f"io-{name}")

    def files(self, name: str = "out") -> dict[str, bytes]:
        return {file: (self.root / name / file).read_bytes() for file in FILES}

    def attempts(self, name: str = "out") -> list[RejectionAttempt]:
        return load_attempts(self.root / name / "attempts.parquet")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("straight"))
    bench.run(answer_recipe(success=0.5, min_partial=0.1))
    return bench


LOW = {"success": 0.5, "min_partial": 0.1}


# ---------------------------------------------------------------- what it leaves


def test_what_is_kept_is_what_was_sampled_token_by_token(straight: Bench) -> None:
    prompts = {row.sample_id: row for row in load_prompts(straight.root / "data/rl_train.parquet")}
    kept = {f"{a.sample_id}#{a.index}": a for a in straight.attempts() if a.kept}
    rows = load_demonstrations(straight.root / "out" / "sft_train.parquet")
    assert [row.sample_id for row in rows] == list(kept)
    assert rows
    for row in rows:
        attempt = kept[row.sample_id]
        prompt = prompts[attempt.sample_id].prompt_ids
        assert row.input_ids == prompt + attempt.token_ids
        assert row.loss_mask == (False,) * len(prompt) + (True,) * len(attempt.token_ids)
        assert row.input_ids[-1] == 1  # the token that ends an answer is learnt, too
    assert not (straight.root / "out" / "sft_val.parquet").exists()
    assert sorted(p.name for p in (straight.root / "out").iterdir()) == sorted(FILES)


def test_every_attempt_is_stored_with_its_seed_score_and_reason(straight: Bench) -> None:
    found = straight.attempts()
    assert [(a.sample_id, a.index) for a in found] == [
        (f"prompt-{p}", i) for p in range(7) for i in range(4)
    ]
    for attempt in found:
        assert attempt.seed == derive_seed(7, "sample", attempt.sample_id, attempt.index)
        assert (attempt.status == "malformed") == (attempt.seed % 5 == 0)
        assert attempt.kept == (attempt.why in ("full_success", "best_partial"))
        if attempt.status == "malformed":
            assert attempt.why == "malformed"
        elif attempt.reward is not None:
            # Without evidence in these prompts 0.8 x 10 is all there is to earn.
            assert attempt.score == pytest.approx(attempt.reward / 8.0)
    assert {"malformed", "not_full", "full_success"} <= {a.why for a in found}


def test_the_report_adds_up(straight: Bench) -> None:
    report = json.loads((straight.root / "out" / "report.json").read_text())
    found = straight.attempts()
    assert report["attempts"]["total"] == report["attempts"]["measured"] == 28
    assert sum(report["acceptance"].values()) == report["prompts"]["total"] == 7
    kept = [a for a in found if a.kept]
    assert report["kept"]["demonstrations"] == len(kept)
    assert sum(report["not_kept"].values()) + len(kept) == 28
    assert report["tokens"]["sampled"] == sum(len(a.token_ids) for a in found)
    assert report["tokens"]["loss"] == sum(len(a.token_ids) for a in kept)
    metrics = straight.io("out").metrics()
    assert [line["sample/batch"] for line in metrics] == [1, 2, 3, 4]
    assert sum(line["sample/kept"] for line in metrics) == len(kept)


def test_a_further_attempt_changes_no_other_one(straight: Bench, tmp_path: Path) -> None:
    other = Bench(tmp_path)
    more = replace(answer_recipe(**LOW).sample, attempts=5, generation_batch_size=100)
    other.run(replace(answer_recipe(), sample=more))
    tokens = {a.key: a.token_ids for a in other.attempts()}
    assert all(tokens[a.key] == a.token_ids for a in straight.attempts())


# ---------------------------------------------------------------- interruptions


@pytest.mark.parametrize("lacking", [False, True])
def test_a_crash_in_a_batch_changes_no_bit(straight: Bench, tmp_path, lacking) -> None:
    """A batch that the checkpoint lacks is sampled again, too."""
    bench, io = Bench(tmp_path), FolderStageIO(tmp_path / "io")
    bench.fail_at_call = 3
    with pytest.raises(RuntimeError, match="node went away"):
        bench.run(answer_recipe(**LOW), io=io)
    assert io.checkpoint_steps() == [1, 2]
    if lacking:
        (tmp_path / "io" / "checkpoints" / "2" / "batch-000001.parquet").unlink()
    bench.fail_at_call = None
    bench.run(answer_recipe(**LOW), io=io)
    assert bench.calls == 2 + lacking  # of four batches
    assert bench.files() == straight.files()
    if not lacking:
        assert io.comparable_metrics() == straight.io("out").comparable_metrics()


def test_an_outage_of_a_streaming_judge_loses_no_attempt(straight: Bench, tmp_path) -> None:
    bench, io = Bench(tmp_path), FolderStageIO(tmp_path / "io")
    judge = ThreadedJudge()
    judge.error = (9, JudgeOutage("nobody answers"))
    with pytest.raises(JudgeOutage, match="nobody answers"):
        bench.run(answer_recipe(**LOW), io=io, judge=judge)
    sampled = bench.calls
    assert sampled in (2, 3)  # the next batch is sampled while one is judged
    report = bench.run(answer_recipe(**LOW), io=io, judge=ThreadedJudge())
    assert bench.calls == 4 - sampled
    assert bench.files()["sft_train.parquet"] == straight.files()["sft_train.parquet"]
    assert bench.files()["attempts.parquet"] == straight.files()["attempts.parquet"]
    assert report["judge"]["asked"] >= 40


class Refusing:
    """A judge that fails on one prompt's answers."""

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        good = LexicalJudge().judge(requests)
        failed = Judgement("failed", None, "no score")
        return [
            failed if r.question == "question 2" else j for r, j in zip(requests, good, strict=True)
        ]


def test_attempts_that_the_judge_failed_on_count_apart(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    config = answer_recipe(**LOW)
    with pytest.raises(JudgeOutage, match="attempts"):
        bench.run(config, judge=Refusing())
    tolerant = replace(config, judge=JudgeConfig(max_failed_share=0.5))
    report = bench.run(tolerant, "tolerant", judge=Refusing())
    failed = [a for a in bench.attempts("tolerant") if a.status == "unscored"]
    assert {a.sample_id for a in failed} == {"prompt-2"}
    assert report["not_kept"]["unscored"] == len(failed) > 0
    assert report["attempts"]["measured"] == 28 - len(failed)


def test_nothing_kept_is_refused_and_every_attempt_is_stored(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(DataError, match=r"sample\.min_partial"):
        bench.run(answer_recipe(success=1.0, min_partial=2.0))
    assert len(bench.attempts()) == 28


# ---------------------------------------------------------------- episodes


class Counter:
    """A generator that plays :data:`PLAYED` by the seed of each turn."""

    def __init__(self, config: RecipeConfig, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts: dict[int, str] = {}
        self._firsts, self.asked = set[int](), set[int]()
        for sample_id, plans in PLAYED.items():
            for index, texts in enumerate(plans):
                seed = derive_seed(config.seed, "sample", sample_id, index)
                self._firsts.add(derive_seed(seed, "turn", 0))
                for turn, text in enumerate(texts):
                    self.texts[derive_seed(seed, "turn", turn)] = text

    @property
    def begun(self) -> int:
        """Episodes whose first turn was sampled."""
        return len(self._firsts & self.asked)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        made = []
        self.asked |= {request.seed for request in requests}
        for index, request in enumerate(requests):
            text = self.texts.get(request.seed, "words")
            ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            made.append(Completion(ids, (-0.5,) * len(ids), "stop"))
            if on_completion is not None:
                on_completion(index, made[-1])
        return made


SOLVED = (call(by=1), call(by=1), call("finish"))
AT_ONCE = (call(by=2), call("finish"))
HALF = (call(by=1), call("finish"))
GIVES_UP = (call("finish"),)
WORDS = ("I would rather talk.",)
#: One full success twice over, another way, half, nothing; and a turn that is no call.
PLAYED: dict[str, tuple[Sequence[str], ...]] = {
    "counting/t0": (SOLVED, AT_ONCE, SOLVED, GIVES_UP),
    "counting/t1": (HALF, WORDS, GIVES_UP, HALF),
    "counting/t2": (GIVES_UP, GIVES_UP, WORDS, GIVES_UP),
}


class EpisodeBench(Bench):
    """Three tasks, one task a batch."""

    def __init__(self, root: Path, *, deterministic: bool = True, **environment: Any) -> None:
        self.root, self.tokenizer = root, qwen_like()
        self.environment = Counting()
        self.environment.deterministic = deterministic
        self.config = replace(
            recipe(grpo={"response_length": 64, "max_token_length": 1024}),
            environment=EnvironmentConfig(name="desk", **environment),
            sample=SampleConfig(attempts=4, generation_batch_size=4, min_partial=0.5),
        )
        self.write(*(task_of(n) for n in range(3)))

    def write(self, *tasks: Any) -> None:
        ids = prompt_ids(self.tokenizer, RULES, TOOLS)
        (self.root / "data").mkdir(exist_ok=True)
        path = self.root / "data" / "rl_train.parquet"
        write_prompts(path, [row_of_task(task, ids) for task in tasks])

    def play(self, name: str = "out", io: FolderStageIO | None = None) -> dict[str, Any]:
        self.generator = Counter(self.config, self.tokenizer)
        return self.sample(self.config, name, io, None)


def test_episodes_are_kept_by_tools_success_and_partial_score(tmp_path: Path) -> None:
    bench = EpisodeBench(tmp_path)
    report = bench.play()
    assert [a.why for a in bench.attempts()] == [
        *("full_success", "full_success", "duplicate", "not_full"),
        *("best_partial", "malformed", "not_best", "not_best"),
        *("too_low", "not_best", "malformed", "not_best"),
    ]
    assert report["lane"] == "episodes"
    assert report["prompts"] == {"total": 3, "full": 1, "partial": 1, "none": 1}
    assert report["distinct_full"] == 2
    assert report["by_domain"]["counting"]["success_rate"] == 3 / 12


def test_an_episode_becomes_a_demonstration_with_loss_on_its_own_turns(tmp_path: Path) -> None:
    bench = EpisodeBench(tmp_path)
    bench.play()
    row = load_demonstrations(tmp_path / "out" / "sft_train.parquet")[0]
    attempt = bench.attempts()[0]
    prompt = prompt_ids(bench.tokenizer, RULES, TOOLS)
    kept = len(row.input_ids) - len(prompt)
    assert row.input_ids[len(prompt) :][: len(attempt.token_ids)] == attempt.token_ids[:kept]
    learnt = [i for i, loss in zip(row.input_ids, row.loss_mask, strict=True) if loss]
    assert bench.tokenizer.decode(learnt) == "".join(f"{turn}<|im_end|>" for turn in SOLVED)
    assert row.loss_mask[-1]


def test_errors_of_the_infrastructure_are_no_attempts(tmp_path: Path) -> None:
    bench = EpisodeBench(tmp_path, max_error_share=1.0)
    bench.write(task_of(0), task_of(1, down=1), task_of(2))
    report = bench.play()
    errors = [a for a in bench.attempts() if a.status == "error"]
    assert {(a.sample_id, a.why, a.error_kind) for a in errors} == {
        ("counting/t1", "error", "user_down")
    }
    assert report["errors"] == {"user_down": 3}
    assert report["attempts"] == {"total": 12, "measured": 9, "full": 3}


def test_too_many_errors_stop_the_stage_and_the_same_call_resumes(tmp_path: Path) -> None:
    bench, io = EpisodeBench(tmp_path, deterministic=False), FolderStageIO(tmp_path / "io")
    bench.write(task_of(0), task_of(1, down=1), task_of(2))
    with pytest.raises(EnvironmentOutage, match="user_down"):
        bench.play(io=io)
    assert bench.generator.begun == 8
    bench.write(*(task_of(n) for n in range(3)))  # the user is back
    bench.play(io=io)
    # All of the third task, and of the second what the user has spoilt.
    assert bench.generator.begun == 4 + 3
    assert [a.status for a in bench.attempts()].count("error") == 0


class Stopping(FolderStageIO):
    """A stop once the first turn of the first task is sampled."""

    def __init__(self, root: Path, bench: EpisodeBench) -> None:
        super().__init__(root)
        self.bench = bench
        self.turn = derive_seed(derive_seed(7, "sample", "counting/t0", 0), "turn", 0)

    def should_stop(self) -> bool:
        return self.turn in self.bench.generator.asked


def test_eager_episodes_survive_a_crash(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("refiner_core.batches.KEEP_EVERY_S", 0.0)
    bench, io = EpisodeBench(tmp_path, deterministic=False), FolderStageIO(tmp_path / "io")
    bench.write(task_of(0, bug=3, after_one=True), task_of(1), task_of(2))
    with pytest.raises(StageFailed, match="a bug"):
        bench.play(io=io)
    assert io.checkpoint_steps()
    bench.write(*(task_of(n) for n in range(3)))
    bench.play(io=io)
    assert bench.generator.begun < 12  # who gave up at once had ended long before


def test_ordered_episodes_that_were_stopped_come_out_the_same(tmp_path: Path) -> None:
    straight = EpisodeBench(tmp_path)
    straight.play()
    io = Stopping(tmp_path / "io", straight)
    with pytest.raises(Interrupted, match="1 of 3 batches"):
        straight.play("again", io)
    straight.play("again", FolderStageIO(tmp_path / "io"))
    assert straight.files("again") == straight.files()
