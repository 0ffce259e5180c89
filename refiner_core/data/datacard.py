"""Reports and data cards of the data stage: pure functions of counts and files.

In: tallies, lengths, the split, and the files written. Out: the report as JSON-ready values, of
rows and of an agent's tasks in one form, and a README that says the same in words. Nothing of time
or machine enters either.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.data.sources import SYNTHETIC, Which, source_digest

REPORT_VERSION = 1
_TITLES = {"sft": "Demonstrations (SFT)", "rl": "Prompts (RL and evaluation)"}
_HEAD = ("# Prepared data", "", "Made by refiner's data stage; `report.json` has the same.")


@dataclass
class Tally:
    """Counts of what became of the rows, tasks or demonstrations of one kind; lengths are in
    tokens. ``names`` counts modes of rows or domains of tasks; ``more`` is what only this kind
    reports."""

    source: str
    digest: str
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    prompt_lengths: list[int] = field(default_factory=list)  # every prompt measured
    total_lengths: list[int] = field(default_factory=list)  # every prompt + answer measured
    loss_lengths: list[int] = field(default_factory=list)  # of what is kept
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def reasons(self) -> str:
        """Say how many were dropped for what."""
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))


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


def in_order(counts: Counter[str]) -> dict[str, int]:
    """Counts by name, in the order of names."""
    return dict(sorted(counts.items()))


def make_report(
    config: RecipeConfig,
    tokenizer: Any,
    tallies: Mapping[str, Tally],
    split: Mapping[str, int],
    files: Mapping[str, tuple[Path, int]],
    **further: Any,
) -> dict[str, Any]:
    """The report of a data stage; ``files`` maps names to (path, rows)."""
    template = str(getattr(tokenizer, "chat_template", "") or "")
    report = {
        "version": REPORT_VERSION,
        "split": {**split, "split_seed": config.data.split_seed},
        **further,
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
    for which, tally in tallies.items():
        report[which] = {
            "source": tally.source,
            "digest": tally.digest,
            "read": tally.read,
            "kept": tally.kept,
            "dropped": in_order(tally.dropped),
            "prompt_tokens": percentiles(tally.prompt_lengths),
            **tally.more,
        }
    report["sft"]["loss_tokens"] = percentiles(tallies["sft"].loss_lengths)
    return report


def write_report(output_dir: Path, report: Mapping[str, Any], card: str) -> None:
    """Write a report as ``report.json``, and its card as ``README.md``."""
    (output_dir / "README.md").write_text(card, encoding="utf-8")
    text = json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False)
    (output_dir / "report.json").write_text(text + "\n", encoding="utf-8")


def tally_of(config: RecipeConfig, which: Which) -> Tally:
    """Nothing yet of a source: it is named as it may be shown to others, by a Hub id, or a file
    name without its folders."""
    path: str | None = getattr(config.data, f"{which}_path")
    digest = source_digest(config.data, which)
    name = "none" if path is None else SYNTHETIC if path == SYNTHETIC else Path(path).name
    if digest.startswith("hub:"):
        name = f"{path}@{getattr(config.data, f'{which}_revision')}"
    return Tally(name, digest)


def data_card(report: Mapping[str, Any]) -> str:
    """README.md of prepared rows."""
    lines = [*_HEAD]
    for which, title in _TITLES.items():
        lines += ["", f"## {title}", "", *_section(report[which])]
    split = report["split"]
    lines += [
        "",
        "## Split",
        "",
        f"By question, seed {split['split_seed']}: {split['held_out_questions']} of "
        f"{split['questions']} questions are held out, with all their rows. No held-out question "
        "is among the demonstrations. Case, punctuation and quotes make no other question; a "
        "paraphrase does.",
    ]
    return "\n".join([*lines, *_files(report)]) + "\n"


def _section(kind: Mapping[str, Any]) -> list[str]:
    if not kind["read"]:
        return ["No source."]
    lines = [
        f"Source `{kind['source']}` (`{kind['digest']}`): {kind['read']} rows read, "
        f"{kind['kept']} kept.",
        *_dropped(kind),
    ]
    if ids := kind["ids_with_differing_texts"]:
        stand = "id of the evidence stands" if ids == 1 else "ids of the evidence stand"
        lines += ["", f"{ids} {stand} for differing texts: a source may have added to another's."]
    labels = {
        "prompt_tokens": "Tokens of the prompts measured, before any was dropped for its length",
        "loss_tokens": "Tokens with loss of the demonstrations kept",
    }
    return lines + _lengths(
        kind, [(name, label) for name, label in labels.items() if kind.get(name)]
    )


def tasks_card(report: Mapping[str, Any]) -> str:
    """README.md of an agent's prepared tasks."""
    rl, sft = report["rl"], report["sft"]
    lines = [*_HEAD, "", "## Tasks", "", f"Of {rl['source']} (`{rl['digest'][:16]}`).", ""]
    domains = sorted({name for found in report["domains"].values() for name in found})
    lines += ["| domain | train | test |", "|---|---:|---:|"]
    for name in domains:
        sides = (report["domains"][split].get(name, 0) for split in ("train", "test"))
        lines.append(f"| {name} | {' | '.join(map(str, sides))} |")
    lines += ["", "Splits are the environment's; no held-out task is among the others."]
    lines += [*_dropped(rl), "", "## Demonstrations", ""]
    if sft["read"]:
        lines.append(f"Of {sft['source']}: {sft['read']} made, {sft['kept']} kept.")
        if sft.get("flawed"):
            lines.append(f"{sft['flawed']} have a mistake; {sft['solved']} solve their task.")
        lines += _dropped(sft)
        lines += _lengths(sft, [("total_tokens", "Tokens"), ("loss_tokens", "Tokens with loss")])
    else:
        lines.append("None.")
    return "\n".join([*lines, *_files(report)]) + "\n"


def _lengths(kind: Mapping[str, Any], labels: Iterable[tuple[str, str]]) -> list[str]:
    lines = []
    for name, label in labels:
        values = ", ".join(f"{key} {value}" for key, value in kind[name].items())
        lines += ["", f"{label}: {values}."]
    return lines


def _dropped(kind: Mapping[str, Any]) -> list[str]:
    if not kind["dropped"]:
        return []
    lines = ["", "| dropped because | rows |", "|---|---:|"]
    return lines + [f"| {reason} | {count} |" for reason, count in kind["dropped"].items()]


def _files(report: Mapping[str, Any]) -> list[str]:
    """Give what every data card ends with."""
    lines = ["", "## Files", "", "| file | rows | SHA-256 |", "|---|---:|---|"]
    lines += [f"| `{n}` | {f['rows']} | `{f['sha256']}` |" for n, f in report["files"].items()]
    limits = ", ".join(f"`{name}` = {value}" for name, value in report["limits"].items())
    return [*lines, "", f"Limits: {limits}. Longer rows are dropped, never cut."]
