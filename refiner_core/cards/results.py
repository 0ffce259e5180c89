"""Evaluations as tables and as the Hub's ``model-index``.

In: the evaluations of :class:`CardFacts`. Out: one table per protocol, with models side by side
only under the same protocol; one per protocol with the steps of the run below each other;
and index entries for the card's own model. A value that is not a finite number is shown as missing
and never published as a number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from refiner_core.cards.facts import MISSING, CardFacts, finite, number
from refiner_core.contract.kinds import KINDS, TRAINED
from refiner_core.evaluation.metric_names import FAILURE, FAILURE_WORDS, FIRST, base_of, domain_of
from refiner_core.evaluation.metrics import (
    FAILURE_METRICS,
    higher_is_better,
    main_metrics,
    of_tasks,
)

#: Metrics of attempts over all domains together.
_OF_ATTEMPTS = ("reward", "partial", "turns", "length_tokens", "repairs", "tool_errors")
_ERRORS = "episode_error"


_ORDER = ("base", "random_copier", "do_nothing", *TRAINED)
_LABELS = {
    "base": "base",
    "random_copier": "random copier (floor)",
    "do_nothing": "ends at once (floor)",
    **{name: KINDS[name].label for name in TRAINED},
}
_TASKS = {False: "citation-grounded refinement", True: "tool use over several turns"}
_STEP = re.compile(r"(\w+)-step(\d+)")
#: Metrics of the table over the steps of a run; the others are in each step's own card.
PROGRESSION = ("reward", "rubric_score", "citation_f1", "format_valid", "oracle", "fact_recall")


class ResultEntry(NamedTuple):
    """An evaluation and its place in ``facts.evaluations``."""

    place: int
    values: Mapping[str, Any]

    @property
    def metric(self) -> str:
        """Name of the metric."""
        return str(self.values["metric"])

    @property
    def model(self) -> str:
        """Name of the model that was measured."""
        return str(self.values["stage"])

    @property
    def value(self) -> float | None:
        """The number; None if it is not finite."""
        return finite(self.values.get("value"))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of its interval; None if it has none."""
        low, high = finite(self.values.get("low")), finite(self.values.get("high"))
        return None if low is None or high is None else (low, high)

    def whole(self, part: str) -> int | None:
        """Its numerator or denominator, if known."""
        value = finite(self.values.get(part))
        return None if value is None else round(value)

    def number(self, part: str, text: Any) -> str:
        """A printed part of it, marked."""
        return number(text, f"evaluations.{self.place}.{part}")


#: One protocol's numbers, ready to print: ``title``, ``about`` (the protocol in words), ``header``,
#: ``rows``.
Table = dict[str, Any]


def _table(
    title: str,
    about: str,
    header: Sequence[str],
    rows: Mapping[str, str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], str],
) -> Table:
    """A table with labels of rows (by their keys) and their cells; a dash for a missing one."""
    lines = [
        (label, *(cells.get((row, column), MISSING) for column in columns))
        for row, label in rows.items()
    ]
    return {"title": title, "about": about, "header": tuple(header), "rows": lines}


def by_protocol(facts: CardFacts) -> dict[tuple[str, str], list[ResultEntry]]:
    """Evaluations by (protocol, decoding), in order."""
    groups: dict[tuple[str, str], list[ResultEntry]] = {}
    for place, entry in enumerate(facts.evaluations):
        groups.setdefault((entry["protocol"], entry["decoding"]), []).append(
            ResultEntry(place, entry)
        )
    return groups


def own_entries(facts: CardFacts) -> list[ResultEntry]:
    """The evaluations of the card's own model."""
    everything = (ResultEntry(place, entry) for place, entry in enumerate(facts.evaluations))
    return [entry for entry in everything if entry.model == facts.own]


def step_of(model: str, facts: CardFacts) -> int | None:
    """The optimiser step of a model of this card's own run; None for any other model."""
    if model == facts.own:
        return facts.step
    found = _STEP.fullmatch(model)
    if found is not None and found.group(1) == facts.stage:
        return int(found.group(2))
    if model == facts.stage == "grpo":
        return facts.config.grpo.num_training_steps
    return None


# ---------------------------------------------------------------- agents


def about_tasks(entries: Sequence[ResultEntry]) -> bool:
    """True if these are numbers of an agent."""
    return any(of_tasks(e.metric) for e in entries)


