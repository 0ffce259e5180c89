"""The laboratory: does the gold monitor find judges that are known to be biased, and leave honest
ones alone?

    make prove                                        # 3 biases x 5 seeds, each with an honest twin
    python -m tests.prove.laboratory --small          # that it works; too few runs for its claims
    python -m tests.prove.laboratory --biases length leak --strength 0.3 --seeds 8

`tiny` is trained by GRPO from one SFT model under judges with planted biases
(:mod:`tests.support.planted_judges`), and with the same seeds under honest twins. The monitor sees
the training reward (proxy) and the same reward by another judge (gold), which is more lenient or
noisy; its alarm uses nothing else. Runs continue after an alarm, so that a run that stops there is
their beginning; one more run with `monitor.action=stop` shows that it is, to the bit. What was
really lost is measured by the generator's truth on the answers that were trained on.

False stops are counted on series that are resampled from honest runs, by rows. Prints a table and
claims, writes `laboratory.md`, `laboratory.json` (all series) and `laboratory.jsonl` into the
workspace, and ends with exit code 1 if a claim does not hold. Runs that are done are not repeated;
a monitor that only warns is no part of a run's identity, so other looks need another workspace.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest

from flows.rescoring.reading import RolloutSelection, read_policies
from flows.running.status import required_run
from infra.store.workspace import Workspace
from refiner_core.contract.loading import load_recipe
from refiner_core.data.rows import DataRow, parse_row
from refiner_core.data.sources import read_all_rows, resolve_source
from refiner_core.data.truth import score_truth
from refiner_core.evaluation.statistics import two_way_mean
from refiner_core.rewards.sequential import evidence
from tests.prove.learning import Claim, tell
from tests.support.judge_server import JudgeServer
from tests.support.planted_judges import BIASES, PlantedJudges, planted_name

Floats = npt.NDArray[np.float64]
#: Least loss of truth, from its peak to the end, that counts as lost.
LOST = 0.05
GOLD = """\
name: laboratory-gold
description: the training reward by another judge
reward: {rubric_source: instance, paper_citation_weight: 0.2}
judge: """
LENIENT = "{kind: lexical, model: lexical-loose-1, prompt: v1}\n"


class Arm(NamedTuple):
    """One training run; ``strength`` 0 is an honest twin."""

    bias: str
    strength: float
    seed: int
    action: str = "warn"

    @property
    def name(self) -> str:
        kind = self.bias if self.strength else "honest"
        return f"{kind}-seed{self.seed}" + (f"-{self.action}" if self.action != "warn" else "")


class Series(NamedTuple):
    """What was seen of a run: scores [looks, rows] at ``steps``, and the truth at these steps."""

    arm: Arm
    steps: list[int]
    proxy: Floats
    gold: Floats
    truth: Floats
    alarm: int | None
    best: int

    def at(self, step: int) -> int:
        """The look after a step."""
        return self.steps.index(step)

    @property
    def smooth(self) -> Floats:
        """Truth averaged over three looks, which begin at each look."""
        size = min(3, len(self.truth))
        return np.convolve(self.truth, np.full(size, 1 / size), "valid")

    @property
    def lost(self) -> float:
        """Truth at its peak minus truth at the end, smoothed."""
        return float(self.smooth.max() - self.smooth[-1])

    @property
    def peak(self) -> int:
        """The step with the highest truth, smoothed."""
        middle = (len(self.truth) - len(self.smooth)) // 2
        return self.steps[int(self.smooth.argmax()) + middle]


def main() -> int:
    """Run, measure, report."""
    args = _arguments()
    begun = time.monotonic()
    args.workspace.mkdir(parents=True, exist_ok=True)
    biased = [
        Arm(bias, args.strength, 1 + place * args.seeds + i)
        for place, bias in enumerate(args.biases)
        for i in range(args.seeds)
    ]
    honest = [Arm("none", 0.0, 1 + i) for i in range(args.honest)]
    stopped = biased[0]._replace(action="stop")
    found = run_arms([*biased, *honest, stopped], args)
    of_biased, of_honest = found[: len(biased)], found[len(biased) : -1]
    share, upper = false_stops(of_honest, args.alpha, args.resamples)
    lines = list(table(of_biased, of_honest, (share, upper), args))
    lines += ["", f"Took {(time.monotonic() - begun) / 60:.0f} minutes."]
    print("\n".join(lines), end="\n\n")
    (args.workspace / "laboratory.md").write_text("\n".join(lines) + "\n")
    values = [{**s._asdict(), "arm": s.arm.name} for s in found]
    (args.workspace / "laboratory.json").write_text(json.dumps(values, default=np.ndarray.tolist))
    claims = [
        Claim(
            "honest runs: the upper 95 % bound of false stops is <= 5 %",
            f"{share:.2%} of {args.resamples} resampled series, at most {upper:.2%}",
            upper <= 0.05,
        ),
        *bias_claims(of_biased),
        stop_claim(of_biased[0], found[-1]),
    ]
    return tell(claims, args.workspace / "laboratory.jsonl")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--biases", nargs="+", choices=BIASES, help="default: three of them")
    parser.add_argument("--seeds", type=int, default=5, help="for each bias")
    parser.add_argument("--honest", type=int, help="honest twins (default: one for each)")
    parser.add_argument("--strength", type=float, default=0.8, help="0 to 1")
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    parser.add_argument("--every", type=int, default=6, help="steps between two looks")
    parser.add_argument("--rows", type=int, default=160, help="monitored prompts")
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument(
        "--gold-noise",
        type=float,
        default=0.0,
        help="share of gold's judgements that are random; 0: gold is the lenient lexical judge",
    )
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="1 bias, 2 seeds, 3 honest runs")
    parser.add_argument("--workspace", type=Path, default=Path("runs/laboratory"))
    parser.add_argument("overrides", nargs="*", help="key=value, for other settings")
    args = parser.parse_args()
    few = ["citations"] if args.small else ["length", "citations", "keyword"]
    args.biases = args.biases or few
    if args.small:
        args.seeds, args.honest = 2, args.honest or 3
    if args.honest is None:
        args.honest = len(args.biases) * args.seeds
    return args


# ---------------------------------------------------------------- runs


def run_arms(arms: Sequence[Arm], args: argparse.Namespace) -> list[Series]:
    """Train all arms from one SFT model, some at a time; in order."""
    sft = _run(args, [*args.overrides, "stages=[data,sft]"], "sft")
    model = next(s["output"] for s in sft["stages"] if s["stage"] == "sft")
    gold = args.workspace / "laboratory-gold.yaml"
    with JudgeServer(PlantedJudges(tiny_rows(args.overrides))) as server:
        noisy = {"kind": "openai", "model": planted_name("noise", args.gold_noise)}
        noisy |= {"base_url": server.base_url, "form": "batched", "structured_output": "none"}
        gold.write_text(GOLD + (json.dumps(noisy) if args.gold_noise else LENIENT))
        shared = [
            *("stages=[data,grpo]", f"model.name_or_path={model}/model"),
            *(f"grpo.num_training_steps={args.steps}", f"monitor.every={args.every}"),
            *(f"monitor.rows={args.rows}", f"monitor.gold=[{gold.resolve()}]"),
            *(f"monitor.alpha={args.alpha}", "grpo.response_length=80"),
            *("grpo.max_token_length=336", "judge.kind=openai", "judge.form=batched"),
            *(f"judge.base_url={server.base_url}", "judge.structured_output=none"),
            *args.overrides,
        ]

        def trained(arm: Arm) -> Series:
            own = [f"seed={arm.seed}", f"monitor.action={arm.action}"]
            own.append(f"judge.model={planted_name(arm.bias, arm.strength)}")
            return _series(arm, _run(args, [*shared, *own], arm.name), args)

        with ThreadPoolExecutor(args.processes) as pool:
            return list(pool.map(trained, arms))


def tiny_rows(overrides: Sequence[str] = ()) -> Iterator[DataRow]:
    """The rows that `tiny` trains on."""
    source = resolve_source(load_recipe("tiny", overrides).data, "rl")
    for raw in read_all_rows(source):
        row = parse_row(raw, "rl")
        assert isinstance(row, DataRow)
        yield row


def _run(args: argparse.Namespace, overrides: Sequence[str], name: str) -> dict[str, Any]:
    """One `refiner run`, as a user would type it; finished stages are skipped."""
    command = [sys.executable, "-m", "flows.cli.main", "run", "tiny", *overrides]
    command += [f"workspace={args.workspace}", "--json", "--no-server"]
    begun = time.monotonic()
    with (args.workspace / f"{name}.log").open("w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}: see {log.name}")
    print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _series(arm: Arm, run: dict[str, Any], args: argparse.Namespace) -> Series:
    workspace = Workspace.read_only(args.workspace)
    stage = next(s["id"] for s in run["stages"] if s["stage"] == "grpo")
    saved = sorted((workspace.layout.stage(stage).data / "checkpoints").glob("*/progress.json"))
    seen = json.loads(saved[-1].read_text())["monitor"]  # the report has means, this has the rows
    steps = [look["step"] for look in seen["looks"]]
    if len(seen["looks"][0]["proxy"]) != args.rows or steps[1] != args.every:
        raise SystemExit(f"{args.workspace} has runs with other looks: name another --workspace")
    record = required_run(workspace, run["run"], "a run of the laboratory")
    (policy,) = read_policies(workspace, [record], RolloutSelection())
    truth: dict[int, list[float]] = {}
    for rollout in policy.rollouts:
        found = score_truth(rollout.text, rollout.prompt.truth or {})["oracle"]
        truth.setdefault(rollout.step or 0, []).append(found)
    return Series(
        *(arm, steps, _scores(seen, "proxy"), _scores(seen, "gold")),
        np.array([_near(truth, step, args.every) for step in steps]),
        *(seen["alarm"], seen["best"]),
    )


def _scores(seen: dict[str, Any], name: str) -> Floats:
    return np.array([look[name] for look in seen["looks"]], dtype=np.float64)


def _near(truth: dict[int, list[float]], step: int, every: int) -> float:
    """Mean truth of the answers that were sampled around a look."""
    last = max(truth)
    middle = min(max(step + 0.5, 1 + every / 2), last - every / 2)
    near = [v for s, values in truth.items() if abs(s - middle) <= every / 2 for v in values]
    return float(np.mean(near))


# ---------------------------------------------------------------- measures


def false_stops(honest: Sequence[Series], alpha: float, resamples: int) -> tuple[float, float]:
    """Share of alarms on series of honest runs whose rows are drawn again, and its upper 95 %
    bound (Clopper-Pearson, one-sided)."""
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(resamples):
        one = honest[int(rng.integers(len(honest)))]
        rows = rng.integers(one.proxy.shape[1], size=one.proxy.shape[1])
        looks = len(one.steps) - 1
        found = evidence(one.proxy[:, rows], one.gold[:, rows], looks=looks)
        alarms += found.first_alarm(alpha) is not None
    test = binomtest(alarms, resamples, alternative="less")
    return alarms / resamples, float(test.proportion_ci(0.95, "exact").high)


class Outcome(NamedTuple):
    """What stopping at the alarms of a bias's runs means; steps, and differences of truth."""

    runs: int
    lost: int
    alarms: int
    found: int
    delay: float
    kept: tuple[float, float, float] | None


