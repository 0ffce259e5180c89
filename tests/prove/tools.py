"""Does an agent learn? The recipe `tiny-tools` over several seeds, on held-out tasks of the desk.

    make prove                                         # seeds 1, 2, 3
    python -m tests.prove.tools --seeds 1 --workspace /tmp/proof

Every seed is one `refiner run tiny-tools seed=S`, as a user would type it. Then SFT is compared
with an agent that does nothing, and GRPO with SFT, on the same held-out tasks and attempts. Where
RFT stands between the two is shown, whatever it is: that is no claim. Prints one line per claim
with its numbers, writes `tools.jsonl` into the workspace, and ends with exit code 1 if a claim does
not hold.
"""

import sys
from collections.abc import Sequence

from tests.prove.learning import (
    Claim,
    SeedRun,
    compared,
    difference,
    gain_claim,
    greedy_claim,
    interval,
    numbers,
    seed_runs,
    tell,
    time_claims,
)


def main() -> int:
    """Run, compare, report."""
    runs, workspace = seed_runs(__doc__, "tiny-tools")
    show(runs)
    return tell(
        [*sft_claims(runs), *grpo_claims(runs), *time_claims(runs)], workspace / "tools.jsonl"
    )


def sft_claims(runs: Sequence[SeedRun]) -> list[Claim]:
    """SFT solves tasks that need doing."""
    claims = []
    for run in runs:
        sft = numbers(run.folders["sft"])["sampled", "success"]
        floor = numbers(run.folders["sft"], "do_nothing")["sampled", "success"]
        says = f"seed {run.seed}: SFT succeeds more often than an agent that does nothing"
        both = f"{interval(sft)} against {interval(floor)}"
        claims.append(Claim(says, both, sft["low"] > floor["high"]))
    return claims


def grpo_claims(runs: Sequence[SeedRun]) -> list[Claim]:
    """GRPO against SFT, paired on tasks and attempts (and seeds)."""
    claims = [gain_claim(runs, "all seeds", "success")]
    for run in runs:
        no_call = compared([run], "grpo", "sft")["sampled", "failure/no_call"]
        claims += [
            gain_claim([run], f"seed {run.seed}", "success"),
            greedy_claim(run, "success"),
            Claim(
                f"seed {run.seed}: turns that are no call do not become more",
                difference(no_call),
                no_call["difference"] <= 0.02,
            ),
        ]
    return claims


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
