"""Proofs of resume: comparisons, verdicts, records, and their text on a card."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flows.proving.runs import PHASES, Trained, as_they_were, draw_points
from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import evidence_text
from refiner_core.cards.lint import check_card
from refiner_core.cards.public import public_proof
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.proofs import Interruption, ProofComparison, ResumeProof, verdict_of
from refiner_core.training.engines.plain import open_engine
from refiner_core.training.equality import (
    Row,
    compare_checkpoints,
    compare_rollouts,
    compare_traces,
    compare_weights,
)
from tests.support.card_facts import full_facts
from tests.support.recorded_run import RecordedRun

# ------------------------------------------------------------ traces and rollouts


def trace(**changes: float | None) -> list[Row]:
    rows: list[Row] = [
        (step, {"loss": 1.0 / step, "grad_norm": 2.0, "time/step_s": step * 0.1})
        for step in range(1, 7)
    ]
    rows[3] = (4, {**rows[3][1], **changes})
    return rows


def test_traces_differ_by_the_last_bit_and_not_by_the_clock() -> None:
    other = trace(**{"time/step_s": 99.0, "judge/calls": 3.0, "memory/host_gib": 1.0})
    found = compare_traces(trace(), other)
    assert (found.differing, found.compared) == (0, 12)
    assert verdict_of([found], 0.0) == "bitwise"
    found = compare_traces(trace(), trace(grad_norm=math.nextafter(2.0, 3.0)))
    assert (found.differing, found.first_step) == (1, 4)
    assert "2.0000000000000004 interrupted" in found.first
    assert verdict_of([found], 0.0) == "diverged"
    assert verdict_of([found], 1e-9) == "within tolerance"


@pytest.mark.parametrize(
    ("change", "step"),
    [
        (lambda rows: rows[:-1], 6),  # a step is missing
        (lambda rows: [*rows[:2], rows[1], *rows[2:]], 2),  # one is there twice
        (lambda rows: [*rows[:3], (4, {"loss": 0.25}), *rows[4:]], 4),  # a number is missing
        (lambda rows: [*rows[:3], (4, {**rows[3][1], "loss": None}), *rows[4:]], 4),
    ],
)
def test_missing_or_double_rows_diverge(change, step) -> None:
    found = compare_traces(trace(), change(trace()))
    assert (found.largest, found.first_step) == (None, step)
    assert verdict_of([found], 1e9) == "diverged"


def rollouts(token: int = 7, logprob: float = -0.5) -> dict[int, list[dict[str, Any]]]:
    row = {"sample_index": 0, "response_ids": [5, token], "logprobs": [-0.1, logprob]}
    return {1: [row, row], 2: [{**row, "response_ids": [5, 7], "logprobs": [-0.1, -0.5]}]}


def test_tokens_and_logprobs_are_compared() -> None:
    assert compare_rollouts(rollouts(), rollouts()).differing == 0
    tokens = compare_rollouts(rollouts(), rollouts(token=8))
    assert (tokens.differing, tokens.largest, tokens.first_step) == (2, None, 1)
    near = compare_rollouts(rollouts(), rollouts(logprob=-0.5001))
    assert near.largest == pytest.approx(1e-4)
    assert compare_rollouts(rollouts(), {1: rollouts()[1]}).largest is None


# ------------------------------------------------------------ weights and states


def model(folder: Path, weight: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    save_file({"a": weight, "b": torch.zeros(3)}, folder / "model.safetensors")
    return folder


def test_weights_are_compared_relative_to_the_learning_rate(tmp_path: Path) -> None:
    weight = torch.linspace(-1, 1, 8)
    one = model(tmp_path / "1", weight)
    assert compare_weights(one, model(tmp_path / "2", weight.clone()), 1e-5).differing == 0
    found = compare_weights(one, model(tmp_path / "3", weight + 1e-6), 1e-5)
    assert (found.compared, found.differing) == (2, 1)
    assert found.largest == pytest.approx(0.1, rel=0.1), "a tenth of the way at this learning rate"
    assert verdict_of([found], 0.01) == "diverged"
    other = compare_weights(one, model(tmp_path / "4", torch.zeros(9)), 1e-5)
    assert other.largest is None


def checkpoint(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    values: dict[str, Any] = {"momentum": 0.5, "random": 3, "cursor": 8, "attempt": 1, "asked": 5}
    values |= changes
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    states = {f"exp_avg.{name}": torch.full((4,), values["momentum"]) for name in "abcd"}
    save_file(states, folder / "state-rank00000-of-00001.safetensors")
    torch.save({"python": [3, [values["random"]] * 4, None]}, folder / "rng-rank00000-of-00001.pt")
    progress = {"step": 6, "cursor": values["cursor"], "judge": {"asked": values["asked"]}}
    (folder / "progress.json").write_text(json.dumps(progress))
    (folder / "COMPLETE.json").write_text(json.dumps({"attempt": values["attempt"]}))
    return folder


@pytest.mark.parametrize(
    ("changes", "quantity", "sized"),
    [
        ({"momentum": 0.50001}, "optimiser", True),
        ({"random": 4}, "random states", False),
        ({"cursor": 9}, "data cursor", False),
        ({"attempt": 4, "asked": 50}, None, False),  # how it came about is no part of it
    ],
)
def test_states_are_compared(changes, quantity, sized, tmp_path) -> None:
    one, two = checkpoint(tmp_path / "1"), checkpoint(tmp_path / "2", **changes)
    found = compare_checkpoints(one, two, 1e-3)
    assert all(c.compared for c in found)
    assert [c.quantity for c in found if c.differing] == ([quantity] if quantity else [])
    assert all((c.largest is not None) is sized for c in found if c.differing)


# ------------------------------------------------------------ what came about


def test_a_stop_at_the_last_step_does_not_count(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs")
    run.data()
    run.train("sft")
    made = [Interruption(3, "update", "kill", 0), Interruption(4, "update", "stop", 1)]
    assert as_they_were(run.workspace, run.stage("sft").id, made) == made[:1]


# ------------------------------------------------------------ points


@pytest.mark.parametrize("kind", ["sft", "grpo"])
@pytest.mark.parametrize("seed", range(5))
def test_points_lie_before_the_last_step_and_cover_every_phase(kind: Trained, seed: int) -> None:
    points = draw_points(kind, 12, 8, seed, save_freq=3)
    assert points == draw_points(kind, 12, 8, seed, save_freq=3), "the seed decides"
    assert len(points) == 8
    assert all(1 <= p.step < 12 for p in points)
    assert {p.phase for p in points} == set(PHASES[kind])
    assert {p.how for p in points} == {"kill", "stop"}
    assert all(p.step % 3 == 0 for p in points if p.phase == "save")
    assert [p.step for p in points] == sorted(p.step for p in points)


# ------------------------------------------------------------ verdict, record, card

SAME = (
    ProofComparison("loss trace", 120),
    ProofComparison("rollouts", 96),
    ProofComparison("weights", 46),
    ProofComparison("random states", 1261),
)
NEAR = (replace(SAME[0], differing=3, largest=0.0004, first_step=5, first="loss: 1 …"), *SAME[1:])
FAR = (replace(SAME[0], differing=9, largest=None, first_step=7, first="steps: …"), *SAME[1:])


def proof(comparisons: tuple[ProofComparison, ...] = SAME, **changes: Any) -> ResumeProof:
    facts = full_facts()
    given: dict[str, Any] = {
        **{"version": 1, "recipe": "tiny", "stage": "grpo", "fingerprint": facts.fingerprint},
        **{"stage_id": f"grpo-{facts.fingerprint[:12]}", "short_fingerprint": "ab" * 32},
        **{"overrides": ("workspace=/home/me/runs",), "changed": {"grpo.save_freq": 3}},
        **{"steps": 12, "seed": 0, "how": "both", "wanted": 3, "tolerance": 0.0},
        "interruptions": (
            Interruption(2, "generate", "kill", 1),
            Interruption(5, "judge", "stop", 2, 4),
            Interruption(9, "save", "kill", 3, 6),
        ),
        "comparisons": comparisons,
        "provenance": {"host": {"name": "node17"}},
    }
    return ResumeProof(**{**given, **changes})


def test_other_process_counts_are_within_tolerance_at_best() -> None:
    assert proof(processes=2, resume_processes=2).verdict == "bitwise"
    other = proof(processes=2, resume_processes=1, tolerance=0.01)
    assert other.verdict == "within tolerance"
    card = build_card(full_facts(proof=public_proof(other)))
    assert "another number of processes" in card


@pytest.mark.parametrize(
    ("comparisons", "tolerance", "says"),
    [(SAME, 0.0, "interrupted 3 times"), (NEAR, 0.01, "0.0004"), (FAR, 0.01, "from step 7")],
)
def test_a_proof_on_a_card_is_checked(comparisons, tolerance, says) -> None:
    facts = full_facts(proof=public_proof(proof(comparisons, tolerance=tolerance)))
    card, evidence = build_card(facts), evidence_text(facts, [])
    assert says in card
    assert [f for f in check_card(card, evidence) if "proof" in f.message] == []
    wrong = card.replace("of 12 steps", "of 120 steps")
    (found,) = [f for f in check_card(wrong, evidence) if "'120'" in f.message]
    assert "proof.steps" in found.message
    assert "node17" not in evidence
    assert "/home/me" not in evidence


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"verdict": "bitwise"}, "its comparisons give 'diverged'"),
        ({"fingerprint": "00" * 32}, "proof is of the stage 000000000000"),
        ({"interruptions": []}, "nothing was tried"),
    ],
)
def test_a_verdict_that_does_not_follow_is_found(change: dict[str, Any], says: str) -> None:
    facts = full_facts(proof={**public_proof(proof(FAR)), **change})
    if not facts.proof["interruptions"]:
        facts = full_facts(proof={**public_proof(proof()), **change})
    found = check_card(build_card(facts), evidence_text(facts, []))
    assert [f for f in found if says in f.message], [f.message for f in found]


def test_two_processes_begin_with_the_same_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each run would draw other random numbers."""

    def load(*_: Any) -> None:
        raise FileNotFoundError("far enough")

    monkeypatch.setattr("refiner_core.training.model.loading.load_for_training", load)
    drawn = []
    for seed, noise in ((1, 17), (1, 18), (2, 17)):
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(noise)  # as another process might have them
        with pytest.raises(FileNotFoundError):
            open_engine(RecipeConfig(seed=seed), "sft", "nothing")
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))