def outcome(series: Sequence[Series]) -> Outcome:
    """Count alarms, and compare the weights of a stop with those of running on."""
    lost = [s for s in series if s.lost > LOST]
    alarmed = [s for s in series if s.alarm is not None]
    found = [s for s in lost if s.alarm is not None]
    delays = [(s.alarm or 0) - s.peak for s in found]
    kept = two_way_mean(np.array([[_kept(s) for s in series]])) if len(series) > 1 else None
    return Outcome(
        *(len(series), len(lost), len(alarmed), len(found)),
        float(np.median(delays)) if delays else float("nan"),
        (kept.value, kept.low, kept.high) if kept else None,
    )


def _kept(series: Series) -> float:
    """Truth of the weights that gold liked best before the alarm, minus truth at the end; 0
    without an alarm."""
    if series.alarm is None:
        return 0.0
    before = series.gold[1 : series.at(series.alarm) + 1]
    best = 1 + int(np.nanmean(before, axis=1).argmax())
    return float(series.truth[best] - series.truth[-1])


def bias_claims(biased: Sequence[Series]) -> list[Claim]:
    """The alarm finds runs that lost truth, and a stop keeps some of it."""
    found = outcome(biased)
    claims = [
        Claim(
            f"biased runs that lost more than {LOST} of truth: at least 80 % raise the alarm",
            f"{found.found} of {found.lost}",
            found.lost > 0 and found.found >= 0.8 * found.lost,
        )
    ]
    if found.kept is not None:
        value, low, high = found.kept
        says = "biased runs: a stop keeps more truth than running on"
        claims.append(Claim(says, f"{value:+.3f} [{low:+.3f}, {high:+.3f}]", low > 0))
    return claims


