"""Sampling and judging at once, beside each alone and both one after the other.

    python -m tests.bench overlap [--rounds 3]

The embedded model samples 8 prompts x 8 completions on one thread, ended by its own tokens; a
server in a process of its own answers the judge after a set latency. Each sample is judged as one
of the embedded world's demonstrations, so that questions are of the usual number and length. The
latency is chosen so that judging alone takes as long as sampling alone, a third, and three times
that. A round is: sampling alone, judging alone (which is both one after the other), both at once.
The same rewards are asserted on both ways.

One JSON line per proportion, of medians: seconds of each way, ``ratio`` (at once over the longer
one of the same round), ``gained`` (one after the other over at once), CPU seconds of this process,
calls. It needs two cores for itself: on a machine that does other things, sampling and judging take
the time from each other, and ``gained`` says more than ``ratio``. ``ends``: by which share of the
time a tenth, a half and nine tenths of the samples are finished; ``bound``: the ratio that this
allows to a judge that costs this process no time at all.

Goal: a ratio of at most 1.15 where a step is sampled in four batches. In a single batch all samples
are begun at once, so that none is finished for a while and the judge has to wait: shown beside it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refiner_core.contract.config import (
    DataConfig,
    GrpoConfig,
    JudgeConfig,
    ModelConfig,
    RecipeConfig,
    RewardConfig,
)
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    PromptRow,
    RewardResult,
    SamplingParams,
)
from refiner_core.data.prepare import prepare_data
from refiner_core.data.prepared import load_prompts
from refiner_core.data.synthetic import generate_rows
from refiner_core.generation.load import load_model, load_tokenizer
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.judges import build_judge
from refiner_core.rewards import RewardInput, RewardStream

GOAL = 1.15
PROMPTS, SAMPLES, LIMIT = 8, 8, 96
BATCHES = (4, 1)
CONNECTIONS = 16
#: Judging alone over sampling alone.
PROPORTIONS = (1.0, 1 / 3, 3.0)
#: One token of the vocabulary in so many ends a text, so that lengths differ as answers do.
ENDS_EVERY = 24


def main(arguments: list[str]) -> int:
    """Measure, print, and say whether the goal was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args(arguments)
    torch.set_num_threads(1)
    met = True
    with _server() as address:
        for batches in BATCHES:
            scene = _Scene(batches, address)
            for proportion in PROPORTIONS:
                line = _measure(scene, proportion, told.rounds)
                met &= batches == 1 or line["ratio"] <= GOAL
                print(json.dumps(line), flush=True)
    print("met" if met else "MISSED")
    return 0 if met else 1


class _Taken(NamedTuple):
    """Of one way to do it: seconds by the clock, CPU seconds, and what came out."""

    wall_s: float
    cpu_s: float
    results: Any


class _Scene:
    """The model, the prompts, what stands for the answers, and a judge on a server."""

    def __init__(self, batches: int, address: str) -> None:
        self.batches = batches
        config = ModelConfig()
        tokenizer = load_tokenizer("builtin:tiny", config)
        model = load_model("builtin:tiny", config)
        self.generator = TransformersGenerator(
            model, tokenizer, batch_size=PROMPTS * SAMPLES // batches
        )
        self.generator.stop_ids |= set(range(0, len(tokenizer), ENDS_EVERY))
        prompts = _prompts(tokenizer)
        self.requests = [
            GenerationRequest(prompt.prompt_ids, seed=1000 * p + s)
            for p, prompt in enumerate(prompts)
            for s in range(SAMPLES)
        ]
        self.items = _demonstrations(len(self.requests))
        self.address = address
        self.sample()  # the first call of a model is slower

    def sample(self, told: Callable[[int, Completion], None] | None = None) -> _Taken:
        """All completions, each told of as it finishes."""
        params = SamplingParams(max_new_tokens=LIMIT)
        return _timed(lambda: self.generator.generate(self.requests, params, told))

    def judge(self, latency_s: float, *, sampling: bool) -> _Taken:
        """Rewards by a new judge, which knows nothing yet: as samples finish, or of all at once."""
        config = JudgeConfig(
            kind="openai",
            model="scripted",
            base_url=f"{self.address}/{latency_s:.4f}/v1",
            concurrency=CONNECTIONS,
        )
        judge = build_judge(config)
        judge.judge([])
        stream = RewardStream(RewardConfig(), judge)

        def finished(place: int, _: Completion | None = None) -> None:
            stream.add(self.items[place], place)
            stream.submit()

        def work() -> list[RewardResult]:
            if sampling:
                self.sample(finished)
            else:
                for place in range(len(self.items)):
                    stream.add(self.items[place], place)
            return stream.results()

        taken = _timed(work)
        self.calls = judge.usage().calls  # type: ignore[attr-defined]
        judge.close()  # type: ignore[attr-defined]
        return taken

    def ends(self) -> list[float]:
        """When each sample is finished, as a share of the whole time."""
        began, moments = time.perf_counter(), list[float]()
        taken = self.sample(lambda *_: moments.append(time.perf_counter() - began))
        return [moment / taken.wall_s for moment in moments]


