"""Precision and recall of each failure class on the public set of failure logs.

    python -m tests.bench failures

Prints a table: ``logs`` are the entries that the patterns were mended with, ``unseen`` those that
they were not. Both are in ``tests/data/failure_logs``, written in the style of Slurm, NCCL, CUDA,
vLLM, DeepSpeed and Python; ``none`` are lines that must match no class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from infra.jobs.failures import class_of_text

FOLDER = Path(__file__).parents[1] / "data" / "failure_logs"


class ClassScore(NamedTuple):
    """Counts of one class: right, found in all, and there in all."""

    right: int
    found: int
    there: int

    @property
    def precision(self) -> float:
        """Share of the found that are right."""
        return self.right / self.found if self.found else 1.0

    @property
    def recall(self) -> float:
        """Share of those there that are found."""
        return self.right / self.there if self.there else 1.0


def scores(name: str) -> dict[str, ClassScore]:
    """Scores by class on a file of logs; ``all`` are the failures together."""
    known = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    pairs = [(kind, class_of_text(t) or "none") for kind, texts in known.items() for t in texts]
    right = Counter(kind for kind, said in pairs if kind == said)
    found, there = Counter(said for _, said in pairs), Counter(kind for kind, _ in pairs)
    by_class = {k: ClassScore(right[k], found[k], there[k]) for k in known if k != "none"}
    whole = ClassScore(*map(sum, zip(*by_class.values(), strict=True)))
    return {**by_class, "all": whole}


def main(_arguments: Sequence[str] = ()) -> int:
    """Print the table."""
    seen, unseen = scores("logs"), scores("unseen")
    print("| class | logs | precision | recall | unseen logs | precision | recall |")
    print("|---|---|---|---|---|---|---|")
    for kind, score in seen.items():
        other = unseen.get(kind, ClassScore(0, 0, 0))
        cells = [
            f"{s.there} | {100 * s.precision:.0f} % | {100 * s.recall:.0f} %"
            for s in (score, other)
        ]
        print(f"| `{kind}` | {' | '.join(cells)} |")
    for name in ("logs", "unseen"):
        known = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))["none"]
        wrong = [text for text in known if class_of_text(text)]
        print(f"\n{name}: {len(known)} lines that show no failure, {len(wrong)} matched a class")
    return 0