def shown_metrics(entries: Sequence[ResultEntry]) -> list[str]:
    """Rows of the table of numbers, in order: metrics of tasks, overall and then by domain."""
    found, main = dict.fromkeys(e.metric for e in entries), main_of_tasks(entries)
    return [
        metric
        for metric in found
        if (
            base_of(metric) in main
            if domain_of(metric)
            else of_tasks(metric) or metric in _OF_ATTEMPTS
        )
        # With one attempt all of them equal pass@1, as pass^1 always does.
        and metric != "pass^1"
        and (len(main) > 1 or base_of(metric) != FIRST or "pass@1" not in found)
    ]


def main_of_tasks(entries: Sequence[ResultEntry]) -> list[str]:
    """The few metrics that represent an agent in a small table."""
    return [metric for metric in main_metrics(e.metric for e in entries) if of_tasks(metric)]


def _failures(facts: CardFacts, entries: list[ResultEntry], models: list[str]) -> Table:
    """Reasons of an agent's failed attempts: counts in a separate table, so that they are not
    mistaken for scores."""
    known = {(e.metric, e.model): e for e in entries}
    wanted = [
        ("attempts", _ERRORS, "denominator"),
        ("ended by an error of the infrastructure, counted as none", _ERRORS, "numerator"),
        ("passed", "success", "numerator"),
    ]
    for metric in FAILURE_METRICS:
        found = [known.get((metric, model)) for model in models]
        if any(entry is not None and entry.whole("numerator") for entry in found):
            name = FAILURE_WORDS[metric.removeprefix(FAILURE)]
            wanted.append((f"failed: {name}", metric, "numerator"))
    cells = {
        (label, model): entry.number(part, count)
        for label, metric, part in wanted
        for model in models
        if (entry := known.get((metric, model))) is not None
        and (count := entry.whole(part)) is not None
    }
    return _table(
        f"Why attempts fail: {_title(usual_n(entries))}",
        "Counts over all tasks.",
        ("outcome", *(_LABELS.get(model, f"`{model}`") for model in models)),
        {label: label for label, *_ in wanted},
        models,
        cells,
    )


# ---------------------------------------------------------------- tables


def result_tables(
    facts: CardFacts, about: Callable[[str, list[ResultEntry]], str] = lambda *_: ""
) -> list[Table]:
    """One table per (protocol, decoding): this model and its comparisons; for an agent also one
    of failures. ``about`` describes a protocol with these numbers."""
    tables = []
    for group in by_protocol(facts).values():
        entries = [e for e in group if e.model == facts.own or not _STEP.fullmatch(e.model)]
        if not entries:
            continue
        models = sorted({e.model for e in entries}, key=_rank)
        metrics = list(dict.fromkeys(e.metric for e in entries))
        if facts.is_agent:
            metrics = shown_metrics(entries)
        usual = usual_n(entries)
        tables.append(
            _table(
                _title(usual),
                about(usual.values["protocol"], entries),
                ("metric", *(label(model, facts) for model in models)),
                {metric: f"`{metric}`" for metric in metrics},
                models,
                {(e.metric, e.model): cell(e, usual.values["n"]) for e in entries},
            )
        )
        if about_tasks(entries):
            tables.append(_failures(facts, entries, models))
    return tables


def progression_tables(facts: CardFacts) -> list[Table]:
    """One table per (protocol, decoding) with several measured steps of the run."""
    tables = []
    for group in by_protocol(facts).values():
        steps = {e.model: s for e in group if (s := step_of(e.model, facts)) is not None}
        followed = main_of_tasks(group) if about_tasks(group) else PROGRESSION
        entries = [e for e in group if e.model in steps and e.metric in followed]
        if len(steps) < 2 or not entries:
            continue
        usual = usual_n(entries)
        measured = {e.metric for e in entries}
        metrics = [metric for metric in followed if metric in measured]
        rows = {
            model: f"step {steps[model]}" for model in sorted(steps, key=lambda m: (steps[m], m))
        }
        if facts.own in rows:
            rows[facts.own] = f"**{rows[facts.own]} (this model)**"
        cells = {(e.model, e.metric): cell(e, usual.values["n"]) for e in entries}
        header = ("step", *(f"`{metric}`" for metric in metrics))
        tables.append(_table(_title(usual), "", header, rows, metrics, cells))
    return tables


def usual_n(entries: list[ResultEntry]) -> ResultEntry:
    """An entry with the most frequent n; metrics by domain have their own n."""
    entries = [e for e in entries if not domain_of(e.metric)] or entries
    (usual, _), *_ = Counter(e.values["n"] for e in entries).most_common(1)
    return next(e for e in entries if e.values["n"] == usual)


