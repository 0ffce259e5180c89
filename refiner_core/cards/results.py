"""Evaluations as tables and as the Hub's ``model-index``.

In: the evaluations of :class:`CardFacts`. Out: one table per protocol, with models side by side
only where the protocol is the same; one per protocol with the steps of the run below each other;
and index entries for the card's own model. A value that is not a finite number is shown as missing
and never published as a number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refiner_core.cards.agent_results import (
    Entry,
    about_tasks,
    agent_protocol_words,
    failure_rows,
    main_metrics,
    told_metrics,
)
from refiner_core.cards.facts import CardFacts, finite, public_name
from refiner_core.cards.printed import MISSING, Line, number
from refiner_core.contract.kinds import KINDS, TRAINED
from refiner_core.contract.planned import stage_changes
from refiner_core.evaluation.metrics import higher_is_better, of_tasks
from refiner_core.evaluation.names import domain_of

_ORDER = ("base", "random_copier", "do_nothing", *TRAINED)
_LABELS = {
    "base": "base",
    "random_copier": "random copier (floor)",
    "do_nothing": "ends at once (floor)",
    **{name: KINDS[name].label for name in TRAINED},
}
_TASKS = {False: "citation-grounded refinement", True: "tool use over several turns"}
_STEP = re.compile(r"(\w+)-step(\d+)")
#: Metrics of the table that follows a run; the others of a step stand in its own card.
PROGRESSION = ("reward", "rubric_score", "citation_f1", "format_valid", "oracle", "fact_recall")


@dataclass(frozen=True)
class Table:
    """One protocol's numbers, ready to print; ``about`` says what the protocol is."""

    title: Line
    about: str
    header: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]


def by_protocol(facts: CardFacts) -> dict[tuple[str, str], list[Entry]]:
    """Evaluations by (protocol, decoding), in the order in which they were made."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for place, entry in enumerate(facts.evaluations):
        groups.setdefault((entry["protocol"], entry["decoding"]), []).append(Entry(place, entry))
    return groups


def own_entries(facts: CardFacts) -> list[Entry]:
    """The evaluations of the card's own model."""
    everything = [Entry(place, entry) for place, entry in enumerate(facts.evaluations)]
    return [entry for entry in everything if entry.values["stage"] == facts.own]


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


def result_tables(facts: CardFacts) -> list[Table]:
    """One table per (protocol, decoding): this model, and what it is to be held against."""
    tables = []
    for group in by_protocol(facts).values():
        beside = [e for e in group if not _other_step(e.values["stage"], facts)]
        if beside:
            tables.append(_table(facts, beside))
            tables += _failures(beside)
    return tables


def _failures(entries: list[Entry]) -> list[Table]:
    """Of an agent, why attempts failed."""
    if not about_tasks(entries):
        return []
    models = sorted({e.values["stage"] for e in entries}, key=_rank)
    rows = failure_rows(entries, models)
    title = "Why attempts fail: " + protocol_title(usual_n(entries))
    header = ("outcome", *(_LABELS.get(model, f"`{model}`") for model in models))
    return [Table(title, "Counts over all tasks.", header, tuple(rows))]


def _other_step(model: str, facts: CardFacts) -> bool:
    return model != facts.own and _STEP.fullmatch(model) is not None


def _table(facts: CardFacts, entries: list[Entry]) -> Table:
    models = sorted({e.values["stage"] for e in entries}, key=_rank)
    metrics = list(dict.fromkeys(e.values["metric"] for e in entries))
    if facts.config.environment.name:
        metrics = told_metrics(entries)
    usual = usual_n(entries)
    cells = {(e.values["metric"], e.values["stage"]): cell(e, usual.values["n"]) for e in entries}
    return Table(
        title=protocol_title(usual),
        about=protocol_words(facts, usual.values["protocol"], entries),
        header=("metric", *(label(model, facts) for model in models)),
        rows=tuple(
            (
                Line(f"`{metric}`"),
                *(cells.get((metric, model), Line(MISSING)) for model in models),
            )
            for metric in metrics
        ),
    )


