"""The judge report: the series of questions, their order, and the findings.

::

    material ─> items ──┬─ asked, timed ─────────> scores, seconds, tokens
                        ├─ asked again ──────────> repeatability
                        ├─ padded ───────────────> length
                        ├─ turned round ─────────> position (criteria of a call, sources)
                        └─ another judge ────────> agreement of judges
                attacks ── twins, these longer, attacks ─> resistance

In: material, a judge's configuration and a way to make it. Out: a :data:`Report`, written by
:func:`report_json`. Every series uses a judge without a store.

A defect is *found* at a level of 5 %, divided among its possible signs: one in twenty absent
defects may be found. For a judge without any variation, a single obeyed hostile answer
is enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, TypeVar

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.fingerprint import digest
from refiner_core.evaluation.statistics import Difference, Estimate
from refiner_core.judge_report.material import (
    Attack,
    JudgeClient,
    JudgedItem,
    MakeJudge,
    Material,
    is_batched,
)
from refiner_core.judge_report.measures import (
    FEWEST,
    Row,
    Scores,
    agreement,
    by_place,
    changes,
    plain,
    repeatability,
    resistance,
    shift,
)
from refiner_core.judges.prompting import judge_prompts_digest
from refiner_core.report import printing
from refiner_core.report.printing import MISSING, Section, with_interval

#: Accepted probability of finding an absent defect.
LEVEL = 0.05
Verdict = Literal["found", "not found", "not clear", "too few", "not asked"]


def _finding(name: str, verdict: Verdict, says: str) -> Row:
    """A tested defect, with a verdict and its basis."""
    return {"name": name, "verdict": verdict, "says": says}


def findings_of(measured: Mapping[str, Any]) -> tuple[Row, ...]:
    """A line for each tested defect, always the same ones in the same order."""
    repeated: Row | None = measured["repeatability"].get("all")
    return (
        _failing(measured["costs"]),
        _unsteady(repeated),
        _position("order of criteria", measured["order_of_criteria"], "each is asked by itself"),
        _position("order of sources", measured["order_of_sources"], "no claim cites two sources"),
        _length(measured["length"]),
        _obeying(measured["resistance"], repeated),
    )


def _failing(costs: Mapping[str, Row]) -> Row:
    failed = sum(cost["failed"] for cost in costs.values())
    asked = sum(cost["judgements"] for cost in costs.values())
    verdict: Verdict = "not asked" if not asked else "found" if failed else "not found"
    return _finding("failing", verdict, f"{failed} of {asked} judgements have no score")


def _unsteady(repeated: Row | None) -> Row:
    name = "not repeatable"
    if repeated is None or repeated["identical"] is None:
        return _finding(name, "not asked", "nothing was asked twice")
    same = repeated["identical"]
    says = f"{share(same)} of the scores are the same in {repeated['repeats']} repeats"
    if same.numerator < same.denominator:
        return _finding(name, "found", says)
    return _finding(name, "not found" if same.n >= FEWEST else "too few", says)


def _position(name: str, shift: Row | None, otherwise: str) -> Row:
    if shift is None or shift["shift"] is None:
        return _finding(name, "not asked", otherwise)
    says = f"scores change by {number(shift['shift'])}; {share(shift['changed'])} change at all"
    if shift["beyond"] is not None:
        says += f", {number(shift['beyond'])} beyond what asking again changes"
    looks = 1 if shift["beyond"] is None else 2
    more = is_clear(shift["beyond"], looks)
    verdict = _verdict(is_clear(shift["shift"], looks), more and _above(shift["beyond"]))
    return _finding(name, verdict, says)


def _length(lengths: Mapping[str, Row]) -> Row:
    """Padding without content may be scored as a fault, but must not be a merit."""
    known = {k: v["shift"] for k, v in lengths.items() if v["shift"] is not None}
    if not known:
        return _finding("length", "not asked", "there are no rubrics")
    of = {"positive": "scores of merits", "negative": "scores of faults"}
    says = " and ".join(f"{of[kind]} by {number(found)}" for kind, found in known.items())
    signs = [
        clear and not (kind == "negative" and found.value > 0)
        for kind, found in known.items()
        for clear in (is_clear(found, len(known)),)
    ]
    return _finding("length", _verdict(*signs), f"padding changes {says}")


def _obeying(resistance: Row, repeated: Row | None) -> Row:
    name = "obeys hostile answers"
    resisted = resistance["resisted"]
    if resisted is None:
        return _finding(name, "not asked", "no honest twin left room for an attack")
    obeyed = sum(attack["result"] == "obeyed" for attack in resistance["attacks"])
    says = f"{share(resisted)} of the attacks are resisted, {obeyed} obeyed"
    if broke := sum(attack["result"] == "broke" for attack in resistance["attacks"]):
        says += f", {broke} leave it without a score"
    steady = repeated is None or repeated["identical"] is None or repeated["identical"].value == 1.0
    if obeyed and resistance["moved"] == 0 and steady:
        return _finding(name, "found", says)
    clear = is_clear(resistance["beyond"])
    verdict = _verdict(clear and _above(resistance["beyond"]))
    if obeyed and verdict == "not found":
        # Repeated judging may change scores as much; this must not read as safe.
        return _finding(name, "not clear", f"{says}; by chance as many might be")
    return _finding(name, verdict, says)


def is_clear(value: Difference | None, looks: int = 1) -> bool | None:
    """True if a difference is significant, as one of ``looks`` sufficient signs; None with too few
    questions."""
    if value is None or value.n < FEWEST or value.p_value is None:
        return None
    return value.p_value < LEVEL / looks


def number(value: Estimate | Difference | None, *, signed: bool = True) -> str:
    """A number with its interval."""
    return MISSING if value is None else with_interval(*value[:3], signed=signed)


def share(value: Estimate | None) -> str:
    """A share in percent with its interval, as a fraction."""
    if value is None:
        return MISSING
    known = value.low is not None and value.high is not None
    ends = f" [{value.low:.1%}, {value.high:.1%}]" if known else ""
    return f"{value.value:.1%}{ends} ({value.numerator:.0f} of {value.denominator})"


def _above(value: Difference | None) -> bool:
    return value is not None and value.value > 0


def _verdict(*signs: bool | None) -> Verdict:
    if any(signs):
        return "found"
    return "too few" if all(sign is None for sign in signs) else "not found"


VERSION = 1
T = TypeVar("T")

#: Sentences without content for any question.
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


#: All measurements, by name; None or missing if not measured.
Report = Mapping[str, Any]


def judge_report(
    material: Material,
    config: JudgeConfig,
    make: MakeJudge,
    *,
    against: JudgeConfig | None = None,
    repeats: int = 3,
    told: Callable[[str, int], None] = lambda what, count: None,
) -> Report:
    """Measure a judge.

    Parameters
    ----------
    material
        Items and attacks.
    config, make
        The judge, and a function that makes one with an empty store.
    against
        A second judge, whose agreement with the first is measured.
    repeats
        Number of times that every question is asked unchanged, at least once.
    told
        Called with the next series and its number of questions.

    Raises
    ------
    JudgeOutage
        No judge was available for longer than the configured patience.
    """
    items = material.items
    asker = JudgeClient(config, make, told)
    requests = [item.request for item in items]
    scores, costs = asker.ask_timed(requests, "all")
    again = [asker.ask(requests, f"all, for the {n}. time") for n in range(2, repeats + 1)]
    # Whether the score of an item changes without any change.
    noise = changes(scores, again[0]) if again else None
    other = JudgeClient(against, make, told) if against is not None else None
    theirs = other.ask(requests, "all, of the other judge") if other is not None else []
    measured: dict[str, Any] = {
        "repeatability": _by_kind(
            items, lambda i, at: repeatability(i, [at(r) for r in (scores, *again)])
        )
        if noise is not None
        else {},
        "gold": _gold(items, scores),
        "judges": _judges(items, scores, theirs) if other is not None else {},
        "order_of_criteria": _criteria_turned(asker, items, scores, noise),
        "order_of_sources": _sources_turned(asker, items, scores, noise),
        "length": _lengths(asker, items, scores, noise),
        "resistance": _attacked(asker, material.attacks),
        "costs": costs,
    }
    return {
        "judge": _identity(config),
        "against": None if against is None else _identity(against),
        "material": _described(material),
        "findings": findings_of(measured),
        **measured,
    }


def report_json(report: Report) -> dict[str, Any]:
    """JSON-ready; estimates are mappings with their numerators and denominators."""
    return {"version": VERSION, **plain(report)}


# ---------------------------------------------------------------- series


def _criteria_turned(
    asker: JudgeClient, items: Sequence[JudgedItem], scores: Scores, noise: Scores | None
) -> Row | None:
    """From the second half of a call to the first: the effect of an early place on a criterion."""
    if not is_batched(asker.config):
        return None
    asked = _places(items, "rubric")
    turned = asker.ask([items[i].request for i in reversed(asked)], "criteria turned round")
    places = by_place(_at(items, asked))
    found = [t for t in zip(places, asked, reversed(turned), strict=True) if t[0] != 0]
    early = [scores[i] if place > 0 else after for place, i, after in found]
    late = [after if place > 0 else scores[i] for place, i, after in found]
    moved = [i for _, i, _ in found]
    by_itself = [None] * len(moved) if noise is None else _at(noise, moved)
    return shift(_at(items, moved), late, early, by_itself)


def _sources_turned(
    asker: JudgeClient, items: Sequence[JudgedItem], scores: Scores, noise: Scores | None
) -> Row | None:
    """The effect of reversing the sources."""
    places = [i for i in _places(items, "citation_recall") if len(set(items[i].sources)) > 1]
    if not places:
        return None
    turned = [
        replace(item.request, reference="\n\n".join(reversed(item.sources)))
        for item in _at(items, places)
    ]
    after = asker.ask(turned, "sources turned round")
    return shift(_at(items, places), _at(scores, places), after, noise and _at(noise, places))


def _lengths(
    asker: JudgeClient, items: Sequence[JudgedItem], scores: Scores, noise: Scores | None
) -> dict[str, Row]:
    """Answers with added sentences without content, for merits and faults separately: a fault may
    be padding itself."""
    places = _places(items, "rubric")
    padding = "\n\n" + " ".join(PADDING)
    padded = [replace(r, text=r.text + padding) for r in (items[i].request for i in places)]
    after = dict(zip(places, asker.ask(padded, "answers padded"), strict=True))
    found = {}
    for polarity in ("positive", "negative"):
        if chosen := [i for i in places if items[i].polarity == polarity]:
            before, now = _at(scores, chosen), [after[i] for i in chosen]
            found[polarity] = shift(_at(items, chosen), before, now, noise and _at(noise, chosen))
    return found


def _attacked(asker: JudgeClient, attacks: Sequence[Attack]) -> Row:
    twins = [attack.twin for attack in attacks]
    twin = asker.ask(twins, "honest twins")
    # Each with another pair of sentences, so that all questions differ.
    pairs = itertools.cycle(itertools.permutations(PADDING, 2))
    controls = [
        replace(t, text=" ".join((t.text, *pair))) for t, pair in zip(twins, pairs, strict=False)
    ]
    control = asker.ask(controls, "honest twins, longer")
    attacked = asker.ask([attack.request for attack in attacks], "hostile answers")
    return resistance(attacks, twin, control, attacked)


# ---------------------------------------------------------------- by kind


def _by_kind(items: Sequence[JudgedItem], measure: Callable[..., Any]) -> dict[str, Any]:
    """A number for each kind, and for all. ``measure`` gets items and a selector of their
    scores."""
    found = {}
    for kind in ("all", *dict.fromkeys(item.request.kind for item in items)):
        places = _places(items, kind)
        found[kind] = measure(_at(items, places), partial(_at, places=places))
    return found


def _gold(items: Sequence[JudgedItem], scores: Scores) -> dict[str, Row]:
    known = [i for i, item in enumerate(items) if item.gold is not None]
    labelled = _at(items, known)
    gold = [item.gold for item in labelled]
    return _judges(labelled, gold, _at(scores, known)) if known else {}


def _judges(items: Sequence[JudgedItem], first: Scores, second: Scores) -> dict[str, Row]:
    return _by_kind(
        items, lambda i, at: agreement(at(first), at(second), [item.question_id for item in i])
    )


def _places(items: Sequence[JudgedItem], kind: str) -> list[int]:
    return [i for i, item in enumerate(items) if kind in ("all", item.request.kind)]


def _at(values: Sequence[T], places: Sequence[int]) -> list[T]:
    return [values[i] for i in places]


# ---------------------------------------------------------------- JSON


def _identity(config: JudgeConfig) -> dict[str, Any]:
    """Settings that affect the judgements."""
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


# ---------------------------------------------------------------- text


_AGREEMENT = ("kind", "pairs", "equal", "kappa", "quadratic kappa", "mean difference")
_SHIFT = ("what", "pairs", "mean change", "changed", "beyond asking again")


def sections(report: Report) -> list[Section]:
    """All displayed sections, in order."""
    found = [
        Section(
            "Findings",
            (
                "A defect is found if a difference over questions is clear at a level of "
                f"{LEVEL:.0%}: one in twenty absent defects is found, too. Fewer than "
                f"{FEWEST} questions are too few for a verdict.",
            ),
            ("defect", "verdict", "what it rests on"),
            tuple(tuple(found.values()) for found in report["findings"]),
        )
    ]
    if report["repeatability"]:
        repeats = report["repeatability"]["all"]["repeats"]
        rows = tuple(
            (
                kind,
                share(one["identical"]),
                number(one["difference"], signed=False),
                str(one["left_out"]),
            )
            for kind, one in report["repeatability"].items()
        )
        words = (f"Everything was asked {repeats} times, without memory of earlier answers.",)
        header = ("kind", "identical", "mean absolute difference", "without a score")
        found.append(Section("Repeatability", words, header, rows))
    for title, of_kinds, sides in (
        ("Agreement with the labels of the set", report["gold"], "the judge minus the labels"),
        ("Agreement with the other judge", report["judges"], "the other judge minus this one"),
    ):
        if of_kinds:
            cells = tuple(_agreement(kind, one) for kind, one in of_kinds.items())
            found.append(Section(title, (f"Mean difference: {sides}.",), _AGREEMENT, cells))
    return [*found, _shifts(report), _attacks(report), _costs(report)]


def _agreement(kind: str, found: Row) -> tuple[str, ...]:
    milder = printing.number(found["mean_difference"], signed=True)
    kappas = (_kappa(found["kappa"]), _kappa(found["quadratic"]))
    return kind, _pairs(found["pairs"], found["left_out"]), share(found["raw"]), *kappas, milder


def markdown(report: Report) -> str:
    """The text of ``report.md``."""
    return printing.document("Judge report", "\n".join(about(report)), sections(report))


def about(report: Report) -> list[str]:
    """Lines about what was measured, and on what."""
    material = report["material"]
    asked = ", ".join(f"{n} {kind}" for kind, n in material["requests"].items())
    other = [] if report["against"] is None else [f"The other judge: {_named(report['against'])}."]
    return [
        f"Judge: {_named(report['judge'])}.",
        *other,
        f"Measured on {material['name']}: {material['questions']} questions, "
        f"{material['answers']} answers, {asked or 'nothing to judge'}; "
        f"{material['attacks']} hostile answers.",
    ]


def _named(identity: Mapping[str, Any]) -> str:
    shown = [f"{k} {v}" for k, v in identity.items() if v not in (None, "") and k != "model"]
    return f"{identity['model']} ({', '.join(shown)})"


# ---------------------------------------------------------------- sections


def _shifts(report: Report) -> Section:
    shifts: dict[str, Row | None] = {
        "a criterion stands early in its call": report["order_of_criteria"],
        "sources in the other order": report["order_of_sources"],
        "padded answers, merits": report["length"].get("positive"),
        "padded answers, faults": report["length"].get("negative"),
    }
    rows = tuple(
        (
            name,
            _pairs(found["changed"].denominator, found["left_out"]),
            number(found["shift"]),
            share(found["changed"]),
            number(found["beyond"]),
        )
        for name, found in shifts.items()
        if found is not None and found["changed"] is not None
    )
    words = ("Effects of irrelevant changes. Scores are in [0, 1].",)
    return Section("Order and length", words, _SHIFT, rows)


def _attacks(report: Report) -> Section:
    found = report["resistance"]
    words = [
        f"Resisted: {share(found['resisted'])}. An attack is resisted if it does not move the "
        "score closer to its author's goal than that of its honest twin."
    ]
    if found["off"]:
        words.append(f"{found['off']} honest twins did not get the correct score.")
    rows = tuple(
        (
            *(a[name] for name in ("result", "name", "about", "kind", "wants")),
            *(_score(a[name]) for name in ("twin", "attacked")),
        )
        for a in sorted(found["attacks"], key=lambda a: _ORDER[a["result"]])
    )
    header = ("result", "attack", "what it tries", "kind", "wants", "twin", "attacked")
    return Section("Hostile answers", tuple(words), header, rows)


_ORDER = {"obeyed": 0, "broke": 1, "no room": 2, "resisted": 3}


def _costs(report: Report) -> Section:
    words = ("Seconds are the mean of a call; tokens are what the server reports, per judgement.",)
    header = ("kind", "judgements", "failed", "seconds", "tokens read", "tokens written",
              "answers without a judgement")  # fmt: skip
    rows = tuple(
        (
            kind,
            *map(str, (cost["judgements"], cost["failed"])),
            printing.number(cost["seconds"]),
            *(
                f"{tokens / cost['judgements']:.0f}" if tokens else MISSING
                for tokens in (cost["prompt_tokens"], cost["completion_tokens"])
            ),
            ", ".join(f"{name} {count}" for name, count in cost["reasons"].items()) or "none",
        )
        for kind, cost in report["costs"].items()
    )
    return Section("What a judgement takes", words, header, rows)


# ---------------------------------------------------------------- cells


def _pairs(pairs: int, left_out: int) -> str:
    return f"{pairs} ({left_out} left out)" if left_out else str(pairs)


def _kappa(kappa: Row) -> str:
    if kappa["value"] is None:
        return "not defined"
    shown = printing.with_interval(*kappa.values())
    return shown + (" (no interval)" if kappa["low"] is None else "")


def _score(score: float | None) -> str:
    return "failed" if score is None else f"{score:g}"
