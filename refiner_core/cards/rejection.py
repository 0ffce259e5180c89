"""What a card says of rejection sampling: what was sampled, by what rule it was kept, and how much.

In: :class:`CardFacts` with the report of a ``sample`` stage. Out: lines of the training set-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refiner_core.cards.facts import CardFacts
from refiner_core.cards.printed import Line, as_line, counted, joined, number
from refiner_core.cards.settings import shown

_PATH = "reports.sample"
_SAME = {
    "none": "all of them",
    "text": "of those that say the same, one",
    "tools": "of those that call the same tools in the same order, one",
}
_LOST = (
    ("unscored", "without a score because the judge failed"),
    ("error", "ended by errors of the infrastructure"),
)


def sampling_lines(facts: CardFacts) -> list[Line]:
    """How attempts were sampled and kept; none where no report says."""
    report = facts.reports.get("sample", {})
    if not report.get("attempts"):
        return []
    return [_attempts(facts, report), _rule(facts, report), _kept(report), *_by_domain(report)]


def _attempts(facts: CardFacts, report: Mapping[str, Any]) -> Line:
    rule, counts = facts.config.sample, report["attempts"]
    backend = rule.generation_backend
    lane = "episode" if report.get("lane") == "episodes" else "answer"
    text = "**Attempts:** " + counted(counts["total"], f"{_PATH}.attempts.total", lane)
    text = text + " at " + counted(report["prompts"]["total"], f"{_PATH}.prompts.total", "prompt")
    text = text + f" ({rule.attempts} each), sampled by the model that training started from with "
    text = text + f"`temperature = {shown(rule.temperature)}`, `top_p = {shown(rule.top_p)}`"
    if rule.top_k:
        text = text + f", `top_k = {rule.top_k}`"
    text = text + f", {backend}"
    lost = report.get("not_kept") or {}
    parts = [
        number(lost[why], f"{_PATH}.not_kept.{why}") + f" {words}"
        for why, words in _LOST
        if lost.get(why)
    ]
    return text + ("; of these " + joined(parts, " and ") if parts else "") + "."


def _rule(facts: CardFacts, report: Mapping[str, Any]) -> Line:
    rule, episodes = facts.config.sample, report.get("lane") == "episodes"
    score = "reward" if episodes else "share of the highest reward that the prompt can give"
    same = _SAME["text" if rule.distinct == "tools" and not episodes else rule.distinct]
    most = f", at most {rule.max_kept} a prompt" if rule.max_kept is not None else ""
    text = f"**Kept by rule:** full successes ({score} at least {shown(rule.success)}; {same}"
    text += f"{most}); of a prompt without one "
    if rule.min_partial > 1:
        return as_line(text + "nothing.")
    partial = "a partial score" if episodes else "a share"
    return as_line(text + f"the best attempt from {partial} of {shown(rule.min_partial)} on.")


def _kept(report: Mapping[str, Any]) -> Line:
    kept, prompts = report["kept"], report["prompts"]
    text = "**Kept:** " + counted(kept["demonstrations"], f"{_PATH}.kept.demonstrations", "attempt")
    text = text + ": " + number(kept["full_success"], f"{_PATH}.kept.full_success") + " of "
    text = text + counted(
        report["attempts"]["full"], f"{_PATH}.attempts.full", "full success", "full successes"
    )
    text = text + " at " + counted(prompts["full"], f"{_PATH}.prompts.full", "prompt")
    text = (
        text
        + ", and "
        + counted(kept["best_partial"], f"{_PATH}.kept.best_partial", "best attempt")
    )
    text = text + " without full success; nothing at "
    return text + counted(prompts["none"], f"{_PATH}.prompts.none", "prompt") + "."


def _by_domain(report: Mapping[str, Any]) -> list[Line]:
    domains = report.get("by_domain") or {}
    if len(domains) < 2:
        return []
    return [
        "**Kept by domain:** " + joined(_domain(*item) for item in sorted(domains.items())) + "."
    ]


def _domain(name: str, counts: Mapping[str, Any]) -> Line:
    kept, prompts, path = counts["kept"], counts["prompts"], f"{_PATH}.by_domain.{name}"
    text = f"{name} " + number(kept["demonstrations"], f"{path}.kept.demonstrations") + " of "
    text = text + number(counts["attempts"]["total"], f"{path}.attempts.total") + " ("
    text = text + number(prompts["full"], f"{path}.prompts.full") + " of "
    return text + counted(prompts["total"], f"{path}.prompts.total", "prompt") + " solved)"
