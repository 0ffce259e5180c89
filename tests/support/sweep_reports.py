"""Reports of sweeps, made up: every feature of a report, and hostile, small and large ones.

Values are drawn with a fixed seed. What is computed from records is tested elsewhere; here it is
what the page, the Markdown and the tables make of a report.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from refiner_core.report.sweep.sweep_report import (
    REPORT_VERSION,
    ArmNumber,
    Comparison,
    NumberKey,
    Row,
    SweepReport,
    Verdict,
)
from tests.support.made_evidence import trial_row

SETS = ("static", "mixed", "instance")
WEIGHTS = ("0", "0.2")
HELD_OUT = "5f0c2a9d71b3"
OWN = "b81e44d0c7aa"
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<style>body{display:none}</style>"
)
RTL = "שלום עולם \u202eevil\u202c مرحبا"
EMOJI = "👩‍🔬🧪 ✅"
_QUESTIONS = (
    "Which crop does the settlement of Nabsuf grow on its river terraces?",
    "Who founded the observatory of Tel Ammar, and in which year did it open?",
    "What are the main side effects of the compound that the 2019 trial reports?",
    "How did the harbour of Velmora change after the flood of 1871?",
)


def row(*names: str, **known: Any) -> Callable[..., dict[str, Any]]:
    """Maker of a row of a report: of values in the order of its names."""
    return lambda *values, **more: {**known, **dict(zip(names, values, strict=False)), **more}


agreed = row("first", "second", "tau", "arms")
answer_of = row(
    *("arm", "seed", "sample_index", "text", "metrics", "judgements"), judgements=(), episode=None
)
attempts_row = row(
    *("arm", "model", "decoding", "protocol", "domain", "tasks", "asked", "passed"),
    *("failures", "errors"),
)
cell = row("arm", "value", "low", "high", "rank", moved=False)
curve = row("stage", "metric", "arm", "steps", "mean", "low", "high", "by_seed")
flip = row("arm", "sample_id", "question", "baseline", "value", "seeds_agree", "seeds")
incident_of = row("arm", "seed", "at", "text", "resolved")
matrix_row = row("protocol", "judge", "rubrics", "metric", "decoding", "trains", "cells")
point = row("seed", "value", "difference", "n")
prompt_of = row("sample_id", "question", "prompt", "answers")
rubric_row = row("rubric", "kind", "n", "values", "differences")


def full_report() -> SweepReport:
    """Six arms with three seeds: one arm failed, one trial is missing, one judge moved."""
    return _Made(arms=[f"{s}-{w}" for s in SETS for w in WEIGHTS], seeds=(1, 2, 3)).report()


def hostile_report() -> SweepReport:
    """Texts that would break a page that believes them, and answers of 100 kB."""
    made = full_report()
    answers = tuple(
        {**a, "text": f"<answer>{HOSTILE} {RTL} {EMOJI} \x00\x1b[31m \ud800 " + "word " * 20_000}
        for a in made.side_by_side[0]["answers"][:3]
    )
    side = prompt_of("id\"'><b>", f"{HOSTILE} {RTL}", f"<snippet id=S_1>{HOSTILE}", answers)
    incident = incident_of("static-0", 1, "2026-11-20T10:00:00.000+00:00", HOSTILE, resolved=False)
    return replace(
        made,
        title=f"Rubrics {HOSTILE}",
        question=f"{HOSTILE} {RTL} {EMOJI}",
        side_by_side=(side, *made.side_by_side[1:]),
        flips=({**made.flips[0], "question": f"{RTL} | {HOSTILE}"}, *made.flips[1:]),
        rubrics=({**made.rubrics[0], "rubric": HOSTILE}, *made.rubrics[1:]),
        incidents=(incident,),
        warnings=(HOSTILE, f"{EMOJI} {RTL}"),
    )


def agents_report() -> SweepReport:
    """A sweep of agents: two arms, two domains, attempts of every ending, hostile words among
    them."""
    made = _Made(arms=["sft", "sft-rft"], seeds=(1, 2)).report()
    metrics = ("pass@1", "pass@4", "pass^4", "pass@1/retail", "failure/no_call")
    comparisons = tuple(
        replace(c, key=replace(c.key, metric=metric, judge="desk 1, user: scripted"))
        for c, metric in zip(made.comparisons, metrics, strict=False)
    )
    rows = [
        attempts_row(arm, "grpo", "sampled", "own", domain, 20, 80, passed, failures, errors)
        for arm in made.arms
        for domain, passed, failures, errors in (
            ("retail", 44, {"no_call": 9, "rule_broken": 12, "incomplete": 13}, {"user_down": 2}),
            ("telecom", 30, {"no_call": 2, "limit": 18, "gave_up": 30}, {}),
        )
    ]
    sides = [
        prompt_of(
            f"retail/{i}",
            f"exchange the lamp of order {i}",
            '{"data": {}}',
            tuple(
                answer_of(arm, seed, attempt, "", _ATTEMPT_METRICS, episode=episode)
                for arm in made.arms
                for seed in made.seeds
                for attempt, episode in enumerate(_episodes(i))
            ),
        )
        for i in range(2)
    ]
    return replace(
        made,
        title="Rejection sampling before GRPO",
        comparisons=comparisons,
        attempts=tuple(rows),
        side_by_side=tuple(sides),
        matrix=(),
        rubrics=(),
        flips=(flip("sft-rft", "retail/0", "exchange the lamp", 0.25, 1.0, 2, 2),),
    )


_ATTEMPT_METRICS = {"success": 1.0, "reward": 1.0, "partial": 0.65, "turns": 4.0, "repairs": 1.0}


def _episodes(task: int) -> list[dict[str, Any]]:
    """One that passed, one that broke a rule, one without a call, one that counts as none."""

    def turn(
        call: dict[str, Any] | None, *messages: tuple[str, str], **more: Any
    ) -> dict[str, Any]:
        known = {"text": "<tool_call>…", "status": "ok" if call else "no_call", "call": call}
        return {**known, "messages": messages, **more}

    ask = {"name": "respond", "arguments": {"content": "which order is it?"}}
    look = {"name": "get_order", "arguments": {"order": f"S_{task}", "fields": ["state", "lamp"]}}
    refund = {"name": "refund", "arguments": {"order": f"S_{task}", "note": HOSTILE}}
    first = [["user", f"my lamp is broken. {HOSTILE if task else ''}"]]
    said = ("user", f"order S_{task}, bought in march. {RTL}")
    state = ("tool", '{"state": "delivered", "lamp": "green"}' + " long" * 900)
    passed = {"kind": "environment", "name": "the lamp is exchanged", "passed": True, "detail": ""}
    told = {"kind": "communicate", "name": "the fee was told", "detail": "said was: none"}
    missing = {**passed, **told, "passed": False}
    common = {"status": "finished", "ended": "done", "first_messages": first}
    return [
        {
            **common, "checks": [passed], "failure": None, "excluded": ["nl_assertions"],
            "turns": [turn(ask, said, repaired="Which order is it?"), turn(look, state),
                      turn({"name": "finish", "arguments": {}})],
        },
        {
            **common, "checks": [passed, missing], "failure": "rule_broken",
            "turns": [turn(ask, said),
                      turn(refund, ("tool", "not allowed"), tool_error="rule_broken")],
        },
        {
            **common, "ended": "no_call", "checks": [missing], "failure": "no_call",
            "turns": [turn(None, text="I will do that.", retried="Surely.")],
        },
        {
            **common, "status": "error", "ended": "error", "failure": None, "turns": [turn(ask)],
            "error_kind": "user_down", "error": "The user does not answer.",
        },
    ]  # fmt: skip


def one_arm_report() -> SweepReport:
    """A sweep of one arm and one seed: there is nothing to compare it with."""
    return _Made(arms=["alone"], seeds=(7,)).report()


def nothing_done_report() -> SweepReport:
    """A sweep that has just begun."""
    made = full_report()
    trials = tuple(trial_row(t["arm"], t["seed"], "", "waiting") for t in made.trials)
    parts = ("comparisons", "curves", "matrix", "rubrics", "flips", "side_by_side", "incidents")
    nothing: dict[str, Any] = dict.fromkeys((*parts, "warnings"), ())
    return replace(made, state="running", trials=trials, **nothing)


def running_report() -> SweepReport:
    """As :func:`full_report`, while half of it is still at work."""
    made = full_report()
    trials = tuple(
        t if t["seed"] == 1 else {**t, "state": "running", "progress": "grpo 12/80 rollouts"}
        for t in made.trials
    )
    return replace(made, state="running", trials=trials)


def long_names_report() -> SweepReport:
    """Names of arms that fit into no column."""
    arms = [f"rubrics=persistent-general-v{i}_judge=qwen3-32b-instruct-" + "x" * 60 for i in (1, 2)]
    return _Made(arms=arms, seeds=(1, 2, 3)).report()


def large_report(trials: int = 1000) -> SweepReport:
    """So many trials, of five seeds each."""
    arms = [f"lr{i // 10}-beta{i % 10}" for i in range(trials // 5)]
    return _Made(arms=arms, seeds=(1, 2, 3, 4, 5)).report()


def monitor_of(arm: str, stopped: int | None) -> dict[str, Any]:
    """An arm's row of monitors: three trials that were looked at to step 20 at least."""
    steps = [] if stopped is None else [stopped]
    shares = {"equal": (0.62, 0.58), "end": (0.71, 0.49), "best": (0.62, 0.58)}
    means = {
        f"{n}_{w}": v
        for w, pair in shares.items()
        for n, v in zip(("proxy", "gold"), pair, strict=True)
    }
    return {"arm": arm, "trials": 3, "at": 20, "stopped": steps, "alarms": steps, **means}


