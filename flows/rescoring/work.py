"""A planned rescoring, carried out.

::

    plan ─> judges ─> scores ─> fidelity · comparisons with the baseline · judge x policy matrix

In: a :class:`~flows.rescoring.planning.Planned`. Out: a :class:`Done` one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flows.rescoring.asking import Bill, JudgePlan, ask
from flows.rescoring.judges import judge_for
from flows.rescoring.planning import (
    Planned,
    baseline_of,
    identity_of,
    judge_fields,
    judge_key,
    questions_under,
)
from flows.rescoring.reading import Policy
from flows.rescoring.settings import AGAIN, Setting, own_setting
from refiner_core.contract.types import Judgement
from refiner_core.judges import build_judge
from refiner_core.rescoring.agreement import CriterionAgreement, judges_agree
from refiner_core.rescoring.compare import Comparison, compare
from refiner_core.rescoring.matrix import Matrix, make_matrix
from refiner_core.rescoring.questions import (
    Key,
    NobodyToAsk,
    RecordedJudge,
    is_batched,
)
from refiner_core.rescoring.scores import (
    Fidelity,
    Scores,
    fidelity,
    scores_under,
    stored_scores,
)


@dataclass(frozen=True)
class Compared:
    """A setting against its baseline, on one policy."""

    policy: str
    setting: str
    baseline: str
    comparison: Comparison
    agreement: tuple[CriterionAgreement, ...]


@dataclass(frozen=True)
class Done:
    """What came out. ``scores`` by policy, then setting; the run's own are as they were stored."""

    planned: Planned
    scores: Mapping[str, Mapping[str, Scores]]
    fidelity: Mapping[str, Fidelity]
    compared: tuple[Compared, ...]
    matrix: Matrix | None
    bills: tuple[Bill, ...]


class Watcher(Protocol):
    """Who is told how judging goes."""

    def judged(self, judge: str, done: int, total: int) -> None:
        """So many judgements of a judge have come, of so many."""
        ...

    def scored(self, done: int, total: int) -> None:
        """So many of the scorings (a setting on a policy's rollouts) are made, of so many."""
        ...

    def paused(self, why: str) -> None:
        """All servers are gone; with an empty text: one is back."""
        ...


class Silent:
    """A watcher that shows nothing."""

    def judged(self, judge: str, done: int, total: int) -> None:
        """Nothing is shown."""

    def scored(self, done: int, total: int) -> None:
        """Nothing is shown."""

    def paused(self, why: str) -> None:
        """Nothing is shown; the log says it."""


def carry_out(planned: Planned, watcher: Watcher) -> Done:
    """Ask what is to be asked, and score everything.

    Parameters
    ----------
    watcher
        Told how judging goes.

    Raises
    ------
    JudgeOutage
        A judge could not be asked; what has been judged is kept.
    """
    answers, bills = _ask_all(planned, watcher)
    scores: dict[str, dict[str, Scores]] = {}
    faithful: dict[str, Fidelity] = {}
    total = len(planned.policies) * len(planned.settings)
    for policy in planned.policies:
        again = _own_again(planned, policy)
        faithful[policy.name] = _fidelity(planned, policy, again)
        of_policy = scores.setdefault(policy.name, {})
        for setting in planned.settings:
            of_policy[setting.name] = _scores(planned, policy, setting, again, answers)
            watcher.scored(sum(map(len, scores.values())), total)
        if not faithful[policy.name].sound:
            of_policy[AGAIN] = again
    compared = tuple(_compare_all(planned, scores))
    return Done(planned, scores, faithful, compared, _matrix(planned, scores), tuple(bills))


def _scores(
    planned: Planned,
    policy: Policy,
    setting: Setting,
    again: Scores,
    answers: Mapping[str, Mapping[Key, Judgement]],
) -> Scores:
    """A policy's rollouts under a setting; under its run's own, as they were stored."""
    normalization = policy.config.grpo.advantage_normalization_type
    if identity_of(setting.config) == identity_of(policy.config):
        return stored_scores(policy.rollouts, again, normalization)
    judge = _judge_of(planned, policy, setting, answers)
    return scores_under(policy.rollouts, setting.reward, judge, normalization)


