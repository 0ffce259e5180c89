"""What a reader of a card ought to know: notes derived from records, never typed by hand.

In: :class:`CardFacts`. Out: one sentence or two per thing that happened. Messages of failures are
left out on purpose: they name paths and hosts.
"""

from __future__ import annotations

from refiner_core.cards.facts import AttemptNote, CardFacts
from refiner_core.cards.results import without_value
from refiner_core.cards.settings import flag_of, rubric_source, shown
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import ABSENT, walk

_FAILURES = {
    "interrupted": "it was stopped on request",
    "preempted": "its job was preempted",
    "time_limit": "its job reached the time limit",
    "node_failure": "its node failed",
    "killed": "its process was killed",
    "out_of_memory": "it ran out of memory",
    "cancelled": "somebody cancelled it",
    "launch_failure": "the scheduler could not start it",
    "gpu_out_of_memory": "the GPU's memory did not suffice",
    "gpu_error": "a GPU failed",
    "disk_full": "the disk or its quota was full",
    "hung": "it hung and was stopped",
    "judge_outage": "the judge did not answer often enough",
    "not_finite": "a value was not finite",
    "bad_configuration": "its configuration was refused",
    "bad_data": "its data was refused",
    "unsupported": "the machine lacked what it needs",
    "bug": "it met a bug",
}


def known_notes(facts: CardFacts) -> list[str]:
    """All notes, in the order: how the run went, its data, its judge, its options, its numbers."""
    return [
        *_interruptions(facts),
        *_dropped_rows(facts),
        *_judge_failures(facts),
        *_later_fields(facts),
        *_missing_numbers(facts),
    ]


def _interruptions(facts: CardFacts) -> list[str]:
    notes = []
    for position, attempt in enumerate(facts.attempts):
        if attempt.failure == "none":
            continue
        why = _FAILURES.get(attempt.failure, attempt.failure.replace("_", " "))
        later = [a for a in facts.attempts[position + 1 :] if a.stage == attempt.stage]
        text = f"Attempt {attempt.number} of the {attempt.stage} stage ended{_when(attempt)} "
        text += f"because {why}; "
        if not later:
            text += (
                f"the stage was not taken up again. This checkpoint is step {facts.step}."
                if attempt.stage == facts.stage
                else "the stage was not taken up again."
            )
        elif later[0].resumed_from_step is None:
            text += f"attempt {later[0].number} started over."
        else:
            text += (
                f"attempt {later[0].number} went on from the checkpoint of step "
                f"{later[0].resumed_from_step}, and repeats what would have come without it."
            )
            text += _done_again(attempt, later[0].resumed_from_step)
        notes.append(text)
    return notes


def _when(attempt: AttemptNote) -> str:
    """`` on 2026-11-21 03:12 UTC after step 100``, as far as it is known."""
    day = f" on {attempt.ended_at[:16].replace('T', ' ')} UTC" if attempt.ended_at else ""
    return day + (f" after step {attempt.step}" if attempt.step else "")


def _done_again(attempt: AttemptNote, resumed_from_step: int | None) -> str:
    if attempt.step is None or resumed_from_step is None or attempt.step <= resumed_from_step:
        return ""
    lost = attempt.step - resumed_from_step
    return f" {lost} {'step was' if lost == 1 else 'steps were'} done again."


def _dropped_rows(facts: CardFacts) -> list[str]:
    notes = []
    for which, label in (("sft", "demonstrations"), ("rl", "prompts")):
        counts = facts.reports.get("data", {}).get(which, {})
        dropped = counts.get("dropped") or {}
        if not dropped:
            continue
        reasons = ", ".join(f"{count} `{reason}`" for reason, count in sorted(dropped.items()))
        notes.append(
            f"{sum(dropped.values())} of {counts['read']} {label} were dropped, none was cut: "
            f"{reasons}."
        )
    return [*notes, *_rows_without_rubrics(facts)]


def _rows_without_rubrics(facts: CardFacts) -> list[str]:
    count = facts.reports.get("data", {}).get("split", {}).get("rl_without_rubrics", 0)
    reward = facts.config.reward
    if not count or facts.stage != "grpo" or rubric_source(reward) != "instance":
        return []
    alone = "the citation term alone" if reward.apply_paper_citation_reward else "0"
    return [f"{count} prompts have no rubrics; their reward is {alone}."]


def _judge_failures(facts: CardFacts) -> list[str]:
    report = facts.reports.get("grpo", {})
    counts = report.get("counts") or {}
    unscored = int(counts.get("samples/unscored", 0))
    if not unscored or facts.stage != "grpo":
        return []
    total = f" of {report['episodes']}" if report.get("episodes") else ""
    return [
        f"The judge failed on {unscored}{total} rollouts. They entered neither the group "
        "statistics nor the loss; a failure is never counted as a score."
    ]


def _later_fields(facts: CardFacts) -> list[str]:
    """Options that came after the run, with the value that it had in effect."""
    if facts.recorded_fields is None:
        return []
    notes = []
    for path, info in walk(RecipeConfig):
        if info.legacy_value is ABSENT or path in facts.recorded_fields:
            continue
        if path.startswith(("grpo.", "reward.", "judge.")) and facts.stage != "grpo":
            continue
        if path.startswith("command.") and facts.stage != "command":
            continue
        name = flag_of(path) or path
        notes.append(
            f"A later version introduced `{name}` ({info.doc}). **This checkpoint was produced "
            f"before it existed**; the value in effect was `{shown(info.legacy_value)}`."
        )
    return notes


def _missing_numbers(facts: CardFacts) -> list[str]:
    missing = without_value(facts)
    return [f"Not computed, and not counted as 0: {', '.join(missing)}."] if missing else []
