"""Does it learn? The tiny recipe over several seeds, held against generator truth.

    make prove                                            # seeds 1, 2, 3
    python -m tests.prove.learning --seeds 1 --workspace /tmp/proof

Every seed is one `refiner run tiny seed=S`, as a user would type it. Then SFT is compared with the
random copier and GRPO with SFT, on the same held-out prompts, by scores that no reward has seen.
Prints one line per claim with its numbers, writes `learning.jsonl` into the workspace, and ends
with exit code 1 if a claim does not hold: a miss is shown, not hidden.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from refiner_core.evaluation.results import compare_results, load_results

LIMIT_S = 600.0
#: Least gain of GRPO over SFT.
GAIN = 0.05


class Claim(NamedTuple):
    """One statement about the runs: what was measured, and whether it holds."""

    says: str
    measured: str
    holds: bool


class SeedRun(NamedTuple):
    """One finished run: wall-clock seconds, and evaluation folders by model."""

    seed: int
    seconds: float
    folders: Mapping[str, Path]


def main() -> int:
    """Run, compare, report."""
    runs, workspace = seed_runs(__doc__)
    return tell(
        [*sft_claims(runs), *grpo_claims(runs), *time_claims(runs)], workspace / "learning.jsonl"
    )


def seed_runs(about: str, recipe: str = "tiny") -> tuple[list[SeedRun], Path]:
    """The runs that the command line asks for, and their workspace."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workspace", type=Path, default=Path("runs/prove"))
    parser.add_argument("overrides", nargs="*", help="key=value, for trying other settings")
    args = parser.parse_args()
    runs = [run_seed(seed, args.workspace, args.overrides, recipe) for seed in args.seeds]
    return runs, args.workspace


def tell(claims: Sequence[Claim], report: Path | None = None) -> int:
    """Print (and write) claims; 0 if all of them hold, else 1."""
    for claim in claims:
        print(f"{'holds ' if claim.holds else 'MISSED'}  {claim.says}\n        {claim.measured}")
    print(f"\n{sum(c.holds for c in claims)} of {len(claims)} claims hold")
    if report is not None:
        report.write_text("".join(json.dumps(claim._asdict()) + "\n" for claim in claims))
    return 0 if all(c.holds for c in claims) else 1


def run_seed(seed: int, workspace: Path, overrides: Sequence[str], recipe: str) -> SeedRun:
    """One run of the command; finished stages of an earlier call are skipped."""
    command = [sys.executable, "-m", "flows.cli.main", "run", recipe, f"seed={seed}"]
    command += [f"workspace={workspace}", "--json", "--no-server", *overrides]
    print(f"seed {seed}: {' '.join(command[3:])}", file=sys.stderr)
    begun = time.monotonic()
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    seconds = time.monotonic() - begun
    stages = json.loads(done.stdout)["stages"]
    folders = {
        s["name"].removeprefix("evaluate-"): Path(s["output"])
        for s in stages
        if s["stage"] == "evaluate"
    }
    return SeedRun(seed, seconds, folders)


def numbers(folder: Path, model: str | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """Entries of one evaluation by (decoding, metric); ``model`` picks the reference's."""
    results = load_results(folder)
    entries = results["evaluations"] if model is None else results["reference"]
    return {(e["decoding"], e["metric"]): e for e in entries}


def sft_claims(runs: Sequence[SeedRun]) -> list[Claim]:
    """SFT answers in form, and clearly better than copying at random."""
    claims = []
    for run in runs:
        sft = numbers(run.folders["sft"])
        floor = numbers(run.folders["sft"], "random_copier")
        valid = sft["greedy", "format_valid"]
        says = f"seed {run.seed}: SFT gives >= 90 % valid answers (greedy)"
        claims.append(Claim(says, interval(valid), valid["value"] >= 0.90))
        for decoding in ("greedy", "sampled"):
            one, other = sft[decoding, "oracle"], floor[decoding, "oracle"]
            says = f"seed {run.seed}: SFT's oracle is above the random copier's ({decoding})"
            both = f"{interval(one)} against {interval(other)}"
            claims.append(Claim(says, both, one["low"] > other["high"]))
    return claims


def grpo_claims(runs: Sequence[SeedRun]) -> list[Claim]:
    """GRPO against SFT, paired on prompts (and seeds), on truth that no reward has seen."""
    claims = [gain_claim(runs, "all seeds", "oracle")]
    for run in runs:
        claims += [
            gain_claim([run], f"seed {run.seed}", "oracle"),
            greedy_claim(run, "oracle"),
            *kept_claims(run),
        ]
    return claims


def compared(
    runs: Sequence[SeedRun], one: str, other: str
) -> dict[tuple[str, str], dict[str, Any]]:
    """Differences of two models by decoding and metric."""
    sides = ([run.folders[model] for run in runs] for model in (one, other))
    return {(d["decoding"], d["metric"]): d for d in compare_results(*sides)}


def gain_claim(runs: Sequence[SeedRun], of: str, metric: str) -> Claim:
    """GRPO is better than SFT, beyond chance."""
    gain = compared(runs, "grpo", "sft")["sampled", metric]
    return Claim(
        f"{of}: GRPO raises the sampled {metric} by >= {GAIN}, interval clear of 0",
        f"{gain['b']:.3f} -> {gain['a']:.3f}: {difference(gain)}",
        gain["difference"] >= GAIN and gain["low"] > 0,
    )


def greedy_claim(run: SeedRun, metric: str) -> Claim:
    """GRPO does not cost greedy decoding much."""
    greedy = compared([run], "grpo", "sft")["greedy", metric]
    return Claim(
        f"seed {run.seed}: the greedy {metric} is not lower by more than 0.02",
        difference(greedy),
        greedy["difference"] >= -0.02,
    )


def kept_claims(run: SeedRun) -> list[Claim]:
    """What GRPO must not trade for reward: the format, and how much an answer says."""
    sft, grpo = numbers(run.folders["sft"]), numbers(run.folders["grpo"])
    claims = []
    for decoding in ("greedy", "sampled"):
        before, after = sft[decoding, "format_valid"], grpo[decoding, "format_valid"]
        says = f"seed {run.seed}: the format is kept ({decoding})"
        both = f"{before['value']:.3f} -> {after['value']:.3f}"
        claims.append(Claim(says, both, after["value"] >= before["value"] - 0.02))
        cited = [
            n[decoding, "claims"]["value"] - n[decoding, "uncited"]["value"] for n in (sft, grpo)
        ]
        says = f"seed {run.seed}: cited claims per answer do not collapse ({decoding})"
        both = f"{cited[0]:.3f} -> {cited[1]:.3f}"
        claims.append(Claim(says, both, cited[1] >= 0.9 * cited[0]))
    return claims


def time_claims(runs: Sequence[SeedRun]) -> list[Claim]:
    """What it costs. Meaningless for runs whose stages were there before."""
    return [
        Claim(
            f"seed {run.seed}: the whole run takes <= {LIMIT_S / 60:.0f} minutes",
            f"{run.seconds:.0f} s",
            run.seconds <= LIMIT_S,
        )
        for run in runs
    ]


def interval(entry: Mapping[str, Any]) -> str:
    """``0.912 [0.880, 0.940]``."""
    return f"{entry['value']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}], n = {entry['n']}"


def difference(entry: Mapping[str, Any]) -> str:
    """``+0.105 [+0.071, +0.139]``."""
    return (
        f"{entry['difference']:+.3f} [{entry['low']:+.3f}, {entry['high']:+.3f}], n = {entry['n']}"
    )


if __name__ == "__main__":
    sys.exit(main())
