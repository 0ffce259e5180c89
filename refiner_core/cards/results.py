"""Evaluations as tables and as the Hub's ``model-index``.

In: the evaluations of :class:`CardFacts`. Out: one table per protocol, with models side by side
only where the protocol is the same; one per protocol with the steps of the run below each other;
and index entries for the card's own model. A value that is not a finite number is shown as missing
and never published as a number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refiner_core.cards.facts import MISSING, CardFacts, Line, finite, number, public_name
from refiner_core.contract.kinds import KINDS, TRAINED
from refiner_core.contract.planned import stage_changes
from refiner_core.evaluation.metric_names import FAILURE, FAILURE_WORDS, FIRST, base_of, domain_of
from refiner_core.evaluation.metrics import FAILURE_METRICS, higher_is_better, of_tasks

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
