"""The judge report: what is asked, in which order, and what follows from it.

::

    material ─> items ──┬─ asked, timed ─────────> scores, seconds, tokens
                        ├─ asked again ──────────> repeatability
                        ├─ padded ───────────────> length
                        ├─ turned round ─────────> position (criteria of a call, sources)
                        ├─ the other form ───────> agreement of forms
                        └─ another judge ────────> agreement of judges
                attacks ── twins, these longer, attacks ─> resistance

In: material, a judge's configuration and a way to make it. Out: a :class:`Report`, whose
:meth:`~Report.to_json` is what is written. Every series is asked of a judge that has no store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.fingerprint import digest
from refiner_core.evaluation.statistics import Estimate
from refiner_core.judge_report.agreement import Agreement, agreement
from refiner_core.judge_report.asking import Asker, Cost, MakeJudge
from refiner_core.judge_report.findings import Finding, findings_of
from refiner_core.judge_report.material import Attack, Item, Material
from refiner_core.judge_report.measures import (
    Repeatability,
    Resistance,
    Scores,
    Shift,
    by_place,
    changes,
    credit_by_length,
    repeatability,
    resistance,
    shift,
)
from refiner_core.judges.prompting import judge_prompts_digest

VERSION = 1

#: Sentences that say nothing about any question.
PADDING = (
    "The points above are given in the order in which the question raises them.",
    "Each of them is stated as briefly as the material allows, and none is repeated elsewhere.",
    "Readers who want to go further can take them one after the other.",
    "Nothing in this paragraph adds to what was said before it.",
    "The wording was chosen with the aim of being clear, and the whole is meant to be read once.",
    "Where the order of two points could have been the other way round, no meaning hangs on it.",
    "With this the answer has come to its end, apart from this closing remark.",
    "The closing remark is made only so that the end is easy to see.",
)


@dataclass(frozen=True)
class Options:
    """``repeats``: how often everything is asked as it is, at least once. ``told`` hears what is
    asked next, and how many questions that is."""

    repeats: int = 3
    told: Callable[[str, int], None] = lambda what, count: None


@dataclass(frozen=True)
class Report:
    """Everything that was measured. What was not, is None or missing."""

    judge: Mapping[str, Any]
    against: Mapping[str, Any] | None
    material: Mapping[str, Any]
    findings: tuple[Finding, ...]
    repeatability: Mapping[str, Repeatability]
    gold: Mapping[str, Agreement]
    judges: Mapping[str, Agreement]
    gold_against: Mapping[str, Agreement]
    forms: Agreement | None
    order_of_criteria: Shift | None
    order_of_sources: Shift | None
    length: Mapping[str, Shift]
    length_correlation: Estimate | None
    resistance: Resistance
    costs: Mapping[str, Cost]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; estimates are mappings with their numerators and denominators."""
        value: dict[str, Any] = _plain({"version": VERSION, **asdict(self)})
        return value


def judge_report(
    material: Material,
    config: JudgeConfig,
    make: MakeJudge,
    *,
    against: JudgeConfig | None = None,
    options: Options | None = None,
) -> Report:
    """Measure a judge.

    Parameters
    ----------
    material
        Items and attacks.
    config, make
        The judge, and a way to make one whose store is empty.
    against
        A second judge, whose agreement with the first is measured.

    Raises
    ------
    JudgeOutage
        Nobody could be asked for longer than the configuration bears.
    """
    options = options or Options()
    items = material.items
    asker = Asker(config, make, options.told)
    requests = [item.request for item in items]
    scores, costs = asker.ask_timed(requests, "all")
    repeats = [scores]
    for number in range(2, options.repeats + 1):
        repeats.append(asker.ask(requests, f"all, for the {number}. time"))
    again = repeats[1] if len(repeats) > 1 else None
    other = Asker(against, make, options.told) if against is not None else None
    theirs = other.ask(requests, "all, of the other judge") if other is not None else []
    lengths = _lengths(asker, items, scores, again)
    measured: dict[str, Any] = {
        "repeatability": _by_kind(items, lambda i, at: repeatability(i, [at(r) for r in repeats]))
        if again is not None
        else {},
        "gold": _gold(items, scores),
        "judges": _judges(items, scores, theirs) if other is not None else {},
        "gold_against": _gold(items, theirs) if other is not None else {},
        "forms": _forms(asker, make, options, items, scores),
        "order_of_criteria": _criteria_turned(asker, items, scores, again),
        "order_of_sources": _sources_turned(asker, items, scores, again),
        "length": lengths,
        "length_correlation": _length_correlation(items, scores),
        "resistance": _attacked(asker, material.attacks),
        "costs": costs,
    }
    return Report(
        judge=_identity(config),
        against=None if against is None else _identity(against),
        material=_described(material),
        findings=findings_of(measured),
        **measured,
    )


# ---------------------------------------------------------------- series


def _forms(
    asker: Asker, make: MakeJudge, options: Options, items: Sequence[Item], scores: Scores
) -> Agreement | None:
    """Of one judge asked in both forms; of the first minus the second form, `per_rubric` first."""
    if asker.config.kind != "openai":
        return None
    places = _places(items, "rubric")
    ours = [scores[i] for i in places]
    form: Literal["per_rubric", "batched"] = (
        "per_rubric" if _is_batched(asker.config) else "batched"
    )
    second = Asker(replace(asker.config, form=form), make, options.told)
    found = second.ask([items[i].request for i in places], f"rubrics, {form}")
    first, last = (found, ours) if form == "per_rubric" else (ours, found)
    return agreement(first, last, [items[i].question_id for i in places])


