"""Notes for a reader of a card, derived from records, never typed by hand.

In: :class:`CardFacts`. Out: one sentence or two per thing that happened, with where its numbers
come from. Messages of failures are left out on purpose: they name paths and hosts. Of a proof that
training resumes exactly the verdict is made again each time, and what is written of it is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from refiner_core.cards.facts import (
    UNKNOWN,
    CardFacts,
    counted,
    finite,
    is_hub_id,
    number,
    quoted,
)
from refiner_core.cards.results import cell, own_entries, without_value
from refiner_core.cards.settings import flag_of, shown
from refiner_core.cards.setup import rubric_source
from refiner_core.cards.training import hardware_notes, lost_hours
from refiner_core.contract.checks.environment import ONLY_OF_AGENTS
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.kinds import card_words
from refiner_core.contract.marks import ABSENT, walk
from refiner_core.contract.placement import STAGES
from refiner_core.contract.proofs import PROOF_VERSION, ResumeProof
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


def resume_notes(facts: CardFacts) -> Iterator[str]:
    """One note where the stage was proven, none where not."""
    proof = read_proof(facts.proof)
    if proof is None:
        return
    tried = (
        f"a run of {number(proof.steps, 'proof.steps')} steps of this stage, interrupted "
        f"{counted(len(proof.interruptions), 'proof.interruptions', 'time')}"
        f"{_HOW.get(frozenset(i.how for i in proof.interruptions), '')}"
    )
    if not proof.same_processes:
        tried += " and resumed on another number of processes"
    names = ", ".join(c.quantity for c in proof.comparisons)
    if proof.verdict == "diverged":
        first = proof.first
        assert first is not None, "a run that diverged differs somewhere"
        parted = f"ended with another {first.quantity}"
        if first.first_step is not None:
            step = number(first.first_step, "proof.comparisons")
            parted = f"differed in its {first.quantity} from step {step} on"
        yield f"Resume did not hold: {tried}, {parted}."
    elif proof.verdict == "bitwise":
        yield f"Resume was proven: {tried}, was bitwise the same ({names})."
    else:
        yield (
            f"Resume was proven within tolerance: {tried}, was the same up to "
            f"{number(f'{proof.largest:.3g}', 'proof.comparisons')} where "
            f"{number(f'{proof.tolerance:.3g}', 'proof.tolerance')} was allowed ({names})."
        )


def proof_problems(facts: CardFacts) -> Iterator[str]:
    """Statements of a proof that do not follow from its own numbers, or is about another stage."""
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


def known_notes(facts: CardFacts) -> list[str]:
    """All notes, in the order: how the run went, its data, its judge, its options, its numbers."""
    parts = (
        _adopted,
        _interruptions,
        _stopped,
        _ended_early,
        _changed_processes,
        lost_hours,
        resume_notes,
        hardware_notes,
        _dropped_rows,
        _rows_without_rubrics,
        _judge_failures,
        _later_fields,
        _moving_names,
        _missing_numbers,
    )
    return [note for part in parts for note in part(facts)]


def _adopted(facts: CardFacts) -> Iterator[str]:
    if facts.reports.get(facts.stage, {}).get("adopted"):
        yield (
            "This checkpoint was adopted from the folder of a run that had ended; how that run "
            "went is not recorded."
        )


def _interruptions(facts: CardFacts) -> Iterator[str]:
    for place, attempt in enumerate(facts.attempts):
        if attempt.failure == "none":
            continue
        at = f"attempts.{place}"
        later = [i for i, a in enumerate(facts.attempts) if i > place and a.stage == attempt.stage]
        when = _moment(attempt.ended_at, f"{at}.ended_at")
        if attempt.step:
            when += f" after step {facts.number(f'{at}.step')}"
        then = "the stage was not taken up again."
        if later:
            then = _resumed(facts, place, later[0])
        elif attempt.stage == facts.stage:
            then += f" This checkpoint is step {facts.number('step')}."
        yield (
            f"Attempt {facts.number(f'{at}.number')} of the {attempt.stage} stage ended{when} "
            f"because {_why(attempt.failure)}; {then}"
        )


def _why(failure: str) -> str:
    return _FAILURES.get(failure, failure.replace("_", " "))


def _moment(at: str | None, fact: str) -> str:
    """`` on 2026-11-21 03:12 UTC``, where it is known."""
    return f" on {number(at[:16].replace('T', ' '), fact)} UTC" if at else ""


def _resumed(facts: CardFacts, place: int, later: int) -> str:
    attempt, step = facts.attempts[place], facts.attempts[later].resumed_from_step
    text = f"attempt {facts.number(f'attempts.{later}.number')}"
    if step is None:
        return f"{text} started over."
    from_step = facts.number(f"attempts.{later}.resumed_from_step")
    text += f" went on from the checkpoint of step {from_step}, and repeats what would have come "
    text += "without it."
    if attempt.step is None or attempt.step <= step:
        return text
    lost = counted(attempt.step - step, f"attempts.{place}.step", "step was", "steps were")
    return f"{text} {lost} done again."


def _stopped(facts: CardFacts) -> Iterator[str]:
    """Fate of a training whose earlier checkpoint this is, as far as it was known."""
    known = facts.stopped
    if known.get("failure", "none") in ("none", "", None):
        return
    after = f", after step {facts.number('stopped.step')}" if known.get("step") else ""
    when = _moment(known.get("ended_at") and str(known["ended_at"]), "stopped.ended_at")
    yield (
        f"Training had stopped when this checkpoint was published{after}{',' if when else ''}{when}"
        f", because {_why(str(known['failure']))}; it had not been taken up again. This checkpoint "
        f"is step {facts.number('step')} of it, saved before that."
    )


def _ended_early(facts: CardFacts) -> Iterator[str]:
    """Another's trainer that ended well, and before the last step that it had spoken of."""
    at = f"reports.{facts.stage}"
    steps, planned = facts.fact(f"{at}.steps"), facts.fact(f"{at}.steps_planned")
    if isinstance(planned, int) and isinstance(steps, int) and steps < planned:
        yield (
            "Training ended by itself before its last step: this checkpoint is step "
            f"{number(steps, f'{at}.steps')} of the {number(planned, f'{at}.steps_planned')} that "
            "the trainer had spoken of."
        )