def _measure(scene: _Scene, proportion: float, rounds: int) -> dict[str, Any]:
    sampling_s = min(scene.sample().wall_s for _ in range(3))
    scene.judge(0.001, sampling=False)
    latency_s = proportion * sampling_s * CONNECTIONS / scene.calls
    done = [_round(scene, latency_s) for _ in range(rounds)]

    def median(number: Callable[[_Round], float]) -> float:
        return round(statistics.median(number(one) for one in done), 3)

    ends = scene.ends()
    bound_s = _bound(ends, sampling_s, latency_s, scene.calls / len(ends))
    return {
        "name": "sampling and judging at once",
        "batches": scene.batches,
        "judging_over_sampling": median(lambda r: r.judging.wall_s / r.sampling.wall_s),
        "sampling_s": median(lambda r: r.sampling.wall_s),
        "judging_s": median(lambda r: r.judging.wall_s),
        "one_after_the_other_s": median(lambda r: r.one_after_the_other_s),
        "at_once_s": median(lambda r: r.at_once.wall_s),
        "ratio": median(lambda r: r.ratio),
        "goal": GOAL,
        "bound": round(bound_s / (sampling_s * max(1.0, proportion)), 3),
        "gained": median(lambda r: r.one_after_the_other_s / r.at_once.wall_s),
        "cpu_s": {name: median(lambda r, n=name: getattr(r, n).cpu_s) for name in _Round._fields},
        "calls": scene.calls,
        "latency_ms": round(1000 * latency_s, 1),
        "ends": [round(q, 2) for q in statistics.quantiles(ends, n=10)[::4]],
        "rounds": rounds,
    }


class _Round(NamedTuple):
    """The same work in three ways."""

    sampling: _Taken
    judging: _Taken
    at_once: _Taken

    @property
    def one_after_the_other_s(self) -> float:
        return self.sampling.wall_s + self.judging.wall_s

    @property
    def ratio(self) -> float:
        return self.at_once.wall_s / max(self.sampling.wall_s, self.judging.wall_s)


def _round(scene: _Scene, latency_s: float) -> _Round:
    done = _Round(
        scene.sample(),
        scene.judge(latency_s, sampling=False),
        scene.judge(latency_s, sampling=True),
    )
    assert done.judging.results == done.at_once.results
    return done


def _bound(ends: Sequence[float], sampling_s: float, latency_s: float, calls: float) -> float:
    """Seconds until the last of ``calls`` a sample is answered, if asking took no time at all."""
    free = [0.0] * CONNECTIONS
    last = sampling_s
    for end in sorted(ends):
        for _ in range(round(calls)):
            begun = max(heapq.heappop(free), end * sampling_s)
            heapq.heappush(free, begun + latency_s)
            last = max(last, begun + latency_s)
    return last


def _timed(work: Callable[[], Any]) -> _Taken:
    began, cpu_began = time.perf_counter(), time.process_time()
    results = work()
    return _Taken(time.perf_counter() - began, time.process_time() - cpu_began, results)


def _prompts(tokenizer: Any) -> list[PromptRow]:
    config = RecipeConfig(
        data=replace(
            DataConfig(),
            rl_path="builtin:synthetic",
            sft_path="builtin:synthetic",
            synthetic_rl_rows=2 * PROMPTS,
            synthetic_sft_rows=2 * PROMPTS,
        ),
        grpo=replace(GrpoConfig(), response_length=LIMIT),
    )
    with tempfile.TemporaryDirectory() as folder:
        prepare_data(config, tokenizer=tokenizer, output_dir=Path(folder))
        return load_prompts(Path(folder) / "rl_train.parquet")[:PROMPTS]


def _demonstrations(n: int) -> list[RewardInput]:
    """Answers with their rubrics and evidence."""
    items = []
    for i, row in enumerate(generate_rows("sft", n, seed=1)):
        prompt, answer = (turn["content"] for turn in row["conversations"])
        given = PromptRow(f"row-{i}", f"question {i}", prompt, (), row["rubrics"])
        items.append(RewardInput(given, answer, True))
    return items


# ---------------------------------------------------------------- the server


_REPLY = json.dumps(
    {
        "choices": [{"index": 0, "message": {"content": '{"score": 2}'}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 200, "completion_tokens": 8},
    }
)


@contextmanager
def _server() -> Iterator[str]:
    """The address of a server that answers each call after the latency that its path names."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection) -> None:
    import asyncio

    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(float(request.match_info["latency"]))
        return web.Response(text=_REPLY, content_type="application/json")

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/{latency}/v1/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
