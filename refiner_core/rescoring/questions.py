"""What a judge would be asked about stored rollouts, and what is known already.

In: rollouts, settings of the reward. Out: the questions of each rollout, in order, found by the
very code that rewards; judgements that were stored with the rollouts, by question; and
:class:`RecordedJudge`, which answers from them and asks another judge for the rest alone.

With ``judge.form=batched`` all rubrics of an answer are judged together, so a judgement of one is
only known where it stood among the same others. A :data:`Key` says what was asked in that sense.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from refiner_core.contract.config import JudgeConfig, RewardConfig
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.judge_config import LEXICAL_MODELS
from refiner_core.contract.marks import walk
from refiner_core.contract.types import Judge, Judgement, JudgeRequest
from refiner_core.judges import judge_prompts_digest
from refiner_core.rescoring.rollouts import StoredRollout
from refiner_core.rewards import RewardInput, compute_rewards

#: What makes two questions the same one: the request, and with the batched form its company.
Key = Hashable
#: No part of what a judgement is.
_NOT_OF_A_JUDGEMENT = ("max_failed_share",)
_VERDICT = ("score", "status", "detail", "title", "polarity", "weight", "source")


class Question(NamedTuple):
    """What is asked, and how it is described where its judgement is stored."""

    request: JudgeRequest
    detail: Mapping[str, Any]


class Recorded(NamedTuple):
    """Judgements that were stored, by question, in the order of the rollouts.

    ``known`` has several of a question that several rollouts have asked. Of the judgements that the
    files hold ``unused`` are not among the questions that today's code asks.
    """

    known: Mapping[Key, Sequence[Judgement]]
    used: int
    unused: int


def judge_identity(config: JudgeConfig, prompts_digest: str | None = None) -> dict[str, Any]:
    """All that makes two judges the same one.

    Parameters
    ----------
    config
        The judge.
    prompts_digest
        Of its prompts at the time that is meant; none is today's.

    Raises
    ------
    ConfigurationError
        There are no such prompts.
    """
    if config.kind == "lexical":
        known = {"kind": "lexical"}  # as ever since there was but one of them
        return known if config.model == LEXICAL_MODELS[0] else {**known, "model": config.model}
    identity = {
        path: get_field(config, path)
        for path, info in walk(JudgeConfig)
        if info.mark == "identity" and path not in _NOT_OF_A_JUDGEMENT
    }
    digest = prompts_digest or judge_prompts_digest(config.prompt, config.form)
    return {**identity, "prompt_digest": digest}


def is_batched(config: JudgeConfig) -> bool:
    """Whether rubrics are judged in company."""
    return config.kind != "lexical" and config.form == "batched"


def items_of(rollouts: Iterable[StoredRollout]) -> list[RewardInput]:
    """What is rewarded."""
    return [RewardInput(r.prompt, r.text, r.stopped) for r in rollouts]


def questions_of(
    rollouts: Sequence[StoredRollout], reward: RewardConfig
) -> list[tuple[Question, ...]]:
    """The questions of each rollout under these settings, in the order in which they are judged.

    Raises
    ------
    DataError, ConfigurationError
        As of :func:`~refiner_core.rewards.compute_rewards`.
    """
    listener = _Listener()
    results = compute_rewards(items_of(rollouts), reward, listener)
    return [
        tuple(Question(listener.heard[int(d["detail"])], d) for d in result.judgements)
        for result in results
    ]


class _Listener:
    """Hears every question; its answers say which one they answer."""

    def __init__(self) -> None:
        self.heard: list[JudgeRequest] = []

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        first = len(self.heard)
        self.heard += requests
        return [Judgement("scored", 0.0, str(first + i)) for i in range(len(requests))]


def keys_of(requests: Sequence[JudgeRequest], *, batched: bool) -> list[Key]:
    """The key of each request among these."""
    if not batched:
        return list(requests)
    company: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for r in requests:
        if r.kind == "rubric":
            company[r.question, r.text][r.reference] = None
    return [(r, tuple(company[r.question, r.text])) if r.kind == "rubric" else r for r in requests]


def recorded(
    rollouts: Sequence[StoredRollout],
    questions: Sequence[Sequence[Question]],
    *,
    batched: bool = False,
) -> Recorded:
    """The judgements that stand with the rollouts, by the questions that their own settings ask."""
    known: dict[Key, list[Judgement]] = defaultdict(list)
    used = unused = 0
    for rollout, asked in zip(rollouts, questions, strict=True):
        stored: dict[Hashable, deque[Mapping[str, Any]]] = defaultdict(deque)
        for entry in rollout.judgements:
            stored[described(entry)].append(entry)
        before = used
        keys = keys_of([q.request for q in asked], batched=batched)
        for key, question in zip(keys, asked, strict=True):
            if entries := stored.get(described(question.detail)):
                known[key].append(_verdict(entries.popleft()))
                used += 1
        unused += len(rollout.judgements) - (used - before)
    return Recorded(known, used, unused)


def described(detail: Mapping[str, Any]) -> Hashable:
    """Which question of its rollout a stored judgement answers."""
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(detail.items())
        if name not in _VERDICT
    )


def _verdict(entry: Mapping[str, Any]) -> Judgement:
    if entry["status"] != "scored" or entry["score"] is None:
        return Judgement("failed", None, str(entry.get("detail") or ""))
    return Judgement("scored", float(entry["score"]), str(entry.get("detail") or ""))


class RecordedJudge:
    """Answers what is known and asks ``fallback`` the rest, each question once.

    Of a question with several judgements each time that it is asked gives the next one, so that
    rollouts that are judged in the order in which they were recorded get back their own. A failed
    judgement that is known stays failed: it is what this judge has said.
    """

    def __init__(
        self,
        known: Mapping[Key, Sequence[Judgement]],
        fallback: Judge,
        *,
        batched: bool = False,
    ) -> None:
        self._known, self._fallback, self._batched = known, fallback, batched
        self._turns: Counter[Key] = Counter()

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        """One judgement per request, in order. Errors as of the fallback."""
        keys = keys_of(requests, batched=self._batched)
        unknown = {
            key: r for key, r in zip(keys, requests, strict=True) if not self._known.get(key)
        }
        asked: dict[Key, Judgement] = {}
        if unknown:
            answers = self._fallback.judge(list(unknown.values()))
            asked = dict(zip(unknown, answers, strict=True))
        return [asked[key] if key in asked else self._next(key) for key in keys]

    def _next(self, key: Key) -> Judgement:
        judgements = self._known[key]
        turn = self._turns[key]
        self._turns[key] += 1
        return judgements[min(turn, len(judgements) - 1)]


class NobodyToAsk:
    """The fallback where nothing may be asked: what is not known has failed."""

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        """Failed, all of them."""
        return [Judgement("failed", None, "not recorded")] * len(requests)