def _title(entry: ResultEntry) -> str:
    """Name, decoding, n and fingerprint of a table's protocol."""
    values = entry.values
    return (
        f"{values.get('protocol_name') or 'protocol'}, {values['decoding']} decoding, n = "
        f"{entry.number('n', values['n'])} (protocol `{values['protocol'][:12]}`)"
    )


def _rank(model: str) -> tuple[int, str]:
    front = _STEP.sub(r"\1", model)
    return (_ORDER.index(front) if front in _ORDER else len(_ORDER), model)


def label(model: str, facts: CardFacts) -> str:
    """A model as a column header: ``**GRPO, step 50 (this model)**``."""
    found = _STEP.fullmatch(model)
    name = _LABELS.get(found.group(1) if found else model, f"`{model}`")
    if found is not None:
        name += f", step {found.group(2)}"
    elif model == facts.stage != facts.own:
        name += ", last step"
    return f"**{name} (this model)**" if model == facts.own else name


def cell(entry: ResultEntry, usual: int | None = None) -> str:
    """``0.512 [0.480, 0.543], n = 64``; n only if it differs from ``usual``, a dash for a missing
    number."""
    n = entry.values["n"]
    text = MISSING
    if entry.value is not None:
        text = entry.number("value", f"{entry.value:.3f}")
        if entry.interval is not None:
            low, high = entry.interval
            text += f" [{entry.number('low', f'{low:.3f}')}, {entry.number('high', f'{high:.3f}')}]"
    return text if n == usual else f"{text}, n = {entry.number('n', n)}"


def without_value(facts: CardFacts) -> list[str]:
    """Names of the numbers that could not be computed."""
    return [
        f"`{entry['metric']}` of {entry['stage']} ({entry['decoding']})"
        for entry in facts.evaluations
        if finite(entry.get("value")) is None
    ]


# ---------------------------------------------------------------- which step to prefer


def preferred_step(facts: CardFacts) -> str | None:
    """Best of the measured steps, by the recipe's chosen metric.

    None unless this model and another step of its run were measured under one protocol.
    """
    metric, wanted = facts.config.publish.best_metric, facts.config.publish.best_decoding
    lower = higher_is_better(metric) is False
    highest, higher = ("lowest", "lower") if lower else ("highest", "higher")
    for (protocol, decoding), group in by_protocol(facts).items():
        measured = [
            (value if lower else -value, entry.model != facts.own, step, entry)
            for entry in group
            if entry.metric == metric
            and decoding == wanted
            and (value := entry.value) is not None
            and (step := step_of(entry.model, facts)) is not None
        ]
        mine = [entry for *_, entry in measured if entry.model == facts.own]
        if not mine or len(measured) < 2:
            continue
        *_, step, best = min(measured, key=lambda m: m[:3])
        name = f"`{metric}` ({decoding}, protocol `{protocol[:12]}`)"
        said = f"step {step} has the {highest} {name}: {cell(best)}; this one has {cell(mine[0])}"
        if best == mine[0]:
            said = f"none has a {higher} {name} than this one: {cell(best)}"
        return (
            f"Of the {len(measured)} steps that were measured, {said}. A {highest} number among "
            "several flatters its step."
        )
    return None


# ---------------------------------------------------------------- the Hub's index


def model_index(facts: CardFacts) -> list[dict[str, Any]]:
    """The ``model-index`` of the front matter; empty if the model has no finite number."""
    results = []
    for (protocol, _), group in by_protocol(facts).items():
        own = [e for e in group if e.model == facts.own]
        if facts.is_agent:
            told = main_of_tasks(own)
            own = [e for e in own if e.metric in told]
        metrics = [_index_metric(e) for e in own if e.value is not None]
        if metrics:
            name = own[0].values.get("protocol_name") or "held-out questions"
            results.append(
                {
                    "task": {"type": "text-generation", "name": _TASKS[about_tasks(own)]},
                    "dataset": {"type": "refiner-held-out", "name": f"{name} ({protocol[:12]})"},
                    "metrics": metrics,
                }
            )
    return [{"name": facts.name, "results": results}] if results else []


def _index_metric(entry: ResultEntry) -> dict[str, Any]:
    """One metric in the form of ``model-index``: type, name with n and 95 % interval, value."""
    interval = ""
    if entry.interval is not None:
        interval = ", 95 % interval {:.3f} to {:.3f}".format(*entry.interval)
    counted = "tasks" if of_tasks(entry.metric) else "prompts"
    said = f"{entry.values['decoding']}, n = {entry.values['n']} {counted}{interval}"
    return {
        "type": entry.values["metric"],
        "name": f"{entry.values['metric']} ({said})",
        "value": round(entry.value or 0.0, 6),
    }
