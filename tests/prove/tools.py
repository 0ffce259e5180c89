"""Does an agent learn? The recipe `tiny-tools` over several seeds, on held-out tasks of the desk.

    make prove                                         # seeds 1, 2, 3
    python -m tests.prove.tools --seeds 1 --workspace /tmp/proof

Every seed is one `refiner run tiny-tools seed=S`, as a user would type it. Then SFT is compared
with an agent that does nothing, and GRPO with SFT, on the same held-out tasks and attempts. Where
RFT stands between the two is shown, whatever it is: that is no claim. Prints one line per claim
with its numbers, writes `tools.jsonl` into the workspace, and ends with exit code 1 if a claim does
not hold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refiner_core.evaluation.results import compare_results
from tests.prove.learning import (
    Claim,
    SeedRun,
    difference,
    interval,
    numbers,
    run_seed,
    tell,
    time_claims,
)

RECIPE = "tiny-tools"
#: Least gain of GRPO in the share of attempts that succeed.
GAIN = 0.05


def main() -> int:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workspace", type=Path, default=Path("runs/prove"))
    parser.add_argument("--recipe", default=RECIPE, help="a file, for trying others")
    parser.add_argument("overrides", nargs="*", help="key=value, for trying other settings")
    args = parser.parse_args()
    runs = [run_seed(s, args.workspace, args.overrides, args.recipe) for s in args.seeds]
    show(runs)
    return tell(
        [*sft_claims(runs), *grpo_claims(runs), *time_claims(runs)], args.workspace / "tools.jsonl"
    )


def sft_claims(runs: Sequence[SeedRun]) -> list[Claim]:
    """SFT solves tasks that need doing."""
    claims = []
    for run in runs:
        sft = numbers(run.folders["sft"])["sampled", "success"]
        floor = numbers(run.folders["sft"], "do_nothing")["sampled", "success"]
        claims.append(
            Claim(
                f"seed {run.seed}: SFT succeeds more often than an agent that does nothing",
                f"{interval(sft)} against {interval(floor)}",
                sft["low"] > floor["high"],
            )
        )
    return claims


def grpo_claims(runs: Sequence[SeedRun]) -> list[Claim]:
    """GRPO against SFT, paired on tasks and attempts (and seeds)."""
    claims = [gain_claim(runs, "all seeds")]
    for run in runs:
        claims.append(gain_claim([run], f"seed {run.seed}"))
        by = compared([run], "grpo", "sft")
        claims += [
            Claim(
                f"seed {run.seed}: greedy success is not lower by more than 0.02",
                difference(by["greedy", "success"]),
                by["greedy", "success"]["difference"] >= -0.02,
            ),
            Claim(
                f"seed {run.seed}: turns that are no call do not become more",
                difference(by["sampled", "failure/no_call"]),
                by["sampled", "failure/no_call"]["difference"] <= 0.02,
            ),
        ]
    return claims


def gain_claim(runs: Sequence[SeedRun], of: str) -> Claim:
    """GRPO succeeds more often than SFT, beyond chance."""
    gain = compared(runs, "grpo", "sft")["sampled", "success"]
    return Claim(
        f"{of}: GRPO raises sampled success by >= {GAIN}, interval clear of 0",
        f"{gain['b']:.3f} -> {gain['a']:.3f}: {difference(gain)}",
        gain["difference"] >= GAIN and gain["low"] > 0,
    )


def compared(
    runs: Sequence[SeedRun], one: str, other: str
) -> dict[tuple[str, str], dict[str, Any]]:
    """Differences of two models by decoding and metric."""
    sides = ([run.folders[model] for run in runs] for model in (one, other))
    return {(d["decoding"], d["metric"]): d for d in compare_results(*sides)}


def show(runs: Sequence[SeedRun]) -> None:
    """Every model of every seed, and where RFT stands."""
    for run in runs:
        for model, folder in run.folders.items():
            found = numbers(folder)
            told = [("greedy", "success")]
            told += [("sampled", m) for m in ("success", "pass@4", "pass^4", "partial")]
            text = ", ".join(f"{d} {m} {interval(found[d, m])}" for d, m in told if (d, m) in found)
            print(f"seed {run.seed}  {model:5s} {text}")
    for one, other in (("rft", "sft"), ("grpo", "rft")):
        if all(one in run.folders and other in run.folders for run in runs):
            by = compared(runs, one, other)
            text = ", ".join(f"{d} {difference(by[d, 'success'])}" for d in ("greedy", "sampled"))
            print(f"all seeds: success of {one} - {other}: {text}")
    print()


if __name__ == "__main__":
    sys.exit(main())
