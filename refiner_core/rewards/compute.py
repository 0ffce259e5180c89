"""Rewards of rollouts: of a complete batch, or of one that is still being sampled.

::

    rollout ─ add ─> parse, questions ─> judge ─┐   (a streaming judge, meanwhile)
    rollout ─ add ─> parse, questions ─> judge ─┴─ results ─> scores ─> totals

    all rollouts ─ add ─> questions ─ results ─> one judge() call ─> scores ─> totals

In: rollouts (prompt, text, whether it stopped), the reward configuration, a judge. Out: one
:class:`~refiner_core.contract.types.RewardResult` per rollout, in order. Shared prompts and rubrics
are parsed once.

Three states: ``scored``; ``malformed``, if the policy gave no single non-empty answer, so that
rubric and citation parts are 0 by rule and the judge is not called; ``unscored``, if a
judgement failed. An unscored rollout has no total: a silent 0 would be full credit for a negative
rubric or an uncited claim, and a mean over the rest can be higher than the truth.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refiner_core.answers import ParsedAnswer, ParsedEvidence, parse_answer, parse_evidence
from refiner_core.contract.config import RewardConfig
from refiner_core.contract.errors import DataError, Interrupted, JudgeOutage, JudgeUnusable
from refiner_core.contract.types import (
    CUT_SHORT,
    REASONING,
    UNPARSABLE,
    WITHOUT_REASONING,
    Judge,
    Judgement,
    JudgeRequest,
    PromptRow,
    RewardResult,
    StreamingJudge,
)
from refiner_core.rewards.combine import (
    CitationQuestion,
    aggregate_rubrics,
    format_bonus,
    format_valid,
    plan_citations,
    reward_terms,
    score_citations,
    total_reward,
)
from refiner_core.rewards.course import penalty_measures
from refiner_core.rubrics import Rubric, select_rubrics

_REASONS_SHOWN = 3


def require_scored(results: Sequence[RewardResult], max_failed_share: float, *, of: str) -> None:
    """Raise if more than ``max_failed_share`` of ``results`` is unscored.

    Parameters
    ----------
    of
        Description of the results, e.g. ``rollouts of a step``.

    Raises
    ------
    JudgeOutage, JudgeUnusable
        The message names the most frequent reasons.
    """
    unscored = sum(1 for result in results if result.status == "unscored")
    if unscored <= max_failed_share * len(results):
        return
    reasons = failure_reasons(results)
    why = f": {reasons}" if reasons else ""
    share = f"at most a share of {max_failed_share} (judge.max_failed_share)"
    failed = [str(judgement.get("detail")) for judgement in _failed(results)]
    answered = Counter(text for text in map(_spoken_text, failed) if text)
    if 2 * answered.total() > len(failed):
        said = "; ".join(f"{text} ({n} times)" for text, n in answered.most_common(_REASONS_SHOWN))
        change = "correct the judge, judge.prompt, judge.max_tokens or judge.extra_body"
        raise JudgeUnusable(
            f"The judge's answers are no judgements: {said}, on {unscored} of {len(results)} {of}",
            expected=f"{share}, and one of the scores that its prompts ask for: 0, 1 or 2",
            fix=f"{WITHOUT_REASONING if REASONING in said else change}, until `refiner judge ask` "
            "with the recipe's judge gets its scores, then run the same command again",
        )
    raise JudgeOutage(
        f"The judge failed on {unscored} of {len(results)} {of}{why}",
        expected=share,
        fix="check that the judge answers, then run the same command again",
    )


def _spoken_text(detail: str) -> str:
    """Fault of an answer that is no judgement; empty if there was no answer."""
    if UNPARSABLE in detail:
        return detail.partition(UNPARSABLE)[2].lstrip(", ")
    return detail[detail.index(CUT_SHORT) :] if CUT_SHORT in detail else ""


def _failed(results: Sequence[RewardResult]) -> list[Mapping[str, Any]]:
    return [j for result in results for j in result.judgements if j.get("status") == "failed"]


def failure_reasons(results: Sequence[RewardResult]) -> str:
    """The most frequent reasons of failed judgements, with counts; empty if none failed."""
    counts = Counter(str(j.get("detail") or "no reason given") for j in _failed(results))
    shown = [
        f"{reason} ({n} times)" if n > 1 else reason
        for reason, n in counts.most_common(_REASONS_SHOWN)
    ]
    further = counts.total() - sum(n for _, n in counts.most_common(_REASONS_SHOWN))
    if further:
        shown.append(f"{further} further failed judgements")
    return "; ".join(shown)


class RewardInput(NamedTuple):
    """One rollout. ``text`` is the sampled text without special tokens; ``stopped`` is False
    if it ended by length."""

    prompt: PromptRow
    text: str
    stopped: bool


@dataclass(frozen=True)
class _Plan:
    """A parsed rollout, with its questions in the order of judging."""

    item: RewardInput
    answer: ParsedAnswer
    evidence: ParsedEvidence
    rubrics: tuple[Rubric, ...]
    rubric_requests: tuple[JudgeRequest, ...]
    citation_questions: tuple[CitationQuestion, ...]

    @functools.cached_property
    def requests(self) -> list[JudgeRequest]:
        return [*self.rubric_requests, *(q.request for q in self.citation_questions)]


def compute_rewards(
    items: Sequence[RewardInput], reward: RewardConfig, judge: Judge, *, totals_only: bool = False
) -> list[RewardResult]:
    """Reward a complete batch. All questions go to the judge in one call.

    Citations are judged and logged even if the citation reward is off or has weight 0, so that
    arms with and without it can be compared; with ``totals_only`` they are judged only if the total
    needs them.

    Components of a scored or malformed result, each a float: ``rubric`` (before the gate; 0 without
    rubrics), ``citation`` and its ``citation_precision``, ``citation_recall``, ``citation_f1``,
    ``citation_format``, ``citation_applicable`` (the prompt has evidence), ``claims`` (cited spans
    and plain text), ``uncited`` (those without an id), ``format_bonus``, ``format_valid``,
    ``no_rubrics`` (the judge term does not exist), ``penalty_…`` (measures with a price),
    ``total``. An unscored result has those that need no judge.

    Raises
    ------
    DataError
        A row's rubrics are invalid; the message names the row.
    ConfigurationError
        The static rubric set cannot be loaded.
    """
    stream = RewardStream(reward, judge, totals_only=totals_only)
    for place, item in enumerate(items):
        stream.add(place, item, ask=False)
    return stream.results()


class RewardStream:
    """Rewards of rollouts that are added as they finish.

    A judge that streams (:class:`~refiner_core.contract.types.StreamingJudge`) is called at each
    :meth:`add` and works while the caller continues; any other is called in :meth:`results`, in
    one call. The results are the same. With ``patient`` the judge's errors do not end sampling:
    :meth:`results` raises them.

    Raises of :meth:`add`
        Those of :func:`compute_rewards`.
    """

    def __init__(
        self,
        reward: RewardConfig,
        judge: Judge,
        *,
        patient: bool = False,
        totals_only: bool = False,
    ) -> None:
        self._reward, self._judge, self._patient = reward, judge, patient
        pays = reward.apply_paper_citation_reward and reward.paper_citation_weight > 0
        self._cites = pays or reward.penalties.unsupported > 0 or not totals_only
        self._streaming = judge if isinstance(judge, StreamingJudge) else None
        self._evidence_of = functools.cache(parse_evidence)
        self._rubrics_of = functools.cache(functools.partial(select_rubrics, reward=reward))
        self._plans: dict[int, _Plan] = {}
        self._new: list[int] = []
        self._asked: list[tuple[list[int], Callable[[], list[Judgement]]]] = []
        self._error: JudgeOutage | Interrupted | None = None

    @property
    def streams(self) -> bool:
        """True if the judge works while more rollouts are added."""
        return self._streaming is not None

    def add(self, place: int, item: RewardInput, *, ask: bool = True) -> None:
        """Parse a rollout, once, and plan its questions; a streaming judge starts with them, unless
        ``ask`` is False.

        Parameters
        ----------
        place
            Position of its result in :meth:`results`, which are sorted by it: rollouts may be added
            as they finish.
        """
        if place in self._plans or self._error is not None:
            return
        try:
            rubrics = self._rubrics_of(item.prompt.rubrics)
        except DataError as error:
            row = item.prompt.sample_id
            raise DataError(
                f"Row {row}: {error.what}", expected=error.expected, fix=error.fix
            ) from error
        evidence = self._evidence_of(item.prompt.prompt_text)
        self._plans[place] = _plan(item, evidence, rubrics, cites=self._cites)
        requests = self._requests([place])
        if self._streaming is None or not ask:
            self._new.append(place)
        elif requests:
            try:
                self._asked.append(([place], self._streaming.submit(requests)))
            except (JudgeOutage, Interrupted) as error:
                if not self._patient:
                    raise
                self._error = error

    def results(self, on_judged: Callable[[int, int], None] | None = None) -> list[RewardResult]:
        """Wait for the judge; one result per rollout, in order of their places.

        ``on_judged`` is called with (rollouts judged, all rollouts) while it waits. Single use.

        Raises
        ------
        JudgeOutage, Interrupted
            See :meth:`refiner_core.contract.types.Judge.judge`.
        """
        if self._error is not None:
            raise self._error
        self._new.sort()  # a judge without streaming gets them in order, however they were added
        judgements: dict[int, list[Judgement]] = {
            place: [] for place, plan in self._plans.items() if not plan.requests
        }
        for places, found in self._answers():
            if len(found) != (wanted := len(self._requests(places))):
                raise RuntimeError(f"the judge gave {len(found)} judgements for {wanted} requests")
            rest = iter(found)
            for place in places:
                asked = self._plans[place].requests
                judgements[place] = [_checked(next(rest)) for _ in asked]
            if on_judged is not None:
                on_judged(len(judgements), len(self._plans))
        return [
            _result(plan, judgements[place], self._reward)
            for place, plan in sorted(self._plans.items())
        ]

    def _answers(self) -> Iterator[tuple[list[int], list[Judgement]]]:
        """Places of rollouts, with the judgements of all their questions."""
        for places, result in self._asked:
            yield places, result()
        if requests := self._requests(self._new):
            yield self._new, self._judge.judge(requests)

    def _requests(self, places: Sequence[int]) -> list[JudgeRequest]:
        return [request for place in places for request in self._plans[place].requests]


def _plan(
    item: RewardInput, evidence: ParsedEvidence, rubrics: tuple[Rubric, ...], *, cites: bool
) -> _Plan:
    answer = parse_answer(item.text, evidence.texts)
    question = item.prompt.question
    asked: tuple[JudgeRequest, ...] = ()
    if not answer.malformed and answer.body is not None:
        asked = tuple(JudgeRequest("rubric", question, answer.body, r.description) for r in rubrics)
    citations = tuple(plan_citations(answer, evidence, question)) if cites else ()
    return _Plan(item, answer, evidence, rubrics, asked, citations)


def _checked(judgement: Judgement) -> Judgement:
    """A missing score, or one outside [0, 1] (NaN included), is a failed judgement."""
    if judgement.status != "scored":
        return Judgement("failed", None, judgement.detail)
    if judgement.score is None or not 0.0 <= judgement.score <= 1.0:
        return Judgement("failed", None, f"the judge scored {judgement.score}")
    return judgement


def _result(plan: _Plan, judgements: Sequence[Judgement], reward: RewardConfig) -> RewardResult:
    split = len(plan.rubric_requests)
    on_rubrics, on_citations = judgements[:split], judgements[split:]
    details = _details(plan, on_rubrics, on_citations)
    components = _format_components(plan)
    if any(judgement.status == "failed" for judgement in judgements):
        return RewardResult("unscored", None, components, details)

    malformed = plan.answer.malformed
    scored = zip(plan.rubrics, on_rubrics, strict=not malformed)
    judged = aggregate_rubrics([(r, j.score or 0.0) for r, j in scored], reward.rubric_aggregation)
    asked = list(zip(plan.citation_questions, on_citations, strict=True))
    components |= {"rubric": judged or 0.0, "total": 0.0}
    components |= score_citations(plan.answer, plan.evidence, asked)
    components |= penalty_measures(
        *(reward.penalties, plan.answer, plan.item.text, plan.evidence),
        plan.item.prompt.refiner_mode,
        [j.score or 0.0 for q, j in asked if q.request.kind == "citation_recall"],
    )
    total = components["total"] = total_reward(components, reward, plan.item.stopped)
    return RewardResult("malformed" if malformed else "scored", total, components, details)


def highest_reward(prompt: PromptRow, reward: RewardConfig) -> float:
    """The highest reward of a prompt: every positive rubric met and no negative one, every claim
    well cited if there is evidence, and no error of form."""
    ideal = [
        (rubric, 0.0 if rubric.polarity == "negative" else 1.0)
        for rubric in select_rubrics(prompt.rubrics, reward)
    ]
    judged = aggregate_rubrics(ideal, reward.rubric_aggregation)
    components = {
        "rubric": judged or 0.0,
        "no_rubrics": float(judged is None),
        "citation": float(bool(parse_evidence(prompt.prompt_text))),
        "format_bonus": 1.0,
    }
    best = {t.name: float(t.weight >= 0) for t in reward_terms(components, reward)}
    return total_reward({**best, **components}, reward, stopped=True)


def _format_components(plan: _Plan) -> dict[str, float]:
    """Components that need no judge."""
    mode = plan.item.prompt.refiner_mode
    return {
        "citation_applicable": float(bool(plan.evidence)),
        "claims": float(len(plan.answer.claims)),
        "uncited": float(sum(not claim.ids for claim in plan.answer.claims)),
        "format_bonus": format_bonus(plan.answer, mode),
        "format_valid": float(format_valid(plan.answer, mode)),
        "no_rubrics": float(not any(rubric.weight for rubric in plan.rubrics)),
    }


def _details(
    plan: _Plan, on_rubrics: Sequence[Judgement], on_citations: Sequence[Judgement]
) -> list[dict[str, Any]]:
    """JSON-ready judgements: the question, the raw score (before any flip), the status."""
    rubrics = [
        {
            "kind": "rubric",
            "title": rubric.title,
            "criterion": rubric.description,
            "polarity": rubric.polarity,
            "weight": rubric.weight,
            "source": rubric.source,
            **_verdict(judgement),
        }
        for rubric, judgement in zip(plan.rubrics, on_rubrics, strict=False)
    ]
    citations = [
        {"kind": question.request.kind, **question.detail(), **_verdict(judgement)}
        for question, judgement in zip(plan.citation_questions, on_citations, strict=True)
    ]
    return rubrics + citations


def _verdict(judgement: Judgement) -> dict[str, Any]:
    return {"score": judgement.score, "status": judgement.status, "detail": judgement.detail}
