"""The report and the data card of an agent's data stage: pure functions of counts and files.

In: counts, rows, the files written. Out: the report as JSON-ready values (in the form of
:func:`refiner_core.data.datacard.make_report`, so that cards and summaries read both), and a
README that says the same in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.types import PromptRow
from refiner_core.data.datacard import REPORT_VERSION, files_and_limits, percentiles
from refiner_core.environments.rows import domain_of_id


@dataclass
class Counts:
    """What became of tasks or demonstrations; lengths are in tokens. ``more`` counts what only one
    kind has, such as demonstrations with a mistake."""

    source: str
    digest: str
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)
    prompt_lengths: list[int] = field(default_factory=list)
    total_lengths: list[int] = field(default_factory=list)
    loss_lengths: list[int] = field(default_factory=list)
    more: dict[str, int] = field(default_factory=dict)


def task_report(
    config: RecipeConfig,
    *,
    environment: Mapping[str, Any],
    tokenizer: Any,
    counts: Mapping[str, Counts],
    splits: Mapping[str, Sequence[PromptRow]],
    files: Mapping[str, tuple[Path, int]],
) -> dict[str, Any]:
    """The report; ``files`` maps names to (path, rows), ``splits`` names to the rows kept."""
    held_out, total = len(splits["test"]), sum(map(len, splits.values()))
    report: dict[str, Any] = {
        "version": REPORT_VERSION,
        "environment": dict(environment),
        "split": {
            "questions": total,
            "held_out_questions": held_out,
            "rl_without_rubrics": 0,
            "split_seed": config.data.split_seed,
        },
        "domains": {
            name: dict(sorted(Counter(domain_of_id(r.sample_id) for r in rows).items()))
            for name, rows in splits.items()
        },
    }
    for which, found in counts.items():
        report[which] = {
            "source": found.source,
            "digest": found.digest,
            "read": found.read,
            "kept": found.kept,
            "dropped": dict(sorted(found.dropped.items())),
            "domains": dict(sorted(found.domains.items())),
            "prompt_tokens": percentiles(found.prompt_lengths),
            "total_tokens": percentiles(found.total_lengths),
            **found.more,
        }
    report["sft"]["loss_tokens"] = percentiles(counts["sft"].loss_lengths)
    report |= files_and_limits(config, tokenizer, files)
    return report


def tasks_card(report: Mapping[str, Any]) -> str:
    """README.md of the prepared data."""
    rl, sft = report["rl"], report["sft"]
    lines = ["# Prepared data", "", "Made by refiner's data stage; `report.json` has the same."]
    lines += ["", "## Tasks", "", f"Of {rl['source']} (`{rl['digest'][:16]}`).", ""]
    domains = sorted({name for found in report["domains"].values() for name in found})
    lines += ["| domain | train | test |", "|---|---:|---:|"]
    for name in domains:
        sides = (report["domains"][split].get(name, 0) for split in ("train", "test"))
        lines.append(f"| {name} | {' | '.join(map(str, sides))} |")
    lines += ["", "Splits are the environment's; no held-out task is among the others."]
    lines += _dropped(rl)
    lines += ["", "## Demonstrations", ""]
    if sft["read"]:
        lines.append(f"Of {sft['source']}: {sft['read']} made, {sft['kept']} kept.")
        if sft.get("flawed"):
            lines.append(f"{sft['flawed']} have a mistake; {sft['solved']} solve their task.")
        lines += _dropped(sft)
        for key, label in (("total_tokens", "Tokens"), ("loss_tokens", "Tokens with loss")):
            values = ", ".join(f"{name} {value}" for name, value in sft[key].items())
            lines += ["", f"{label}: {values}."]
    else:
        lines.append("None.")
    lines += ["", "## Files", "", "| file | rows | SHA-256 |", "|---|---:|---|"]
    lines += [f"| `{n}` | {f['rows']} | `{f['sha256']}` |" for n, f in report["files"].items()]
    limits = ", ".join(f"`{name}` = {value}" for name, value in report["limits"].items())
    lines += ["", f"Limits: {limits}. Longer rows are dropped, never cut."]
    return "\n".join(lines) + "\n"


def _dropped(kind: Mapping[str, Any]) -> list[str]:
    if not kind["dropped"]:
        return []
    lines = ["", "| dropped because | rows |", "|---|---:|"]
    return lines + [f"| {reason} | {count} |" for reason, count in kind["dropped"].items()]