def _criteria_turned(
    asker: Asker, items: Sequence[Item], scores: Scores, again: Scores | None
) -> Shift | None:
    """From the second half of a call to the first: what a criterion gains by standing early."""
    if not _is_batched(asker.config):
        return None
    asked = _places(items, "rubric")
    turned = asker.ask([items[i].request for i in reversed(asked)], "criteria turned round")
    places = by_place([items[i] for i in asked])
    moved, late, early = [], [], []
    noise: list[float | None] = []
    for place, i, after in zip(places, asked, reversed(turned), strict=True):
        if place == 0:
            continue
        before = scores[i]
        moved.append(items[i])
        early.append(before if place > 0 else after)
        late.append(after if place > 0 else before)
        noise += changes([before], [again[i]]) if again is not None else [None]
    return shift(moved, late, early, noise)


def _sources_turned(
    asker: Asker, items: Sequence[Item], scores: Scores, again: Scores | None
) -> Shift | None:
    """The same sources in the other order."""
    places = [i for i in _places(items, "citation_recall") if len(set(items[i].sources)) > 1]
    if not places:
        return None
    turned = [
        replace(items[i].request, reference="\n\n".join(reversed(items[i].sources))) for i in places
    ]
    after = asker.ask(turned, "sources turned round")
    return shift(
        [items[i] for i in places],
        [scores[i] for i in places],
        after,
        _noise(scores, again, places),
    )


def _lengths(
    asker: Asker, items: Sequence[Item], scores: Scores, again: Scores | None
) -> dict[str, Shift]:
    """Answers with sentences that say nothing, for qualities and faults apart: one may be that an
    answer pads."""
    places = _places(items, "rubric")
    padding = "\n\n" + " ".join(PADDING)
    padded = [replace(items[i].request, text=items[i].request.text + padding) for i in places]
    after = asker.ask(padded, "answers padded")
    found = {}
    for polarity in ("positive", "negative"):
        chosen = [n for n, i in enumerate(places) if items[i].polarity == polarity]
        if chosen:
            found[polarity] = shift(
                [items[places[n]] for n in chosen],
                [scores[places[n]] for n in chosen],
                [after[n] for n in chosen],
                _noise(scores, again, [places[n] for n in chosen]),
            )
    return found


def _length_correlation(items: Sequence[Item], scores: Scores) -> Estimate | None:
    places = _places(items, "rubric")
    return credit_by_length([items[i] for i in places], [scores[i] for i in places])


def _attacked(asker: Asker, attacks: Sequence[Attack]) -> Resistance:
    twins = [attack.twin for attack in attacks]
    twin = asker.ask(twins, "honest twins")
    # Each with another pair of sentences, so that none is the same question as another.
    pairs = itertools.cycle(itertools.permutations(PADDING, 2))
    controls = [
        replace(t, text=" ".join((t.text, *pair))) for t, pair in zip(twins, pairs, strict=False)
    ]
    control = asker.ask(controls, "honest twins, longer")
    attacked = asker.ask([attack.request for attack in attacks], "hostile answers")
    return resistance(attacks, twin, control, attacked)


# ---------------------------------------------------------------- by kind


def _by_kind(items: Sequence[Item], measure: Callable[..., Any]) -> dict[str, Any]:
    """A number for each kind, and for all. ``measure`` gets items and what picks their scores."""
    found = {}
    kinds = list(dict.fromkeys(item.request.kind for item in items))
    for kind in ("all", *kinds):
        places = [i for i, item in enumerate(items) if kind in ("all", item.request.kind)]

        def at(scores: Scores, places: Sequence[int] = places) -> list[float | None]:
            return [scores[i] for i in places]

        found[kind] = measure([items[i] for i in places], at)
    return found


def _gold(items: Sequence[Item], scores: Scores) -> dict[str, Agreement]:
    known = [i for i, item in enumerate(items) if item.gold is not None]
    labelled, given = [items[i] for i in known], [scores[i] for i in known]
    gold = [item.gold for item in labelled]
    return _judges(labelled, gold, given) if known else {}


def _judges(items: Sequence[Item], first: Scores, second: Scores) -> dict[str, Agreement]:
    return _by_kind(
        items, lambda i, at: agreement(at(first), at(second), [item.question_id for item in i])
    )


def _places(items: Sequence[Item], kind: str) -> list[int]:
    return [i for i, item in enumerate(items) if item.request.kind == kind]


def _noise(scores: Scores, again: Scores | None, places: Sequence[int]) -> Scores | None:
    if again is None:
        return None
    return changes([scores[i] for i in places], [again[i] for i in places])


def _is_batched(config: JudgeConfig) -> bool:
    return config.kind == "openai" and config.form == "batched"


# ---------------------------------------------------------------- JSON


def _identity(config: JudgeConfig) -> dict[str, Any]:
    """What decides the judgements."""
    if config.kind == "lexical":
        return {"kind": "lexical", "model": config.model}
    names = ("kind", "model", "revision", "prompt", "form", "structured_output", "temperature")
    identity = {name: getattr(config, name) for name in (*names, "max_tokens", "extra_body")}
    return {**identity, "prompt_digest": judge_prompts_digest(config.prompt, config.form)[:12]}


def _described(material: Material) -> dict[str, Any]:
    kinds = [item.request.kind for item in material.items]
    asked = [asdict(item.request) for item in material.items]
    return {
        "name": material.name,
        "digest": digest(asked)[:12],
        "questions": len({item.question_id for item in material.items}),
        "answers": len({item.answer_id for item in material.items}),
        "requests": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "attacks": len(material.attacks),
    }


def _plain(value: Any) -> Any:
    """Named tuples as mappings, keys as text."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