def _judge_of(
    planned: Planned,
    policy: Policy,
    setting: Setting,
    answers: Mapping[str, Mapping[Key, Judgement]],
) -> RecordedJudge:
    """Everything that is known of a setting's judge by now; each rollout's own judgements first."""
    key = judge_key(planned, policy, setting)
    known: dict[Key, Sequence[Judgement]] = {q: [j] for q, j in answers.get(key, {}).items()}
    known |= planned.judges[key].known
    if key == judge_key(planned, policy, own_setting(policy.config)):
        known |= planned.recorded[policy.name].known
    return RecordedJudge(known, NobodyToAsk(), batched=is_batched(setting.judge))


def _ask_all(
    planned: Planned, watcher: Watcher
) -> tuple[dict[str, dict[Key, Judgement]], list[Bill]]:
    answers, bills = {}, []
    for name, plan in planned.judges.items():
        if not plan.questions:
            continue
        total, done = len(plan.unknown), 0

        def tell(count: int, plan: JudgePlan = plan, total: int = total) -> None:
            nonlocal done
            done += count
            watcher.judged(plan.name, done, total)

        with judge_for(plan, planned.wanted.workspace, watcher.paused) as judge:
            answers[name], bill = ask(plan, judge, planned.wanted.prices, tell)
        bills.append(bill)
    return answers, bills


def _own_again(planned: Planned, policy: Policy) -> Scores:
    """The run's own settings once more, from what was stored with the rollouts alone; the lexical
    judge, which costs nothing, judges what was not."""
    config = policy.config
    rest = build_judge(config.judge) if config.judge.kind == "lexical" else NobodyToAsk()
    known = planned.recorded[policy.name].known
    judge = RecordedJudge(known, rest, batched=is_batched(config.judge))
    normalization = config.grpo.advantage_normalization_type
    return scores_under(policy.rollouts, config.reward, judge, normalization)


def _fidelity(planned: Planned, policy: Policy, again: Scores) -> Fidelity:
    found = planned.recorded[policy.name]
    rejudged = alike = 0
    if policy.config.judge.kind == "lexical":
        questions = questions_under(planned, policy, policy.config.reward)
        requests = [q.request for asked in questions for q in asked if q.request in found.known]
        today = build_judge(policy.config.judge).judge(requests)
        rejudged = len(requests)
        alike = sum(
            now.score == found.known[request][0].score
            for request, now in zip(requests, today, strict=True)
        )
    return fidelity(
        policy.rollouts, again, unused=found.unused, rejudged=rejudged, judged_alike=alike
    )


def _compare_all(planned: Planned, scores: Mapping[str, Mapping[str, Scores]]) -> list[Compared]:
    found = []
    configs = {setting.name: setting.config for setting in planned.settings}
    for policy in planned.policies:
        of_policy = scores[policy.name]
        baseline = baseline_of(planned, policy)
        resamples = policy.config.evaluate.bootstrap_samples
        base, judge = of_policy[baseline], judge_fields(configs[baseline])
        for name, other in of_policy.items():
            if other is base:
                continue
            agreement: list[CriterionAgreement] = []
            if judge_fields(configs.get(name, policy.config)) != judge:
                agreement = judges_agree(policy.rollouts, base, other, resamples=resamples)
            comparison = compare(policy.rollouts, base, other, resamples=resamples)
            found.append(Compared(policy.name, name, baseline, comparison, tuple(agreement)))
    return found


def _matrix(planned: Planned, scores: Mapping[str, Mapping[str, Scores]]) -> Matrix | None:
    if len(planned.policies) < 2:
        return None
    metric = planned.wanted.metric
    names = [s.name for s in planned.settings]
    names.sort(key=lambda name: name != planned.wanted.baseline)  # it is what others differ from
    return make_matrix(
        metric,
        {p.name: p.rollouts for p in planned.policies},
        {p.name: {n: scores[p.name][n].values(metric) for n in names} for p in planned.policies},
        resamples=planned.policies[0].config.evaluate.bootstrap_samples,
    )
