"""Reports and data cards of the data stage: pure functions of counts and files.

In: tallies, lengths, the split, and the files written. Out: the report as JSON-ready values, of
rows and of an agent's tasks in one form, and a README that says the same in words. Nothing of time
or machine enters either.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.types import PromptRow
from refiner_core.data.sources import SYNTHETIC, Which, source_digest
from refiner_core.environments.protocol import domain_of_id


@dataclass
class Tally:
    """What became of the rows of one kind; lengths are in tokens."""

    which: Which
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    differing_ids: int = 0  # of the evidence, that stand for several texts within their row
    prompt_lengths: list[int] = field(default_factory=list)  # every prompt measured
    total_lengths: list[int] = field(default_factory=list)  # every prompt + answer measured


REPORT_VERSION = 1
_TITLES: dict[str, str] = {"sft": "Demonstrations (SFT)", "rl": "Prompts (RL and evaluation)"}


def percentiles(lengths: Sequence[int]) -> dict[str, int]:
    """Nearest-rank percentiles; empty where there is nothing to describe."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    middle = {
        name: ordered[max(math.ceil(share * len(ordered)) - 1, 0)] for name, share in ranks.items()
    }
    return {"min": ordered[0], **middle, "max": ordered[-1]}


def make_report(
    config: RecipeConfig,
    *,
    tokenizer: Any,
    tallies: Sequence[Tally],
    split: Mapping[str, int],
    answer_lengths: Sequence[int],
    files: Mapping[str, tuple[Path, int]],
) -> dict[str, Any]:
    """The report of a data stage; ``files`` maps names to (path, rows)."""
    report: dict[str, Any] = {"version": REPORT_VERSION, "split": dict(split)}
    report["split"]["split_seed"] = config.data.split_seed
    for tally in tallies:
        digest = source_digest(config.data, tally.which)
        report[tally.which] = {
            "source": _source_name(config, tally.which, digest),
            "digest": digest,
            "read": tally.read,
            "kept": tally.kept,
            "dropped": dict(sorted(tally.dropped.items())),
            "modes": dict(sorted(tally.modes.items())),
            "ids_with_differing_texts": tally.differing_ids,
            "prompt_tokens": percentiles(tally.prompt_lengths),
        }
    report["sft"]["loss_tokens"] = percentiles(answer_lengths)
    report |= files_and_limits(config, tokenizer, files)
    return report


def files_and_limits(
    config: RecipeConfig, tokenizer: Any, files: Mapping[str, tuple[Path, int]]
) -> dict[str, Any]:
    """What every data report says of its files, the tokenizer, and the limits on lengths."""
    template = str(getattr(tokenizer, "chat_template", "") or "")
    return {
        "files": {
            name: {"rows": rows, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for name, (path, rows) in files.items()
        },
        "tokenizer": {
            "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest(),
            "vocabulary": len(tokenizer),
        },
        "limits": {
            "data.max_prompt_token_length": config.data.max_prompt_token_length,
            "sft.pack_length": config.sft.pack_length,
            "grpo.response_length": config.grpo.response_length,
            "grpo.max_token_length": config.grpo.max_token_length,
        },
    }


def _source_name(config: RecipeConfig, which: Which, digest: str) -> str:
    """A source as it may be shown to others: a Hub id, or a file name without its folders."""
    path: str | None = getattr(config.data, f"{which}_path")
    if path is None:
        return "none"
    revision: str | None = getattr(config.data, f"{which}_revision")
    if digest.startswith("hub:"):
        return f"{path}@{revision}"
    return SYNTHETIC if path == SYNTHETIC else Path(path).name


def data_card(report: Mapping[str, Any]) -> str:
    """README.md of the prepared data."""
    lines = ["# Prepared data", "", "Made by refiner's data stage; `report.json` has the same."]
    for which in ("sft", "rl"):
        lines += ["", f"## {_TITLES[which]}", "", *_section(report[which])]
    split = report["split"]
    lines += [
        "",
        "## Split",
        "",
        f"By question, seed {split['split_seed']}: {split['held_out_questions']} of "
        f"{split['questions']} questions are held out, with all their rows. No held-out question "
        "is among the demonstrations. Case, punctuation and quotes make no other question; a "
        "paraphrase does.",
        "",
        "## Files",
        "",
        "| file | rows | SHA-256 |",
        "|---|---:|---|",
    ]
    lines += [
        f"| `{name}` | {file['rows']} | `{file['sha256']}` |"
        for name, file in report["files"].items()
    ]
    limits = ", ".join(f"`{name}` = {value}" for name, value in report["limits"].items())
    lines += ["", f"Limits: {limits}. Longer rows are dropped, never cut."]
    return "\n".join(lines) + "\n"


def _section(kind: Mapping[str, Any]) -> list[str]:
    if not kind["read"]:
        return ["No source."]
    lines = [
        f"Source `{kind['source']}` (`{kind['digest']}`): {kind['read']} rows read, "
        f"{kind['kept']} kept."
    ]
    if kind["dropped"]:
        lines += ["", "| dropped because | rows |", "|---|---:|"]
        lines += [f"| {reason} | {count} |" for reason, count in kind["dropped"].items()]
    if ids := kind["ids_with_differing_texts"]:
        stand = "id of the evidence stands" if ids == 1 else "ids of the evidence stand"
        lines += ["", f"{ids} {stand} for differing texts: a source may have added to another's."]
    labels = {
        "prompt_tokens": "Tokens of the prompts measured, before any was dropped for its length",
        "loss_tokens": "Tokens with loss of the demonstrations kept",
    }
    for name, label in labels.items():
        if kind.get(name):
            values = ", ".join(f"{key} {value}" for key, value in kind[name].items())
            lines += ["", f"{label}: {values}."]
    return lines


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
