"""Examples of a run as the page shows them: as many as fit, each answer with all that judges it.

In: :class:`~refiner_core.report.run.document.Example` values. Out: :class:`ExampleShown` values:
answers as markup that leads to the evidence, judgements by what they are about, shares of rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from refiner_core.report.conversations import Conversation, conversation, size_of
from refiner_core.report.run.claims import Evidence, answer_markup, evidence_of
from refiner_core.report.run.document import Example, RewardPart, Said
from refiner_core.report.run.drawing import Share, shares
from refiner_core.report.transcripts import MOST_IN_ALL, MOST_OF_ANSWER, MOST_OF_PROMPT

MOST_EXAMPLES, MOST_SAID, MOST_JUDGEMENTS, MOST_PARTS = 60, 12, 24, 40


@dataclass(frozen=True)
class SaidShown:
    """An answer or an attempt as it is shown."""

    said: Said
    text: Markup
    conversation: Conversation | None
    shares: list[Share]
    measured: list[RewardPart]
    rubrics: list[Mapping[str, Any]]
    claims: list[dict[str, Any]]
    others: list[Mapping[str, Any]]
    judgements_left_out: int


@dataclass(frozen=True)
class ExampleShown:
    """A prompt with the answers that fit on the page."""

    example: Example
    evidence: Evidence
    said: tuple[SaidShown, ...]
    left_out: int


def shown_examples(
    examples: Sequence[Example], pair: tuple[str, str] | None = None
) -> list[ExampleShown]:
    """Examples with as many answers as a page can hold: each has an equal share of the room. The
    models of a ``pair`` (before, after) stand side by side, in front of the others."""
    shown = examples[:MOST_EXAMPLES]
    share = MOST_IN_ALL // max(1, len(shown))
    made = []
    for place, example in enumerate(shown):
        if pair is not None and example.kind == "before and after":
            said = sorted(example.said, key=lambda s: s.model not in pair)
            example = replace(example, said=tuple(said))
        kept = tuple(_within(example, share))
        evidence = evidence_of(example.prompt, (s.text for s in kept), f"e{place}")
        made.append(
            ExampleShown(
                example,
                evidence,
                tuple(_shown(said, evidence) for said in kept),
                len(example.said) - len(kept),
            )
        )
    return made


def _within(example: Example, room: int) -> Iterator[Said]:
    room -= min(len(example.prompt), MOST_OF_PROMPT)
    for place, said in enumerate(example.said[:MOST_SAID]):
        size = min(len(said.text), MOST_OF_ANSWER)
        if said.episode is not None:
            size = size_of(said.episode)
        room -= size + 300 * min(len(said.judgements), MOST_JUDGEMENTS) + 300
        if room < 0 and place > 1:
            return
        yield said


def _shown(said: Said, evidence: Evidence) -> SaidShown:
    kept = said.judgements[:MOST_JUDGEMENTS]
    claims: dict[Any, dict[str, Any]] = {}
    rubrics, others = [], []
    for one in kept:
        kind = str(one.get("kind") or "")
        if kind.startswith("citation"):
            place = one.get("claim_index")
            found = claims.setdefault(place, {"place": place, "claim": one.get("claim"), "on": []})
            found["on"].append((kind.removeprefix("citation_"), one))
        elif kind in ("rubric", ""):
            rubrics.append(one)
        else:
            others.append(one)
    return SaidShown(
        said,
        answer_markup(said.text, evidence),
        conversation(said.episode) if said.episode is not None else None,
        *shares(said.parts[:MOST_PARTS]),
        rubrics,
        list(claims.values()),
        others,
        len(said.judgements) - len(kept),
    )
