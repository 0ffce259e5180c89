"""Reports of runs, made up: every feature of a run's page, and hostile, empty and large ones.

Texts are in the project's own format. What is gathered from records is tested elsewhere; here it
is what the page makes of it. Values are drawn with a fixed seed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from refiner_core.report.run.run_report import (
    NO_COST,
    NO_DISK,
    RUN_REPORT_VERSION,
    Row,
    RunReport,
    StageRow,
)
from tests.support.sweep_reports import EMOJI, HOSTILE, RTL, row

BEGAN = datetime(2026, 11, 20, 9, 0, tzinfo=UTC)
OWN, WEIGHED = "6d8c09b4f51a", "36f615dd3a39"
_WORKSPACE = "/scratch/me/runs"

change = row(
    *("before", "after", "under", "decoding", "metric", "value_before", "value_after"),
    *("difference", "low", "high", "n", "higher_is_better"),
)
curve = row("stage", "metric", "steps", "values", "from_attempts", from_attempts=())
number = row(
    *("model", "protocol", "protocol_name", "decoding", "metric", "value", "low", "high", "n"),
    *("higher_is_better", "under", "reference"),
    **{"higher_is_better": None, "under": "", "reference": False},
)
example_of = row(
    *("kind", "sample_id", "why", "question", "prompt", "said", "metric", "change"),
    metric="",
    change=None,
)
incident = row("at", "stage", "text", "resolved")
part = row("name", "value", "weight", "share", weight=None, share=None)
published = row("stage", "target", "card", "step", card="", step=None)
said_of = row(
    *("model", "text", "status", "finish_reason", "reward", "parts", "judgements", "metrics"),
    **{"status": "", "finish_reason": "", "reward": None, "parts": (), "judgements": ()},
    **{"metrics": {}, "episode": None, "failed": ""},
)


def full_report() -> RunReport:
    """A run of GRPO on a cluster that was preempted, ran out of disk, and came through."""
    return RunReport(
        version=RUN_REPORT_VERSION,
        run="20261120-090000-3f2a",
        recipe="refiner",
        description="SFT on 1 100 demonstrations, then GRPO against instance rubrics with a convex "
        "citation reward; evaluated on 199 held-out prompts.",
        state="done",
        state_text="All 7 stages are done; GRPO went on twice from its last checkpoint.",
        command=("refiner", "run", "refiner.yaml", "seed=1", "grpo.beta=0.01",
                 "dispatch.profile=my cluster.yaml"),
        workspace=_WORKSPACE,
        began_at=_at(0),
        ended_at=_at(372),
        made_at=_at(380),
        stages=_stages(),
        incidents=(
            incident(_at(96), "grpo", "EDQUOT (errno 122) while saving step 24 on n1; "
                         "started over after 7 s; 6 CPU-seconds lost", True),
            incident(_at(190), "grpo", "preempted after step 45 on n1; resumed from step 40 "
                         "after 20 min; 5 steps done again", True),
        ),
        curves=_curves(70),
        numbers=_numbers(),
        changes=_changes(),
        examples=_examples(),
        disk=dict(
            NO_DISK,
            used={"checkpoints": 41_200_000_000, "models": 16_400_000_000, "rollouts": 310_000_000,
                  "evaluations": 45_000_000, "logs": 1_900_000},
            free_bytes=212_000_000_000, limit_bytes=500_000_000_000, source="quota of /scratch",
            reclaimed_bytes=96_000_000_000,
        ),
        cost=dict(
            NO_COST,
            seconds=19_800, gpu_hours=41.5, cpu_hours=88.0, money=83.0, currency="EUR",
            lost_seconds=1_260, lost_steps=11,
            judge={"calls": 53_760, "prompt_tokens": 41_873_112, "cached_share": 0.18},
        ),
        published=(published("publish", "hub:me/refiner-4b", "published/refiner/README.md", 70),),
        overrides=("seed=1", "grpo.beta=0.01"),
        settings={"seed": 1, "grpo.beta": 0.01, "judge.model": "qwen3-32b"},
        provenance={"code": {"commit": "9f11c31ad0", "dirty": False}, "host": "login1"},
        next_commands=("refiner run refiner.yaml seed=2",
                       "refiner explain grpo refiner.yaml grpo.beta=0.02", "refiner disk"),
    )  # fmt: skip


def running_report() -> RunReport:
    """The same run while GRPO is at work and nothing of it has been evaluated."""
    made = full_report()
    stages = tuple(
        replace(s, state="waiting", attempts=(), seconds=None, reason="waits for grpo")
        if s.name in ("evaluate-grpo", "publish")
        else replace(s, state="running", step=52,
                     attempts=(*s.attempts[:2], {**s.attempts[2], "ended_at": "", "outcome": ""}))
        if s.name == "grpo" else s
        for s in made.stages
    )  # fmt: skip
    return replace(
        made, state="running", state_text="GRPO is at step 52 of 70.", ended_at="", stages=stages,
        changes=(), published=(), made_at=_at(290),
        numbers=tuple(n for n in made.numbers if n["model"] in ("base", "sft")),
    )  # fmt: skip


def empty_report() -> RunReport:
    """A run of which nothing is recorded but that it was begun."""
    return RunReport(
        RUN_REPORT_VERSION, "20261120-090000-3f2a", "tiny", "", "failed", "", (), _WORKSPACE,
        _at(0), "", _at(1),
    )  # fmt: skip


def hostile_report() -> RunReport:
    """Texts that would break a page that believes them, and answers of megabytes."""
    made = full_report()
    bad = f"{HOSTILE} {RTL} {EMOJI} \x00\x1b[31m \ud800"
    said = said_of(
        f"grpo {HOSTILE}", f"<answer>{bad}<snippet id=\"S_1'>x onclick=alert(1)</snippet> "
        + "word<" * 400_000, status=HOSTILE, finish_reason=HOSTILE, reward=float("nan"),
        parts=(part(HOSTILE, float("inf"), float("nan"), float("nan")),),
        judgements=({"kind": HOSTILE, "title": HOSTILE, "score": "many"},
                    {"kind": "citation_recall", "claim": HOSTILE, "claim_index": HOSTILE},
                    {"kind": "rubric", "score": float("nan"), "weight": HOSTILE, "detail": bad}),
        metrics={HOSTILE: float("inf")}, failed=HOSTILE,
    )  # fmt: skip
    prompt = f"<tool_output><snippet id=\"S_1' onclick='alert(1)\">{bad}" + "long " * 300_000
    example = example_of("rollout", bad, HOSTILE, f"{HOSTILE} {RTL}", prompt, (said, said), HOSTILE,
                      float("nan"))  # fmt: skip
    stage = replace(
        made.stages[2], name=f"grpo{HOSTILE}", state=HOSTILE, reason=bad, made_by=HOSTILE,
        attempts=(attempt_row(1, _at(0), "not a time", None, HOSTILE, text=bad, node=HOSTILE,
                              job_id=HOSTILE, log=bad),),
    )  # fmt: skip
    odd = number(HOSTILE, HOSTILE, bad, bad, HOSTILE, float("nan"), None, float("inf"), None)
    return replace(
        made, recipe=f"Recipe {HOSTILE}", run=bad, description=bad, state_text=bad,
        command=("refiner", "run", bad, "'; rm -rf /"), workspace=bad, examples=(example,),
        stages=(*made.stages[:2], stage), incidents=(incident(HOSTILE, bad, bad, False),),
        numbers=(odd, *made.numbers), warnings=(bad,), settings={HOSTILE: bad, bad: [bad]},
        provenance={HOSTILE: {bad: [bad, {bad: 1}]}}, next_commands=(f"echo {bad}",),
        curves=(curve(HOSTILE, bad, (1, 2), (1.0, float("nan")), (2,)),),
        disk={**NO_DISK, "used": {bad: 3}, "source": bad}, published=(published(bad, bad, bad),),
        overrides=(bad,),
    )  # fmt: skip


def huge_report() -> RunReport:
    """10,000 steps of 30 metrics, thousands of incidents and settings, answers of 1 MB."""
    made = full_report()
    text = _answer("grpo", 0) + " and more" * 120_000
    examples = tuple(
        {**e, "sample_id": f"{e['sample_id']}-{i}", "prompt": e["prompt"] + "x" * 500_000,
         "said": tuple({**s, "text": text, "judgements": s["judgements"] * 40}
                       for s in e["said"] * 4)}
        for i in range(40)
        for e in made.examples[:3]
    )  # fmt: skip
    steps = tuple(range(1, 10_001))
    rng = random.Random(5)
    values = tuple(rng.random() if i % 977 else None for i in steps)
    curves = tuple(curve("grpo", f"metric/{i}", steps, values, (5_000,)) for i in range(30))
    attempts = tuple({**made.stages[2].attempts[0], "number": i} for i in range(1, 2_001))
    stages = (*made.stages[:2], replace(made.stages[2], attempts=attempts), *made.stages[3:])
    return replace(
        made, examples=examples, curves=curves, stages=stages, incidents=made.incidents * 2_000,
        settings={f"field.{i}": "x" * 10_000 for i in range(3_000)},
        numbers=tuple({**n, "metric": f"{n['metric']}-{i}"} for i in range(300)
                      for n in made.numbers), warnings=("w" * 5_000,) * 500,
    )  # fmt: skip


# ---------------------------------------------------------------- its parts


def _at(minutes: float) -> str:
    return (BEGAN + timedelta(minutes=minutes)).isoformat(timespec="milliseconds")


def attempt_row(
    number: int, began_at: str, ended_at: str, seconds: float | None, outcome: str, **more: Any
) -> Row:
    """An attempt as a report shows it."""
    times = {"number": number, "began_at": began_at, "ended_at": ended_at, "seconds": seconds}
    empty = dict.fromkeys(("text", "node", "job_id", "log"), "")
    return {**times, "outcome": outcome, **empty, "reached_step": None, **more}


def _attempt(number: int, start: float, end: float, outcome: str, **more: Any) -> Row:
    log = f"{_WORKSPACE}/stages/grpo-7db9abc4f3ba/attempts/{number:04}/log.txt"
    return attempt_row(number, _at(start), _at(end), (end - start) * 60, outcome, node="n1",
                       job_id=f"81{number}", log=log, **more)  # fmt: skip


def _stages() -> tuple[StageRow, ...]:
    def stage(name: str, start: float, end: float, **more: Any) -> StageRow:
        found: dict[str, Any] = {
            "kind": name.split("-")[0], "id": f"{name.split('-')[0]}-93d2baf3519d",
            "fingerprint": "93d2baf3519d799e", "state": "done", "seconds": (end - start) * 60,
            "queue_seconds": 60.0, "cpu_hours": 4.0, "gpu_hours": (end - start) / 60 * 8,
            "attempts": (_attempt(1, start, end, "done"),), "output_bytes": 45_000_000,
            "output": f"{_WORKSPACE}/stages/{name}/attempts/0001/output",
        }  # fmt: skip
        return StageRow(name, **{**found, **more})

    return (
        stage("data", -3000, -2995, state="skipped", skipped=True, made_by="20261118-080000-aa01",
              reason="its output is there"),
        stage("sft", 1, 40, inputs=("data",), step=55, total=55, output_bytes=8_200_000_000),
        stage("grpo", 41, 330, inputs=("data", "sft"), seconds=15_800, lost_seconds=1_260, step=70,
              total=70, queue_seconds=80.0, output_bytes=8_200_000_000, attempts=(
                  _attempt(1, 42, 96, "disk_full", text="EDQUOT while saving step 24",
                           reached_step=23),
                  _attempt(2, 97, 190, "preempted", text="the node was given to another job",
                           reached_step=45),
                  _attempt(3, 210, 330, "done", reached_step=70))),
        stage("evaluate-base", 2, 14, inputs=("data",)),
        stage("evaluate-sft", 41, 52, inputs=("data", "sft")),
        stage("evaluate-grpo", 331, 350, inputs=("data", "grpo")),
        stage("publish", 351, 372, inputs=("grpo", "evaluate-grpo"), gpu_hours=0.0),
    )  # fmt: skip


def _curves(size: int) -> tuple[Row, ...]:
    rng = random.Random(3)
    made = []
    for metric, first, last in (
        ("scores", 7.1, 9.3), ("objective/rubric_reward", 0.6, 0.88),
        ("objective/citation_f1_reward", 0.76, 0.93), ("objective/kl3_avg", 0.0, 0.021),
        ("val/sequence_lengths", 24.0, 29.0), ("loss/policy_avg", -0.002, 0.001),
    ):  # fmt: skip
        values: list[float | None] = [
            first + (last - first) * (1 - 0.95**i) + rng.gauss(0, abs(last - first) / 12)
            for i in range(size)
        ]
        values[30:33] = [None, None, None]
        made.append(curve("grpo", metric, tuple(range(1, size + 1)), tuple(values), (24, 41)))
    loss = tuple(4.2 * 0.95**i + 0.4 for i in range(55))
    return (curve("sft", "loss/train_avg", tuple(range(1, 56)), loss), *made)


_MEASURED: dict[str, dict[str, tuple[float, float, float]]] = {
    "oracle": {"base": (0.0, 0.0, 0.019), "sft": (0.641, 0.597, 0.680),
               "grpo": (0.811, 0.765, 0.848), "random_copier": (0.421, 0.365, 0.475)},
    "reward": {"base": (0.0, 0.0, 0.0), "sft": (7.251, 6.936, 7.568),
               "grpo": (8.633, 8.324, 8.896), "random_copier": (5.866, 5.501, 6.271)},
    "claims": {"base": (0.0, 0.0, 0.0), "sft": (2.613, 2.486, 2.739),
               "grpo": (2.915, 2.777, 3.046), "random_copier": (1.523, 1.447, 1.603)},
}  # fmt: skip


def _numbers() -> tuple[Row, ...]:
    return tuple(
        number(
            model, WEIGHED if metric == "reward" else OWN, "own", decoding, metric, *found[model],
            199, None if metric == "claims" else True, under, model == "random_copier",
        )
        for decoding, under in (("sampled", ""), ("greedy", ""), ("sampled", "held-out"))
        for model in ("base", "sft", "grpo", "random_copier")
        for metric, found in _MEASURED.items()
    )  # fmt: skip


def _changes() -> tuple[Row, ...]:
    return tuple(
        change(
            "sft", "grpo", "", decoding, metric, found["sft"][0], found["grpo"][0],
            found["grpo"][0] - found["sft"][0], found["grpo"][0] - found["sft"][0] - width,
            found["grpo"][0] - found["sft"][0] + width, 199, None if metric == "claims" else True,
        )
        for decoding, width in (("sampled", 0.04), ("greedy", 0.4))
        for metric, found in _MEASURED.items()
    )  # fmt: skip


_FACTS = (
    ("Nabsuf", "crop", "fesk lomo", "S_e8Q9"), ("Tel Ammar", "observatory", "gald roro", "S_h2X7"),
    ("Velmora", "harbour", "molm zeju", "S_k8X3"),
)  # fmt: skip


def _prompt(i: int) -> str:
    place, thing, value, _ = _FACTS[i % 3]
    lines = [f" {p} {t}<snippet id={n}> In {p} the {t} is {v}.</snippet>" for p, t, v, n in _FACTS]
    filler = [f" A letter<snippet id=S_f{k}> A letter looks at the {thing} of {place}, and says "
              f"nothing of use about it; it is the {k}th of its kind.</snippet>"
              for k in range(14)]  # fmt: skip
    page = f"<webpage id=W_1> {place} <snippet id=S_w1> The {thing} is {value}.</snippet></webpage>"
    told = "\n".join([*filler[:7], *lines, *filler[7:], page])
    return f"<query>What is the {thing} of {place}?</query>\n<tool_output>\n{told}\n</tool_output>"


def _answer(model: str, i: int) -> str:
    place, thing, value, name = _FACTS[i % 3]
    good = f"<snippet id={name}> In {place} the {thing} is {value}.</snippet>"
    if model == "base":
        return f" The {thing} of {place} is kept.</snippet>\nIndex\n {place}"
    if model == "sft":
        return f"<answer> {place} {thing}<snippet id=S_x0> It is molm.</snippet></answer>"
    return (f"<answer> {place} has a {thing}.{good} Two sources agree"
            f'<snippet id="{name},S_w1"> that it is {value}.</snippet></answer>')  # fmt: skip


def _said(model: str, i: int, score: float) -> Row:
    citation = 0.9 * score
    judgements: tuple[dict[str, Any], ...] = (
        {"kind": "rubric", "title": "Names it", "criterion": f"States what the {_FACTS[i % 3][1]} "
         "is", "polarity": "positive", "weight": 4.0, "score": score, "status": "scored",
         "detail": "the answer says so in its second claim"},
        {"kind": "citation_recall", "claim": "In the place it is so.", "claim_index": 1,
         "ids": ["S_e8Q9"], "score": citation, "status": "scored", "detail": ""},
    )  # fmt: skip
    return said_of(
        model, _answer(model, i), "malformed" if model == "base" else "scored",
        "length" if model == "base" else "stop", 10 * (0.8 * score + 0.2 * citation) - 0.5,
        (part("rubric", score, 8.0, 8 * score), part("citation", citation, 2.0,
         2 * citation), part("non-stop penalty", 1.0, -0.5, -0.5),
         part("format bonus", 1.0, 0.0), part("citation F1", 0.8)),
        () if model == "base" else judgements,
        {"rubric_score": score, "citation_f1": citation, "oracle": score, "claims": 2.0,
         "oracle_given_valid": None},
    )  # fmt: skip


def _examples() -> tuple[Row, ...]:
    made = []
    for i, why in enumerate(("improved most", "got worse most", "typical")):
        place, thing, _, _ = _FACTS[i % 3]
        question = f"What is the {thing} of {place}?"
        scores = {"base": 0.0, "sft": 0.4 if i != 1 else 1.0, "grpo": 1.0 if i != 1 else 0.4}
        said = tuple(_said(m, i, s) for m, s in scores.items())
        made.append(example_of("before and after", f"synthetic-rl-0-000{i}", why, question,
                            _prompt(i), said, "oracle",
                            scores["grpo"] - scores["sft"]))  # fmt: skip
        rollouts = tuple({**_said("grpo", i, s), "model": f"step {k}"} for k, s in
                         ((1, 0.3), (1, 0.6), (1, 1.0), (1, 0.0)))  # fmt: skip
        why = ("best", "worst", "no score")[i]
        made.append(example_of("rollout", f"synthetic-rl-0-001{i}", why, question, _prompt(i),
                               rollouts, "reward"))  # fmt: skip
    return tuple(made)