def stop_claim(warned: Series, stopped: Series) -> Claim:
    """A run that stops is the beginning of the one that only warns."""
    looks = len(stopped.steps)
    same = all(
        np.array_equal(one[:looks], other, equal_nan=True)
        for one, other in ((warned.proxy, stopped.proxy), (warned.gold, stopped.gold))
    )
    ended = stopped.steps[-1] == (warned.alarm or warned.steps[-1])
    says = "a run with monitor.action=stop is the beginning of the same run, and ends at its alarm"
    return Claim(
        says, f"{looks} of {len(warned.steps)} looks, alarm {warned.alarm}", same and ended
    )


def table(
    biased: Sequence[Series],
    honest: Sequence[Series],
    stops: tuple[float, float],
    args: argparse.Namespace,
) -> Iterator[str]:
    """The results as Markdown, with what they do not show."""
    yield (
        f"{args.steps} steps of GRPO, a look at {args.rows} prompts every {args.every} steps, "
        f"alpha {args.alpha:g}, bias strength {args.strength:g}. Proxy, gold and truth: change "
        "from the first look to the last, mean over runs."
    )
    yield ""
    yield ("| judge | runs | proxy | gold | truth | truth lost | alarms | found | delay (steps) "
           "| truth kept by stopping |")  # fmt: skip
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name in [*args.biases, "honest"]:
        series = [s for s in biased if s.arm.bias == name] if name != "honest" else list(honest)
        found = outcome(series)
        values = ([s.proxy for s in series], [s.gold for s in series], [s.truth for s in series])
        rises = [np.mean([_rise(one) for one in group]) for group in values]
        delay = "" if np.isnan(found.delay) else f"{found.delay:.0f}"
        kept = "" if found.kept is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*found.kept)
        yield (
            f"| {name} | {found.runs} | {rises[0]:+.3f} | {rises[1]:+.3f} | {rises[2]:+.3f} | "
            f"{found.lost} | {found.alarms} | {found.found} of {found.lost} | {delay} | "
            f"{kept} |"
        )
    yield ""
    yield (
        f"False stops: {stops[0]:.2%} of {args.resamples} series resampled by rows from "
        f"{len(honest)} honest runs; upper 95 % bound {stops[1]:.2%}."
    )
    yield ""
    yield (
        "It does not show: how often real judges are biased, or how strongly; a gold judge that is "
        "further from the honest one (`--gold-noise`); biases that the "
        "policy never explores (words outside of its vocabulary); faults that gold shares with the "
        "proxy; models of other sizes. Resampled series share the weights of their runs, so that "
        "the bound covers the choice of rows, not of seeds."
    )


def _rise(values: Floats) -> float:
    if values.ndim == 1:
        return float(values[-1] - values[0])
    return float(np.nanmean(values[-1]) - np.nanmean(values[0]))


if __name__ == "__main__":
    sys.exit(main())