class _Made:
    """One made-up sweep."""

    def __init__(self, arms: Sequence[str], seeds: tuple[int, ...]) -> None:
        self.arms, self.seeds = list(arms), seeds
        self.random = random.Random(5)
        self.effect = {arm: 0.012 * i * (-1) ** i for i, arm in enumerate(self.arms)}
        self.failed = self.arms[4] if len(self.arms) > 4 else ""
        self.done = [arm for arm in self.arms if arm != self.failed]
        self.missing = (self.arms[2], 3) if len(self.arms) > 2 else ("", 0)

    def report(self) -> SweepReport:
        levels = {
            arm: dict(zip(("rubrics", "citation"), arm.rsplit("-", 1), strict=False))
            for arm in self.arms
        }
        factors = {
            factor: tuple(dict.fromkeys(one[factor] for one in levels.values() if factor in one))
            for factor in max(levels.values(), key=len)
        }
        return SweepReport(
            version=REPORT_VERSION,
            sweep="rubrics-x-citations",
            title="Rubric sets and citation weight",
            question="Do instance rubrics and a citation weight make answers truer?",
            made_at="2026-11-21T12:34:56.000+00:00",
            state="finished",
            recipe="tiny",
            baseline=self.arms[0],
            arms=tuple(self.arms),
            seeds=self.seeds,
            factors=factors,
            arm_levels=levels,
            trials=self.trials(),
            comparisons=self.comparisons(),
            curves=self.curves(),
            matrix=self.matrix(),
            rubrics=self.rubrics(),
            monitors=tuple(
                monitor_of(arm, 30 if arm == self.arms[-1] else None) for arm in self.arms
            ),
            flips=self.flips(),
            side_by_side=self.side_by_side(),
            incidents=self.incidents(),
            protocols=_PROTOCOLS,
            provenance={"workspace": "runs/", "code": "c0ffee1234"},
            detectable={
                "effect": 0.021,
                "power": 0.8,
                "smallest_effect": 0.03,
                "basis": "spread of the seeds of this sweep, 3 seeds, 200 prompts",
            },
            forecast={"gpu_hours": 41.0, "seconds": 90_000.0, "stages": 66},
            warnings=("The judge of protocol `own` was updated between night 1 and night 2.",)
            if self.failed
            else (),
        )

    # ------------------------------------------------------------ numbers

    def comparisons(self) -> tuple[Comparison, ...]:
        found = []
        for protocol, name, judge in ((HELD_OUT, "held-out", "gpt-oss-120b"), (OWN, "own", "qwen")):
            for decoding in ("sampled", "greedy"):
                for metric in ("oracle", "rubric_score", "citation_f1", "length_tokens"):
                    key = NumberKey(
                        "grpo", protocol, name, decoding, metric, f"{judge} + persistent-v2"
                    )
                    first = not found
                    direction = None if metric == "length_tokens" else True
                    numbers = self.numbers(400.0 if direction is None else 1.0, metric, name)
                    found.append(Comparison(key, numbers, direction, first))
        return tuple(found)

    def numbers(self, scale: float, metric: str, protocol: str) -> tuple[ArmNumber, ...]:
        base = {seed: 0.62 + self.random.gauss(0, 0.012) for seed in self.seeds}
        return tuple(self.number(arm, base, scale, protocol) for arm in self.arms)

    def number(self, arm: str, base: dict[int, float], scale: float, protocol: str) -> ArmNumber:
        if arm == self.failed:
            nothing = (None,) * 8
            return ArmNumber(
                arm, *nothing, n=0, seeds=0, excluded=0, interval="", verdict="missing", points=(),
                note="All its trials failed: no room left on the disk.",
            )  # fmt: skip
        first = arm == self.arms[0]
        points = []
        for seed in self.seeds:
            gone = (arm, seed) == self.missing
            shift = 0.0 if first else self.effect[arm] + self.random.gauss(0, 0.008)
            points.append(
                point(
                    seed,
                    None if gone else (base[seed] + shift) * scale,
                    None if gone or first else shift * scale,
                    0 if gone else 200,
                )
            )
        values = [p["value"] for p in points if p["value"] is not None]
        mean, half = sum(values) / len(values), 0.024 * scale
        shifts = [p["difference"] for p in points if p["difference"] is not None]
        effect = sum(shifts) / len(shifts) if shifts else None
        wide = 0.017 * scale
        p = None if effect is None else max(1e-5, min(1.0, (0.012 * scale / abs(effect)) ** 3 / 9))
        moved = protocol == "own" and arm == self.arms[-1] and not first
        return ArmNumber(
            arm, mean, mean - half, mean + half, effect,
            None if effect is None else effect - wide, None if effect is None else effect + wide,
            p, None if p is None else min(1.0, 5 * p),
            n=200, seeds=len(values), excluded=3 if arm.endswith("2") else 0,
            interval="seed x prompt variance, t interval",
            verdict=None if effect is None or p is None else _verdict(effect, min(1, 5 * p), moved),
            points=tuple(points),
            note="Seed 3 is missing: its trial was cancelled." if arm == self.missing[0] else "",
        )  # fmt: skip

    # ------------------------------------------------------------ all else

    def trials(self) -> tuple[Row, ...]:
        rows = []
        for seed in self.seeds:
            for i, arm in enumerate(self.arms):
                failed, gone = arm == self.failed, (arm, seed) == self.missing
                rows.append(
                    trial_row(
                        arm, seed, f"20261120-10{i % 60:02d}-{seed}",
                        "failed" if failed else "interrupted" if gone else "done",
                        reason="No room left on the disk." if failed else "cancelled by mb" if gone
                        else "",
                        seconds=5400.0 + 100 * i, gpu_hours=1.5 + i % 7 / 10, cpu_hours=0.4,
                        queue_seconds=None if i == 1 else 640.0 * seed,
                        lost_seconds=700.0 if i == 3 else 0.0, lost_steps=12 if i == 3 else 0,
                        attempts=3 if i == 3 else 1, judge_calls=12_800,
                        shared=("sft", "data") if i else (),
                        tracked="https://wandb.example/refiner/runs/1" if i == 0 else "",
                        published=f"runs/published/rubrics-{arm}" if i == 0 else "",
                    )
                )  # fmt: skip
        return tuple(rows)

    def curves(self) -> tuple[Row, ...]:
        found = []
        steps = tuple(range(1, 101))
        for metric in ("scores", "objective/kl3_avg", "val/sequence_lengths"):
            for arm in self.done:
                by_seed = {
                    str(seed): tuple(
                        None
                        if (arm, seed) == self.missing and s > 60
                        else _curve(metric, s, self.effect[arm])
                        + self.random.gauss(0, 0.12) * (0.02 if "kl" in metric else 1)
                        for s in steps
                    )
                    for seed in self.seeds
                }
                columns = list(zip(*by_seed.values(), strict=True))
                known = [[v for v in column if v is not None] for column in columns]
                found.append(
                    curve(
                        "grpo", metric, arm, steps,
                        tuple(sum(k) / len(k) for k in known),
                        tuple(map(min, known)), tuple(map(max, known)), by_seed,
                    )
                )  # fmt: skip
        return tuple(found)

    def matrix(self) -> tuple[Row, ...]:
        ranked = sorted(self.done, key=lambda arm: -self.effect[arm])
        cells = tuple(
            cell(arm, 0.6 + self.effect[arm], 0.5, 0.7, ranked.index(arm) + 1)
            if arm in self.done
            else cell(arm, *(None,) * 4)
            for arm in self.arms
        )
        judges = (("qwen3-32b", tuple(self.arms[:2])), ("gpt-oss-120b", ()))
        return tuple(
            matrix_row("held-out", judge, "persistent-v2", "rubric_score", "sampled", trains, cells)
            for judge, trains in judges
        )

    def rubrics(self) -> tuple[Row, ...]:
        values = {arm: 0.5 + self.effect[arm] for arm in self.done}
        shifts = {
            arm: (v - 0.5, v - 0.55, v - 0.45) for arm, v in values.items() if arm != self.arms[0]
        }
        return (
            rubric_row("Answers in its first sentence", "static", 200, values, shifts),
            rubric_row("Mentions that the terraces flood", "instance", 200, values, shifts),
        )

    def flips(self) -> tuple[Row, ...]:
        return tuple(
            flip(arm, f"p{i:03d}", _QUESTIONS[i % 4], 0.2 + i / 10, 0.9 - i / 10, 3 - i % 2, 3)
            for arm in self.done[1:]
            for i in range(3)
        )

    def side_by_side(self) -> tuple[Row, ...]:
        return tuple(
            prompt_of(
                f"p{i:03d}",
                question,
                f"<snippet id=S_a{i}>Nabsuf: terraces carry barley.</snippet>\n"
                f"<snippet id=S_b{i}>Velmora: a harbour town.</snippet>\n\n{question}",
                tuple(self.answer(arm, seed, i) for arm in self.done for seed in self.seeds),
            )
            for i, question in enumerate(_QUESTIONS)
        )

    def answer(self, arm: str, seed: int, prompt: int) -> Row:
        good = self.random.random() > 0.4
        cited = f"S_a{prompt}" if good else f"S_b{prompt}"
        text = (
            f"<answer>Nabsuf crop <snippet id={cited}>The terraces carry barley, seed {seed} of "
            f"{arm} says.</snippet> That is all that is known.</answer>"
        )
        metrics = {"oracle": float(good), "rubric_score": 0.5 + good / 4, "citation_f1": None}
        return answer_of(arm, seed, 0, text, metrics, _judgements(good))

    def incidents(self) -> tuple[Row, ...]:
        if not self.failed:
            return ()
        return (
            incident_of(self.arms[3], 1, "2026-11-20T11:02:03.000+00:00",
                        "grpo: preempted at step 40; resumed from step 28", resolved=True),
            incident_of(self.failed, 2, "2026-11-20T13:40:00.000+00:00",
                        "grpo: no room left on the disk (quota of 200 GiB)", resolved=False),
        )  # fmt: skip


