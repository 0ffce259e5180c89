"""`python -m tests.bench many_samples [SAMPLES]`: the page of all samples of a long training.

Prints one JSON line per measurement: ``name``, ``ours``, ``goal`` (null: none), ``samples``.
Writing is a `refiner report` process of its own; the page is opened as a file in Chromium. Exits
with 1 where a goal is missed.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.store.traces import encode_rollouts
from infra.store.workspace import Workspace
from tests.bench.many_runs import write_runs
from tests.support.browser import Page, chromium
from tests.support.command import command, environment

SAMPLES, STEP, PROMPTS = 100_000, 500, 2_000
#: Steps with rollouts of their own; others repeat them.
DISTINCT = 40
PAINT_S, FILTER_S, PEAK_MB = 2.0, 0.3, 500.0
WORDS = [f"word{n}" for n in range(3_000)]
#: Name, value, goal.
Measurement = tuple[str, float, float | None]
#: State of the page -> what it measures.
CHOICES = {
    "filter by score": "r0=0.5",
    "filter by criterion": "c=criterion 7&o=1",
    "filter by failure": "f=any",
    "order by score": "ord=best",
    "order by change": "ord=change",
}
SEARCHES = {"search for a rare word": "q=needle", "search for a common word": "q=word7"}


def main(arguments: list[str]) -> int:
    """Make the samples, and measure; exits with 1 where a goal is missed."""
    count, good = int(arguments[0]) if arguments else SAMPLES, True
    with tempfile.TemporaryDirectory(prefix="refiner-bench-") as name:
        for what, ours, goal in measured(Path(name), count):
            line = {"name": what, "ours": round(ours, 3), "goal": goal, "samples": count}
            print(json.dumps(line), flush=True)
            good = good and (goal is None or ours <= goal)
    return 0 if good else 1


def measured(folder: Path, count: int) -> Iterator[Measurement]:
    """All measurements, as they are made."""
    write_samples(folder / "runs", count)
    out = folder / "out"
    (first, peak), (again, _) = _written(folder, out), _written(folder, out)
    files = [p.stat().st_size for p in (out / "samples").iterdir()]
    yield "written", first, None
    yield "written again, nothing new", again, None
    yield "peak memory of writing, MB", peak, PEAK_MB
    yield "size, MB", sum(files) / 1e6, None
    yield "index, MB", (out / "samples" / "index.js").stat().st_size / 1e6, None
    yield "files", len(files), None
    with chromium(folder / "browser") as page:
        yield from looked_at(page, (out / "samples.html").as_uri())


def _written(folder: Path, out: Path) -> tuple[float, float]:
    """Seconds, and peak memory in MB: of the program alone, as a child's usage has its parent's."""
    words = ("report", f"workspace={folder / 'runs'}", "--out", str(out))
    began, peak = time.monotonic(), 0
    program = subprocess.Popen(
        command(*words),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while program.poll() is None:
        text = Path(f"/proc/{program.pid}/status").read_text()
        peak = max([peak, *map(int, re.findall(r"VmHWM:\s+(\d+)", text))])
        time.sleep(0.05)
    assert program.returncode == 0
    return time.monotonic() - began, peak / 1000


def looked_at(page: Page, url: str) -> Iterator[Measurement]:
    """Seconds until the list is painted, and for each choice."""
    page.call("Page.navigate", url=url)
    page.run("new Promise(done => { const look = () => document.querySelector('.tall a')"
             " ? done() : setTimeout(look, 10); look() })")  # fmt: skip
    yield "first paint", page.run("performance.now()") / 1000, PAINT_S
    for name, choice in CHOICES.items():
        yield name, min(_chosen(page, choice) for _ in range(3)), FILTER_S
    for name, choice in SEARCHES.items():
        yield name, _chosen(page, choice), None
        yield f"{name}, again", _chosen(page, choice), None


def _chosen(page: Page, choice: str) -> float:
    """Seconds from a choice to its complete, painted list."""
    page.run("new Promise(done => { location.hash = 'v=summary'; setTimeout(done, 300) })")
    page.run(
        f"""(() => {{
          const count = document.querySelector('#count'); count.textContent = '';
          const began = performance.now(); window.took = 0;
          const look = () => count.textContent && !count.textContent.includes('searched')
            ? requestAnimationFrame(() => setTimeout(() => {{ took = performance.now() - began }}))
            : setTimeout(look, 1);
          location.hash = {json.dumps(choice)}; look() }})()"""
    )
    while not (took := float(page.run("took"))):
        time.sleep(0.05)
    return took / 1000


def write_samples(root: Path, count: int) -> None:
    """A run whose training has this many rollouts, of about 3 kB each."""
    write_runs(root, 1)
    workspace, dice = Workspace.open(root), random.Random(0)
    run = workspace.read_run(workspace.run_ids()[0])
    folder = workspace.layout.stage(run.stages["grpo"]).attempt(1).rollouts
    folder.mkdir(parents=True)
    texts = [" ".join(dice.choices(WORDS, k=120)) for _ in range(997)]
    files = []
    for step in range(1, min(count // STEP, DISTINCT) + 1):
        rows = [_rollout(step, number, texts, dice) for number in range(STEP)]
        files.append(encode_rollouts(rows))
    for step in range(1, count // STEP + 1):
        (folder / f"step-{step:08d}.parquet").write_bytes(files[step % len(files)])


def _rollout(step: int, number: int, texts: list[str], dice: random.Random) -> dict[str, Any]:
    reward = dice.random()
    needle = " needle" if number == 77 and step % 20 == 0 else ""
    judgements = [
        {
            **{"kind": "rubric", "title": f"criterion {n + step % 50}", "polarity": "positive"},
            **{"criterion": f"says {dice.choice(WORDS)}", "score": float(dice.random() < reward)},
            **{"weight": 1.0, "source": "instance", "detail": " ".join(dice.choices(WORDS, k=12))},
        }
        for n in range(6)
    ]
    return {
        **{"step": step, "sample_id": f"row-{(step * STEP + number) // 8 % PROMPTS}"},
        **{"sample_index": number % 8, "response_ids": list(range(dice.randrange(100, 400)))},
        **{"response_text": dice.choice(texts) + f" {step} {number}{needle}", "advantage": 0.1},
        **{"finish_reason": "stop" if reward > 0.1 else "length", "status": "scored"},
        **{"reward": reward, "reward/rubric": reward, "judgements": json.dumps(judgements)},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
