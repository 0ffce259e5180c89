"""What a reader of a card ought to know: notes derived from records, never typed by hand.

In: :class:`CardFacts`. Out: one sentence or two per thing that happened, with where its numbers
come from. Messages of failures are left out on purpose: they name paths and hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from refiner_core.cards.facts import (
    UNKNOWN,
    CardFacts,
    Line,
    as_line,
    counted,
    finite,
    is_hub_id,
    joined,
    number,
    quoted,
)
from refiner_core.cards.results import cell, own_entries, without_value
from refiner_core.cards.settings import flag_of, shown
from refiner_core.cards.setup import is_agent, rubric_source
from refiner_core.cards.training import hardware_notes, lost_hours
from refiner_core.contract.checks.environment import ONLY_OF_AGENTS
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.kinds import card_words
from refiner_core.contract.marks import ABSENT, walk
from refiner_core.contract.placement import STAGES
from refiner_core.contract.proofs import PROOF_VERSION, Comparison, ResumeProof
from refiner_core.contract.records import from_json, to_json

_HOW = {
    frozenset({"kill"}): " by kill -9",
    frozenset({"stop"}): " by requests to stop",
    frozenset({"kill", "stop"}): " by kill -9 and by requests to stop",
}


def public_proof(proof: ResumeProof) -> dict[str, Any]:
    """A proof as evidence has it: without where and with what settings of a machine it was made."""
    kept = replace(proof, overrides=(), changed={}, provenance={})
    return {**to_json(kept), "verdict": proof.verdict}


def read_proof(known: Mapping[str, Any]) -> ResumeProof | None:
    """The proof in a card's facts; None without one.

    Raises
    ------
    DataError
        It is none, or of a newer version.
    """
    if not known:
        return None
    try:
        if int(known["version"]) <= PROOF_VERSION:
            return from_json(ResumeProof, known)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"facts.proof is damaged ({error})",
            expected="a proof",
            fix="take the refiner.json that lies beside the card",
        ) from error
    raise DataError(
        f"facts.proof has version {known['version']}",
        expected=f"version {PROOF_VERSION} or older",
        fix="install the version of refiner that the card names",
    )


def resume_notes(facts: CardFacts) -> list[Line]:
    """One note where the stage was proven, none where not."""
    proof = read_proof(facts.proof)
    if proof is None:
        return []
    tried = Line("a run of ") + number(proof.steps, "proof.steps") + " steps of this stage, "
    tried = (
        tried + "interrupted " + counted(len(proof.interruptions), "proof.interruptions", "time")
    )
    tried = tried + _HOW.get(frozenset(i.how for i in proof.interruptions), "")
    if not proof.same_processes:
        tried = tried + " and resumed on another number of processes"
    if proof.verdict == "diverged":
        return ["Resume did not hold: " + tried + ", " + _parted(proof) + "."]
    names = ", ".join(c.quantity for c in proof.comparisons)
    if proof.verdict == "bitwise":
        return ["Resume was proven: " + tried + f", was bitwise the same ({names})."]
    text = "Resume was proven within tolerance: " + tried + ", was the same up to "
    text = text + number(_size(proof.largest), "proof.comparisons") + " where "
    text = text + number(_size(proof.tolerance), "proof.tolerance")
    return [text + f" was allowed ({names})."]


def proof_problems(facts: CardFacts) -> Iterator[str]:
    """What a proof says that does not follow from its own numbers, or is about another stage."""
    proof = read_proof(facts.proof)
    if proof is None:
        return
    said = facts.proof.get("verdict")
    if said != proof.verdict:
        yield f"proof.verdict is {said!r}, and its comparisons give {proof.verdict!r}"
    if facts.fingerprint and proof.fingerprint != facts.fingerprint:
        yield f"proof is of the stage {proof.fingerprint[:12]}, not of {facts.fingerprint[:12]}"
    if not proof.interruptions:
        yield "proof has no interruption, so that nothing was tried"
    for found in proof.comparisons:
        if not 0 <= found.differing <= found.compared or not found.compared:
            counts = f"{found.differing} of {found.compared}"
            yield f"proof: {counts} of {found.quantity} differ, which cannot be"


def _parted(proof: ResumeProof) -> Line:
    first: Comparison | None = proof.first
    assert first is not None, "a run that diverged differs somewhere"
    if first.first_step is None:
        return Line(f"ended with another {first.quantity}")
    text = Line(f"differed in its {first.quantity} from step ")
    return text + number(first.first_step, "proof.comparisons") + " on"


def _size(value: float | None) -> str:
    return f"{value:.3g}"


_FAILURES = {
    "interrupted": "it was stopped on request",
    "preempted": "its job was preempted",
    "time_limit": "its job reached the time limit",
    "node_failure": "its node failed",
    "killed": "its process was killed",
    "out_of_memory": "it ran out of memory",
    "cancelled": "somebody cancelled it",
    "launch_failure": "the scheduler could not start it",
    "system_outage": "the scheduler or the file system did not answer",
    "gpu_out_of_memory": "the GPU's memory did not suffice",
    "gpu_error": "a GPU failed",
    "disk_full": "the disk or its quota was full",
    "hung": "it hung and was stopped",
    "judge_outage": "the judge did not answer often enough",
    "judge_unusable": "the judge's answers were no judgements",
    "environment_outage": "its environment or user failed too often",
    "hub_outage": "the Hub did not answer",
    "hub_refused": "the Hub refused it",
    "not_finite": "a value was not finite",
    "unhealthy": "a health check stopped it",
    "bad_configuration": "its configuration was refused",
    "bad_data": "its data was refused",
    "unsupported": "the machine lacked what it needs",
    "bug": "it met a bug",
}


def known_notes(facts: CardFacts) -> list[Line]:
    """All notes, in the order: how the run went, its data, its judge, its options, its numbers."""
    return [
        *_adopted(facts),
        *_interruptions(facts),
        *_stopped(facts),
        *_ended_early(facts),
        *_changed_processes(facts),
        *_lost_time(facts),
        *resume_notes(facts),
        *hardware_notes(facts),
        *_dropped_rows(facts),
        *_judge_failures(facts),
        *_later_fields(facts),
        *_moving_names(facts),
        *_missing_numbers(facts),
    ]


def _adopted(facts: CardFacts) -> list[Line]:
    if not facts.reports.get(facts.stage, {}).get("adopted"):
        return []
    return [
        Line(
            "This checkpoint was adopted from the folder of a run that had ended; how that run "
            "went is not recorded."
        )
    ]


def _interruptions(facts: CardFacts) -> list[Line]:
    notes = []
    for place, attempt in enumerate(facts.attempts):
        if attempt.failure == "none":
            continue
        why = _FAILURES.get(attempt.failure, attempt.failure.replace("_", " "))
        later = [i for i, a in enumerate(facts.attempts) if i > place and a.stage == attempt.stage]
        text = "Attempt " + number(attempt.number, f"attempts.{place}.number")
        text = text + f" of the {attempt.stage} stage ended" + _when(facts, place)
        text = text + f" because {why}; "
        notes.append(text + (_resumed(facts, place, later[0]) if later else _left(facts, place)))
    return notes


def _stopped(facts: CardFacts) -> list[Line]:
    """What became of a training whose earlier checkpoint this is, as far as it was known."""
    failure = facts.stopped.get("failure")
    if not failure or failure == "none":
        return []
    text = Line("Training had stopped when this checkpoint was published")
    if step := facts.stopped.get("step"):
        text = text + ", after step " + number(step, "stopped.step")
    if ended_at := facts.stopped.get("ended_at"):
        day = str(ended_at)[:16].replace("T", " ")
        text = text + ", on " + number(day, "stopped.ended_at") + " UTC"
    why = _FAILURES.get(str(failure), str(failure).replace("_", " "))
    text = text + f", because {why}; it had not been taken up again. This checkpoint is step "
    return [text + number(facts.step, "step") + " of it, saved before that."]


def _ended_early(facts: CardFacts) -> list[Line]:
    """Another's trainer that ended well, and before the last step that it had spoken of."""
    report, path = facts.reports.get(facts.stage, {}), f"reports.{facts.stage}"
    steps, planned = report.get("steps"), report.get("steps_planned")
    if not isinstance(planned, int) or not isinstance(steps, int) or steps >= planned:
        return []
    text = Line("Training ended by itself before its last step: this checkpoint is step ")
    text = text + number(steps, f"{path}.steps") + " of the "
    return [text + number(planned, f"{path}.steps_planned") + " that the trainer had spoken of."]