def _verdict(effect: float, p_adjusted: float, moved: bool) -> Verdict:
    if moved:
        return "judge moved"
    if p_adjusted >= 0.05:
        return "not clear"
    return "better" if effect > 0 else "worse"


def _curve(metric: str, step: int, effect: float) -> float:
    grown = step / (step + 25)
    if metric == "scores":
        return 4.0 + (2.0 + 20 * effect) * grown
    return 0.08 * grown if "kl" in metric else 180 + 60 * grown


def _judgements(good: bool) -> tuple[dict[str, Any], ...]:
    return (
        {
            "kind": "rubric", "title": "Answers first", "criterion": "Answers in one sentence.",
            "weight": 1.0, "score": 1.0 if good else 0.25, "status": "scored",
            "detail": "The first sentence names the crop.",
        },
        {"kind": "citation_recall", "claim": "The terraces carry barley", "score": None,
         "status": "failed", "detail": "no answer in time"},
    )  # fmt: skip


_PROTOCOLS: dict[str, dict[str, Any]] = {
    HELD_OUT: {
        "name": "held-out",
        "split": "rl_test",
        "n": 200,
        "judge": {"model": "gpt-oss-120b"},
    },
    OWN: {"name": "own", "n": 200, "judge": {"model": "qwen3-32b"}},
}
