"""Reports and data cards of the data stage: pure functions of counts and files.

In: tallies, lengths, the split, and the written files. Out: the report as JSON-ready values, in one
form for rows and for an agent's tasks, and a README with the same content in words
(``card.md.jinja``). Neither depends on time or machine.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, Template

from refiner_core.contract.config import RecipeConfig
from refiner_core.data.sources import SYNTHETIC, Which, source_digest

REPORT_VERSION = 1


@dataclass
class Tally:
    """Outcome counts of the rows, tasks or demonstrations of one kind; lengths are in
    tokens. ``names`` counts modes of rows or domains of tasks; ``more`` has fields of this kind
    only."""

    source: str
    digest: str
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    prompt_lengths: list[int] = field(default_factory=list)  # every prompt measured
    total_lengths: list[int] = field(default_factory=list)  # every prompt + answer measured
    loss_lengths: list[int] = field(default_factory=list)  # of kept rows
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def reasons(self) -> str:
        """Counts of dropped rows by reason, as text."""
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))


def percentiles(lengths: Sequence[int]) -> dict[str, int]:
    """Nearest-rank percentiles; empty for no lengths."""
    if not lengths:
        return {}
    shares = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    values = np.percentile(lengths, list(shares.values()), method="inverted_cdf")
    return {name: int(value) for name, value in zip(shares, values, strict=True)}


def in_order(counts: Counter[str]) -> dict[str, int]:
    """Counts sorted by name."""
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


def write_report(output_dir: Path, report: Mapping[str, Any]) -> None:
    """Write a report as ``report.json``, and as text in ``README.md``."""
    domains = sorted({name for found in report.get("domains", {}).values() for name in found})
    sides = {"sft": report["sft"], "rl": report["rl"]}
    (output_dir / "README.md").write_text(
        _template().render(report=report, domains=domains, **sides), encoding="utf-8"
    )
    text = json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False)
    (output_dir / "report.json").write_text(text + "\n", encoding="utf-8")


@functools.cache
def _template() -> Template:
    text = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return environment.from_string(text)


def tally_of(config: RecipeConfig, which: Which) -> Tally:
    """An empty tally of a source, under its public name: a Hub id, or a file name without its
    folders."""
    path: str | None = getattr(config.data, f"{which}_path")
    digest = source_digest(config.data, which)
    name = "none" if path is None else SYNTHETIC if path == SYNTHETIC else Path(path).name
    if digest.startswith("hub:"):
        name = f"{path}@{getattr(config.data, f'{which}_revision')}"
    return Tally(name, digest)