def progression_tables(facts: CardFacts) -> list[Table]:
    """One table per (protocol, decoding) under which more than one step of the run was measured."""
    tables = []
    for group in by_protocol(facts).values():
        steps = {e.values["stage"]: step_of(e.values["stage"], facts) for e in group}
        steps = {model: step for model, step in steps.items() if step is not None}
        followed = main_metrics(group) if about_tasks(group) else PROGRESSION
        entries = [
            e for e in group if e.values["stage"] in steps and e.values["metric"] in followed
        ]
        if len(steps) < 2 or not entries:
            continue
        usual = usual_n(entries)
        metrics = [m for m in followed if m in {e.values["metric"] for e in entries}]
        cells = {
            (e.values["stage"], e.values["metric"]): cell(e, usual.values["n"]) for e in entries
        }
        order = sorted(steps, key=lambda model: (steps[model] or 0, model))
        rows = tuple(
            (Line(_step_label(m, facts)), *(cells.get((m, k), Line(MISSING)) for k in metrics))
            for m in order
        )
        header = ("step", *(f"`{metric}`" for metric in metrics))
        tables.append(Table(protocol_title(usual), "", header, rows))
    return tables


def _step_label(model: str, facts: CardFacts) -> str:
    text = f"step {step_of(model, facts)}"
    return f"**{text} (this model)**" if model == facts.own else text


def usual_n(entries: list[Entry]) -> Entry:
    """An entry that has the most frequent n; numbers of one domain have a n of their own."""
    entries = [e for e in entries if not domain_of(e.metric)] or entries
    (usual, _), *_ = Counter(e.values["n"] for e in entries).most_common(1)
    return next(e for e in entries if e.values["n"] == usual)


def protocol_title(entry: Entry) -> Line:
    """Name, decoding, n and fingerprint of a table's protocol."""
    values = entry.values
    name = values.get("protocol_name") or "protocol"
    n = number(values["n"], f"evaluations.{entry.place}.n")
    front = f"{name}, {values['decoding']} decoding, n = "
    return front + n + f" (protocol `{values['protocol'][:12]}`)"


def protocol_words(facts: CardFacts, protocol: str, entries: Sequence[Entry] = ()) -> str:
    """What a protocol is, in words; empty where nobody has recorded it."""
    known = facts.protocols.get(protocol)
    if not known:
        return ""
    if known.get("environment"):
        return agent_protocol_words(known, entries, facts.config.environment.user.model)
    sampling, judge = known.get("sampling") or {}, known.get("judge") or {}
    rubrics, reward = known.get("rubrics") or {}, known.get("reward")
    parts = [
        f"{known.get('num_prompts')} {known.get('split')} prompts × "
        f"{known.get('samples_per_prompt')} sample{'s' * (known.get('samples_per_prompt') != 1)}, "
        f"temperature {sampling.get('temperature')}, top_p {sampling.get('top_p')}, "
        f"at most {sampling.get('max_new_tokens')} tokens",
    ]
    if judge:
        revision = f" at `{judge['revision']}`" if judge.get("revision") else ""
        parts.append(
            f"judge `{public_name(str(judge.get('model')))}`{revision} with prompts "
            f"`{judge.get('prompt')}`, temperature {judge.get('temperature')}"
        )
    if rubrics:
        named = f" (`{public_name(str(rubrics['static']))}`)" if rubrics.get("static") else ""
        parts.append(f"rubrics: {rubrics.get('source')}{named}, {rubrics.get('aggregation')}")
    if reward:
        parts.append(
            f"reward: {reward.get('combination')}, scale {reward.get('verification_reward')}, "
            f"citation weight {reward.get('paper_citation_weight')}"
        )
    if (version := known.get("version", 1)) > 1:
        parts.append(f"rewards of version {version}: {stage_changes('evaluate', version)}")
    return "; ".join(parts) + "."


def _rank(model: str) -> tuple[int, str]:
    front = _STEP.sub(r"\1", model)
    return (_ORDER.index(front) if front in _ORDER else len(_ORDER), model)


def label(model: str, facts: CardFacts) -> str:
    """A model as a column's head: ``**GRPO, step 50 (this model)**``."""
    found = _STEP.fullmatch(model)
    name = _LABELS.get(found.group(1) if found else model, f"`{model}`")
    if found is not None:
        name += f", step {found.group(2)}"
    elif model == facts.stage != facts.own:
        name += ", last step"
    return f"**{name} (this model)**" if model == facts.own else name