def _changed_processes(facts: CardFacts) -> list[Line]:
    """A training that went on with other processes is not bitwise what it would have been."""
    notes: list[Line] = []
    for stage in STAGES:
        report, path = facts.reports.get(stage, {}), f"reports.{stage}"
        parts: list[Line] = []
        for i, part in enumerate(report.get("resumed_on") or ()):
            if part.get("ranks") is None or part.get("up_to_step") is None:
                continue
            at = f"{path}.resumed_on.{i}"
            text = Line("up to step ") + number(part["up_to_step"], f"{at}.up_to_step") + " on "
            parts.append(text + _processes(part, at))
        if parts:
            text = Line(f"{stage.upper()} was resumed on other processes: ") + joined(parts)
            text = text + ", then on " + _processes(report, path)
            notes.append(text + "; sums were taken in another order from there on.")
    return notes


def _processes(part: Mapping[str, Any], path: str) -> Line:
    engine = quoted(str(part.get("engine", UNKNOWN)), f"{path}.engine")
    return counted(part["ranks"], f"{path}.ranks", "process", "processes") + " (" + engine + ")"


def _left(facts: CardFacts, place: int) -> Line:
    text = Line("the stage was not taken up again.")
    if facts.attempts[place].stage != facts.stage:
        return text
    return text + " This checkpoint is step " + number(facts.step, "step") + "."


