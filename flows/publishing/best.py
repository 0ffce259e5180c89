"""Which checkpoint is the best, by evaluations under one protocol.

In: the weights and evaluations that a `publish-best` stage has as inputs. Out: :class:`Choice`: the
checkpoint with the best value of ``publish.best_metric``, the earliest of those that are equal, and
what the others had. Numbers of two protocols are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infra.store.workspace import Workspace
from refiner_core.cards.facts import finite
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import StageFailed
from refiner_core.evaluation.metrics import higher_is_better


class Candidate(NamedTuple):
    """A checkpoint: the role of its weights, the name under which it was measured, its step, and
    the number that counts."""

    role: str
    model: str
    step: int
    entry: Mapping[str, Any]

    @property
    def value(self) -> float:
        """The number; it is finite."""
        return float(self.entry["value"])


@dataclass(frozen=True)
class Choice:
    """The best checkpoint, and all that were compared, by step."""

    best: Candidate
    candidates: tuple[Candidate, ...]

    def report(self) -> dict[str, Any]:
        """For a stage's report."""
        first = self.best.entry
        shared = ("metric", "decoding", "protocol", "protocol_name")
        return {
            **{key: first.get(key) for key in shared},
            "step": self.best.step,
            "candidates": [
                {"step": c.step, **{k: c.entry.get(k) for k in ("value", "low", "high", "n")}}
                for c in self.candidates
            ],
        }

    def sentence(self) -> str:
        """For the card."""
        first = self.best.entry
        others = "; ".join(
            f"step {c.step}: {_said(c.entry)}" for c in self.candidates if c is not self.best
        )
        how = f"`{first['metric']}` ({first['decoding']} decoding, protocol `{first['protocol']}`)"
        return (
            f"Published as the best of {len(self.candidates)} checkpoints by {how}: step "
            f"{self.best.step} with {_said(first)}."
            + (f" The others had: {others}." if others else "")
        )


def _said(entry: Mapping[str, Any]) -> str:
    low, high = finite(entry.get("low")), finite(entry.get("high"))
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{entry['value']:.3f}{interval}, n = {entry['n']}"


def measured_as(role: str, model: str) -> str:
    """The name under which evaluations have the weights of a role (``weights-step50``)."""
    step = role.removeprefix("weights").removeprefix("-")
    return f"{model}-{step}" if step else model


def choose(
    workspace: Workspace,
    inputs: Mapping[str, str],
    steps: Mapping[str, int],
    model: str,
    config: PublishConfig,
) -> Choice:
    """The best of several checkpoints.

    Parameters
    ----------
    inputs
        Role -> stage id; ``evaluation-<model>-step50`` belongs to ``weights-step50``.
    steps
        Role of weights -> step.

    Raises
    ------
    StageFailed
        One has no such number, or they were measured in different ways.
    """
    found = []
    for role, step in sorted(steps.items(), key=lambda item: item[1]):
        name = measured_as(role, model)
        stage_id = inputs.get(f"evaluation-{name}")
        result = workspace.read_result(stage_id) if stage_id else None
        entries = result.report["evaluations"] if result is not None else ()
        found.append(Candidate(role, name, step, _number(entries, step, config)))
    _refuse_mixed(found)
    sign = -1.0 if higher_is_better(config.best_metric) is False else 1.0
    best = max(found, key=lambda c: (sign * c.value, -c.step))
    return Choice(best, tuple(found))


def _number(
    entries: Sequence[Mapping[str, Any]], step: int, config: PublishConfig
) -> Mapping[str, Any]:
    metric, decoding = config.best_metric, config.best_decoding
    for entry in entries:
        wanted = (entry["metric"], entry["decoding"]) == (metric, decoding)
        if wanted and finite(entry.get("value")) is not None:
            return entry
    measured = sorted({e["metric"] for e in entries if e["decoding"] == decoding})
    raise StageFailed(
        f"The checkpoint of step {step} has no {metric} under {decoding} decoding, so the best "
        "cannot be chosen",
        expected=f"a number of each checkpoint; measured are: {', '.join(measured) or 'none'}",
        fix="set publish.best_metric= and publish.best_decoding= to what is measured",
    )


def _refuse_mixed(found: Sequence[Candidate]) -> None:
    by_protocol: dict[str, list[Candidate]] = {}
    for candidate in found:
        by_protocol.setdefault(str(candidate.entry["protocol"]), []).append(candidate)
    if len(by_protocol) < 2:
        return
    said = [
        f"{c[0].entry.get('protocol_name') or protocol} (steps {', '.join(str(x.step) for x in c)})"
        for protocol, c in by_protocol.items()
    ]
    raise StageFailed(
        f"The checkpoints were measured in {len(said)} ways: {'; '.join(said)}",
        expected="one protocol: the same prompts, decoding, judge and reward",
        fix="evaluate all of them by one recipe",
    )