def cell(entry: Entry, usual: int | None = None) -> Line:
    """``0.512 [0.480, 0.543], n = 64``; n only where it is not ``usual``, a dash where there is no
    number."""
    place, values = f"evaluations.{entry.place}", entry.values
    n: Line | str = ""
    if values["n"] != usual:
        n = ", n = " + number(values["n"], f"{place}.n")
    value, low, high = (finite(values.get(key)) for key in ("value", "low", "high"))
    if value is None:
        return Line(MISSING) + n
    text = number(f"{value:.3f}", f"{place}.value")
    if low is not None and high is not None:
        text = text + " [" + number(f"{low:.3f}", f"{place}.low") + ", "
        text = text + number(f"{high:.3f}", f"{place}.high") + "]"
    return text + n


def without_value(facts: CardFacts) -> list[str]:
    """Names of the numbers that could not be computed."""
    return [
        f"`{entry['metric']}` of {entry['stage']} ({entry['decoding']})"
        for entry in facts.evaluations
        if finite(entry.get("value")) is None
    ]


# ---------------------------------------------------------------- which step to prefer


def preferred_step(facts: CardFacts) -> Line | None:
    """Which of the measured steps has the best number, by the recipe's own choice of metric.

    None unless this model and another step of its run were measured under one protocol.
    """
    publish = facts.config.publish
    sign, highest, higher = 1.0, "highest", "higher"
    if higher_is_better(publish.best_metric) is False:
        sign, highest, higher = -1.0, "lowest", "lower"
    for (protocol, decoding), group in by_protocol(facts).items():
        measured = [
            (step, entry)
            for entry in group
            if entry.values["metric"] == publish.best_metric
            and decoding == publish.best_decoding
            and finite(entry.values.get("value")) is not None
            and (step := step_of(entry.values["stage"], facts)) is not None
        ]
        mine = [entry for _, entry in measured if entry.values["stage"] == facts.own]
        if not mine or len(measured) < 2:
            continue
        step, best = min(
            measured, key=lambda m: (-sign * m[1].values["value"], m[1] != mine[0], m[0])
        )
        name = f"`{publish.best_metric}` ({decoding}, protocol `{protocol[:12]}`)"
        front = f"Of the {len(measured)} steps that were measured, "
        if best == mine[0]:
            text = front + f"none has a {higher} {name} than this one: " + cell(best)
        else:
            text = front + f"step {step} has the {highest} {name}: " + cell(best)
            text = text + "; this one has " + cell(mine[0])
        return text + f". A {highest} number among several flatters its step."
    return None


# ---------------------------------------------------------------- the Hub's index


def model_index(facts: CardFacts) -> list[dict[str, Any]]:
    """The ``model-index`` of the front matter; empty where the model has no finite number."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for (protocol, decoding), group in by_protocol(facts).items():
        own = [e for e in group if e.values["stage"] == facts.own]
        if facts.config.environment.name:
            told = main_metrics(own)
            own = [e for e in own if e.metric in told]
        metrics = [m for m in map(index_metric, own) if m is not None]
        if not metrics:
            continue
        name = own[0].values.get("protocol_name") or "held-out questions"
        results[protocol, decoding] = {
            "task": {"type": "text-generation", "name": _TASKS[about_tasks(own)]},
            "dataset": {"type": "refiner-held-out", "name": f"{name} ({protocol[:12]})"},
            "metrics": metrics,
        }
    return [{"name": facts.name, "results": list(results.values())}] if results else []


def index_metric(entry: Entry) -> dict[str, Any] | None:
    """One metric as ``model-index`` has it: type, name with n and 95 % interval, value."""
    values = entry.values
    value, low, high = (finite(values.get(key)) for key in ("value", "low", "high"))
    if value is None:
        return None
    interval = ""
    if low is not None and high is not None:
        interval = f", 95 % interval {low:.3f} to {high:.3f}"
    counted = "tasks" if of_tasks(str(values["metric"])) else "prompts"
    said = f"{values['decoding']}, n = {values['n']} {counted}{interval}"
    return {
        "type": values["metric"],
        "name": f"{values['metric']} ({said})",
        "value": round(value, 6),
    }