def _resumed(facts: CardFacts, place: int, later: int) -> Line:
    attempt, following = facts.attempts[place], facts.attempts[later]
    text = "attempt " + number(following.number, f"attempts.{later}.number")
    step = following.resumed_from_step
    if step is None:
        return text + " started over."
    text = text + " went on from the checkpoint of step "
    text = text + number(step, f"attempts.{later}.resumed_from_step")
    text = text + ", and repeats what would have come without it."
    if attempt.step is None or attempt.step <= step:
        return text
    lost = number(attempt.step - step, f"attempts.{place}.step")
    return (
        text
        + " "
        + lost
        + (" step was" if attempt.step - step == 1 else " steps were")
        + (" done again.")
    )


def _when(facts: CardFacts, place: int) -> Line:
    """`` on 2026-11-21 03:12 UTC after step 100``, as far as it is known."""
    attempt, text = facts.attempts[place], Line("")
    if attempt.ended_at:
        day = attempt.ended_at[:16].replace("T", " ")
        text = " on " + number(day, f"attempts.{place}.ended_at") + " UTC"
    if attempt.step:
        text = text + " after step " + number(attempt.step, f"attempts.{place}.step")
    return text


def _lost_time(facts: CardFacts) -> list[Line]:
    lost = lost_hours(facts)
    return [] if lost is None else [lost + " went into work that had to be done again."]


def _dropped_rows(facts: CardFacts) -> list[Line]:
    notes = []
    for which, label in (("sft", "demonstrations"), ("rl", "prompts")):
        counts = facts.reports.get("data", {}).get(which) or {}
        dropped = counts.get("dropped") or {}
        path = f"reports.data.{which}"
        if not dropped:
            continue
        reasons = [
            number(count, f"{path}.dropped.{reason}") + f" `{reason}`"
            for reason, count in sorted(dropped.items())
        ]
        text = number(sum(dropped.values()), f"{path}.dropped") + " of "
        text = text + number(counts.get("read"), f"{path}.read") + f" {label} were dropped, none "
        notes.append(text + "was cut: " + joined(reasons) + ".")
    return [*notes, *_rows_without_rubrics(facts)]


