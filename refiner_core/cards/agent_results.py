"""What a card's tables tell of an agent's evaluations.

In: evaluations of :class:`CardFacts` whose numbers are of tasks (pass@k). Out: which rows stand in
a table, the table of failures, and what the protocol was, in words.

Numbers of tasks stand first, overall and then by domain, where the first k, the last k and the
first attempt are told; counts of failures stand in a table of their own, so that nobody takes them
for scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from refiner_core.cards.facts import finite, public_name
from refiner_core.cards.printed import MISSING, Line, number
from refiner_core.evaluation.metrics import FAILURE_METRICS, of_tasks
from refiner_core.evaluation.names import FAILURE, FAILURE_WORDS, base_of, domain_of
from refiner_core.evaluation.pass_at_k import FIRST

#: Numbers of attempts that are told of all domains together.
_OF_ATTEMPTS = ("reward", "partial", "turns", "length_tokens", "repairs", "tool_errors")
_ERRORS = "episode_error"


class Entry(NamedTuple):
    """An evaluation and its place in ``facts.evaluations``."""

    place: int
    values: Mapping[str, Any]

    @property
    def metric(self) -> str:
        """What it measures."""
        return str(self.values["metric"])


def about_tasks(entries: Sequence[Entry]) -> bool:
    """Whether these are numbers of an agent."""
    return any(of_tasks(e.metric) for e in entries)


def largest_k(entries: Sequence[Entry]) -> int:
    """Attempts at each task."""
    found = (re.fullmatch(r"pass@(\d+)", e.metric) for e in entries)
    return max((int(match[1]) for match in found if match), default=1)


def told_metrics(entries: Sequence[Entry]) -> list[str]:
    """Rows of the table of numbers, in order."""
    found = list(dict.fromkeys(e.metric for e in entries))
    most = largest_k(entries)
    by_domain = {FIRST, "pass@1", f"pass@{most}", f"pass^{most}"} if most > 1 else {"pass@1"}
    return [
        metric
        for metric in found
        if (base_of(metric) in by_domain if domain_of(metric) else _is_told(metric))
        # Of one attempt all of them are pass@1, which stands for them; pass^1 always is.
        and metric != "pass^1"
        and (most > 1 or base_of(metric) != FIRST or "pass@1" not in found)
    ]


def _is_told(metric: str) -> bool:
    return of_tasks(metric) or metric in _OF_ATTEMPTS


def main_metrics(entries: Sequence[Entry]) -> list[str]:
    """The few that stand for an agent where there is no room for all."""
    most = largest_k(entries)
    names = (FIRST, "pass@1", f"pass@{most}", f"pass^{most}") if most > 1 else ("pass@1",)
    found = {e.metric for e in entries}
    return [name for name in dict.fromkeys(names) if name in found]


def failure_rows(entries: Sequence[Entry], models: Sequence[str]) -> list[tuple[Line, ...]]:
    """Rows of the table of failures: attempts, errors, successes, failures by class."""
    known = {(e.metric, str(e.values["stage"])): e for e in entries}
    occurring = [
        metric for metric in FAILURE_METRICS
        if any(_count(known.get((metric, model)), "numerator") for model in models)
    ]  # fmt: skip
    wanted = [
        ("attempts", _ERRORS, "denominator"),
        ("ended by an error of the infrastructure, counted as none", _ERRORS, "numerator"),
        ("passed", "success", "numerator"),
        *((f"failed: {FAILURE_WORDS[m.removeprefix(FAILURE)]}", m, "numerator") for m in occurring),
    ]
    return [
        (Line(label), *(_cell(known.get((metric, model)), part) for model in models))
        for label, metric, part in wanted
    ]


def _cell(entry: Entry | None, part: str) -> Line:
    count = _count(entry, part)
    if entry is None or count is None:
        return Line(MISSING)
    return number(count, f"evaluations.{entry.place}.{part}")


def _count(entry: Entry | None, part: str) -> int | None:
    value = None if entry is None else finite(entry.values.get(part))
    return None if value is None else round(value)


def has_errors(entries: Sequence[Entry]) -> bool:
    """Whether some attempts count as none."""
    return any(_count(e, "numerator") for e in entries if e.metric == _ERRORS)


def agent_protocol_words(
    known: Mapping[str, Any], entries: Sequence[Entry], trained_with: str = ""
) -> str:
    """What a protocol of tasks is, and what its numbers mean. ``trained_with`` is the model of the
    user in training; empty for the environment's own script."""
    sampling, environment = known.get("sampling") or {}, known.get("environment") or {}
    attempts = int(known.get("samples_per_prompt") or 1)
    top_k = f", top_k {sampling['top_k']}" if sampling.get("top_k") else ""
    parts = [
        f"{known.get('num_prompts')} {known.get('split')} tasks × {_times(attempts)} per task, "
        f"temperature {sampling.get('temperature')}, top_p {sampling.get('top_p')}{top_k}, at most "
        f"{sampling.get('max_new_tokens')} tokens a turn, {environment.get('max_turns')} turns and "
        f"{sampling.get('context_tokens')} tokens an episode",
        f"environment `{public_name(str(environment.get('name')))}` "
        f"{environment.get('version')}, user: {_user(environment.get('user'), trained_with)}",
    ]
    if left := [str(one) for one in environment.get("excluded") or ()]:
        parts.append(f"not measured: {', '.join(left)}")
    if reward := known.get("reward"):
        weights = ", ".join(str(weight) for weight in reward.get("weights") or ())
        parts.append(f"weights of checks in `partial`: {weights}")
    text = "; ".join(parts) + ". n counts tasks."
    if not any(of_tasks(e.metric) for e in entries):
        return text
    text += " " + _meaning(attempts)
    if has_errors(entries):
        text += (
            " Attempts that an error of the infrastructure ended count as none, so that some tasks "
            f"have fewer than {attempts} valid attempts, and with fewer than k no pass@k."
            if attempts > 1
            else " Tasks whose attempt an error of the infrastructure ended are left out."
        )
    return text


def _times(attempts: int) -> str:
    return f"{attempts} attempt{'s' * (attempts != 1)}"


def _meaning(attempts: int) -> str:
    if attempts == 1:
        return "pass@1 is the share of tasks that the one attempt solves."
    return (
        "pass@k is the chance that at least one of k attempts at a task succeeds, pass^k that all "
        f"of k do (so it falls with k); both are unbiased estimates from {attempts} attempts. "
        "`pass@1_first` is the first attempt alone."
    )


def _user(user: Any, trained_with: str) -> str:
    """With whom it talked."""
    if not isinstance(user, Mapping):
        return str(user) if user else "not recorded"
    model = str(user.get("model") or "")
    settings = (f"{k} {v}" for k, v in user.items() if k != "model" and v is not None)
    said = [f"`{public_name(model)}`", *settings] if model else ["the environment's own script"]
    return ", ".join(said) + (" (another one than in training)" if model != trained_with else "")