def _changed_processes(facts: CardFacts) -> Iterator[str]:
    """A training that went on with other processes is not bitwise what it would have been."""
    for stage in STAGES:
        report, path = facts.reports.get(stage, {}), f"reports.{stage}"
        parts = [
            f"up to step {number(part['up_to_step'], f'{path}.resumed_on.{i}.up_to_step')} on "
            f"{_processes(part, f'{path}.resumed_on.{i}')}"
            for i, part in enumerate(report.get("resumed_on") or ())
            if part.get("ranks") is not None and part.get("up_to_step") is not None
        ]
        if parts:
            yield (
                f"{stage.upper()} was resumed on other processes: {', '.join(parts)}, then on "
                f"{_processes(report, path)}; sums were taken in another order from there on."
            )


def _processes(part: Mapping[str, Any], path: str) -> str:
    engine = quoted(part.get("engine", UNKNOWN), f"{path}.engine")
    return f"{counted(part['ranks'], f'{path}.ranks', 'process', 'processes')} ({engine})"


def _dropped_rows(facts: CardFacts) -> Iterator[str]:
    for which, label in (("sft", "demonstrations"), ("rl", "prompts")):
        path = f"reports.data.{which}"
        if dropped := facts.fact(f"{path}.dropped"):
            reasons = ", ".join(
                f"{number(count, f'{path}.dropped.{reason}')} `{reason}`"
                for reason, count in sorted(dropped.items())
            )
            yield (
                f"{number(sum(dropped.values()), f'{path}.dropped')} of "
                f"{facts.number(f'{path}.read')} {label} were dropped, none was cut: {reasons}."
            )


def _rows_without_rubrics(facts: CardFacts) -> Iterator[str]:
    path, reward = "reports.data.split.rl_without_rubrics", facts.config.reward
    if facts.fact(path) and facts.stage == "grpo" and rubric_source(reward) == "instance":
        alone = "the citation term alone" if reward.apply_paper_citation_reward else "0"
        yield f"{facts.number(path)} prompts have no rubrics; their reward is {alone}."


def _judge_failures(facts: CardFacts) -> Iterator[str]:
    unscored = int(facts.fact("reports.grpo.counts.samples/unscored") or 0)
    if unscored and facts.stage == "grpo":
        episodes = "reports.grpo.episodes"
        of = f" of {facts.number(episodes)}" if facts.fact(episodes) else ""
        yield (
            f"{'The environment or its user' if facts.is_agent else 'The judge'} failed on "
            f"{number(unscored, 'reports.grpo.counts.samples/unscored')}{of} rollouts. They "
            "entered neither the group statistics nor the loss; a failure is never counted as a "
            "score."
        )
    for entry in own_entries(facts):
        if entry.metric == "judge_failed" and finite(entry.values.get("value")):
            yield (
                f"In the {entry.values['decoding']} evaluation of this model the judge failed on a "
                f"share of the samples: {cell(entry)}; they are not in its numbers."
            )


def _later_fields(facts: CardFacts) -> Iterator[str]:
    """Options that came after the run, with the value that it had in effect. Checks that only warn,
    as all had them then, have changed nothing."""
    if facts.recorded_fields is None:
        return
    idle = card_words(facts.stage).silent
    if not facts.is_agent:
        idle = (*idle, *ONLY_OF_AGENTS)
    for path, info in walk(RecipeConfig):
        known = info.legacy_value is ABSENT or path in facts.recorded_fields
        if not known and not path.startswith(idle) and ".health." not in path:
            yield (
                f"A later version introduced `{flag_of(path) or path}` ({info.doc}). **This "
                "checkpoint was produced before it existed**; the value in effect was "
                f"`{shown(info.legacy_value)}`."
            )


def _moving_names(facts: CardFacts) -> Iterator[str]:
    """Hub repositories that were read at a branch: what lies there today may be another state."""
    config = facts.config
    asked = facts.stage == "grpo" and not facts.is_agent
    based = is_hub_id(facts.base) and facts.base_model in (None, UNKNOWN)
    moving = (
        ("the base model", based and config.model.revision),
        ("the prompts", asked and is_hub_id(config.data.rl_path) and config.data.rl_revision),
        ("the judge", asked and config.judge.kind == "openai" and config.judge.revision),
    )
    named = [what for what, revision in moving if revision == "main"]
    if named:
        listed = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
        yield f"The revision of {listed} is recorded as `main`, which moves: it may differ today."


def _missing_numbers(facts: CardFacts) -> Iterator[str]:
    if missing := without_value(facts):
        yield f"Not computed, and not counted as 0: {', '.join(missing)}."
    if facts.evaluations and not own_entries(facts):
        yield "This checkpoint itself has not been evaluated."