def _rows_without_rubrics(facts: CardFacts) -> list[Line]:
    split = facts.reports.get("data", {}).get("split") or {}
    count, reward = split.get("rl_without_rubrics", 0), facts.config.reward
    if not count or facts.stage != "grpo" or rubric_source(reward) != "instance":
        return []
    alone = "the citation term alone" if reward.apply_paper_citation_reward else "0"
    text = number(count, "reports.data.split.rl_without_rubrics")
    return [text + f" prompts have no rubrics; their reward is {alone}."]


def _judge_failures(facts: CardFacts) -> list[Line]:
    notes = [
        f"In the {entry.values['decoding']} evaluation of this model the judge failed on a share "
        + ("of the samples: " + cell(entry))
        + "; they are not in its numbers."
        for entry in own_entries(facts)
        if entry.values["metric"] == "judge_failed" and finite(entry.values.get("value"))
    ]
    report = facts.reports.get("grpo", {})
    unscored = int((report.get("counts") or {}).get("samples/unscored", 0))
    if not unscored or facts.stage != "grpo":
        return notes
    failed = "The environment or its user" if is_agent(facts) else "The judge"
    text = f"{failed} failed on " + number(unscored, "reports.grpo.counts.samples/unscored")
    text = text + _of_episodes(report) + " rollouts. They entered neither the group statistics nor "
    return [text + "the loss; a failure is never counted as a score.", *notes]


def _of_episodes(report: Mapping[str, Any]) -> Line:
    episodes = report.get("episodes")
    return " of " + number(episodes, "reports.grpo.episodes") if episodes else Line("")


def _later_fields(facts: CardFacts) -> list[Line]:
    """Options that came after the run, with the value that it had in effect."""
    if facts.recorded_fields is None:
        return []
    others = card_words(facts.stage).silent
    notes = []
    for path, info in walk(RecipeConfig):
        if info.legacy_value is ABSENT or path in facts.recorded_fields or path.startswith(others):
            continue
        if ".health." in path:
            continue  # checks that only warn, as all had them then, have changed nothing
        if path.startswith(ONLY_OF_AGENTS) and not is_agent(facts):
            continue
        name = flag_of(path) or path
        text = f"A later version introduced `{name}` ({info.doc}). **This checkpoint was produced "
        text += f"before it existed**; the value in effect was `{shown(info.legacy_value)}`."
        notes.append(as_line(text))
    return notes


def _moving_names(facts: CardFacts) -> list[Line]:
    """Hub repositories that were read at a branch: what lies there today may be another state."""
    config = facts.config
    moving: list[tuple[str, str | None]] = []
    if is_hub_id(facts.base) and facts.base_model in (None, UNKNOWN):
        moving += [("the base model", config.model.revision)]
    if is_hub_id(config.data.rl_path) and facts.stage == "grpo" and not is_agent(facts):
        moving += [("the prompts", config.data.rl_revision)]
    if config.judge.kind == "openai" and facts.stage == "grpo" and not is_agent(facts):
        moving += [("the judge", config.judge.revision)]
    named = [what for what, revision in moving if revision == "main"]
    if not named:
        return []
    listed = " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)
    return [
        Line(f"The revision of {listed} is recorded as `main`, which moves: it may differ today.")
    ]


def _missing_numbers(facts: CardFacts) -> list[Line]:
    missing = without_value(facts)
    notes = [Line(f"Not computed, and not counted as 0: {', '.join(missing)}.")] if missing else []
    if facts.evaluations and not own_entries(facts):
        notes.append(Line("This checkpoint itself has not been evaluated."))
    return notes
