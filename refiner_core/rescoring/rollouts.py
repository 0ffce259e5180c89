"""Stored rollouts and evaluation samples as values, and the questions that judging them asks.

In: rows of Parquet files and the prompts that they were sampled from; settings of a reward. Out:
:class:`StoredRollout` values in the order of their rows, their groups (samples of one prompt, whose
advantages are relative to each other), their questions, and judges that answer from what is
recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refiner_core.contract.config import LEXICAL_MODELS, JudgeConfig, RewardConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import walk
from refiner_core.contract.types import Judge, Judgement, JudgeRequest, PromptRow
from refiner_core.judge_report.material import is_batched as is_batched
from refiner_core.judges import judge_prompts_digest
from refiner_core.rewards import RewardInput, compute_rewards

_COMPONENT = "reward/"
#: Metric of an evaluation's sample -> component of the reward that it is.
_OF_SAMPLES = {
    "rubric_score": "rubric",
    **{
        name: name
        for name in (
            *("citation_precision", "citation_recall", "citation_f1", "citation_format"),
            *("format_valid", "claims", "uncited"),
        )
    },
}


@dataclass(frozen=True)
class StoredRollout:
    """One sample with the reward that it was given.

    Attributes
    ----------
    group
        Which samples it is compared with: its step (or decoding) and prompt.
    stopped
        Whether it ended by itself instead of at the length limit.
    total, advantage
        As stored; None where the judge failed. An evaluation stores no advantages.
    components, judgements
        As stored.
    """

    group: str
    step: int | None
    sample_index: int
    prompt: PromptRow
    text: str
    stopped: bool
    status: str
    total: float | None
    advantage: float | None
    components: Mapping[str, float]
    judgements: tuple[Mapping[str, Any], ...]


def from_training(
    rows: Iterable[Mapping[str, Any]], prompts: Sequence[PromptRow]
) -> list[StoredRollout]:
    """Rollouts of training steps.

    Raises
    ------
    DataError
        A row's prompt is not among ``prompts``.
    """
    return [
        _rollout(
            row,
            prompt,
            f"step {row['step']}, prompt {row.get('prompt_index', row['sample_id'])}",
            {n.removeprefix(_COMPONENT): v for n, v in row.items() if n.startswith(_COMPONENT)},
        )
        for row, prompt in _with_prompts(rows, prompts)
    ]


def from_evaluation(
    rows: Iterable[Mapping[str, Any]], prompts: Sequence[PromptRow], decoding: str
) -> list[StoredRollout]:
    """Samples of an evaluation. Errors as above."""
    return [
        _rollout(
            row,
            prompt,
            f"{decoding}, {row['sample_id']}",
            {component: row.get(metric) for metric, component in _OF_SAMPLES.items()},
        )
        for row, prompt in _with_prompts(rows, prompts)
    ]


def _rollout(
    row: Mapping[str, Any], prompt: PromptRow, group: str, components: Mapping[str, Any]
) -> StoredRollout:
    judgements = row["judgements"]
    found = json.loads(judgements) if isinstance(judgements, str) else judgements
    return StoredRollout(
        group=group,
        step=row.get("step"),
        sample_index=int(row["sample_index"]),
        prompt=prompt,
        text=str(row["response_text"]),
        stopped=row["finish_reason"] == "stop",
        status=str(row["status"]),
        total=row["reward"],
        advantage=row.get("advantage"),
        components={name: float(value) for name, value in components.items() if value is not None},
        judgements=tuple(found or ()),
    )


def _with_prompts(
    rows: Iterable[Mapping[str, Any]], prompts: Sequence[PromptRow]
) -> Iterator[tuple[Mapping[str, Any], PromptRow]]:
    """Rows with their prompts: by position where a row says one, since ids need not be unique; else
    by id."""
    by_id = {prompt.sample_id: prompt for prompt in prompts}
    for row in rows:
        position, wanted = row.get("prompt_index"), str(row["sample_id"])
        prompt = by_id.get(wanted)
        if position is not None and 0 <= position < len(prompts):
            there = prompts[position]
            prompt = there if there.sample_id == wanted else prompt
        if prompt is None:
            raise DataError(
                f"The prompt {wanted} of a stored rollout is not among the {len(prompts)} prompts "
                "of the run's data",
                expected="the prompts that the rollouts were sampled from",
                fix="bring the output of the run's data stage back as it was",
            )
        yield row, prompt


def groups_of(rollouts: Sequence[StoredRollout]) -> dict[str, list[int]]:
    """Positions of the members of each group, groups in order of appearance, members by sample."""
    groups: dict[str, list[int]] = {}
    for position, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(position)
    return {
        name: sorted(members, key=lambda i: rollouts[i].sample_index)
        for name, members in groups.items()
    }


def some_groups(rollouts: Sequence[StoredRollout], count: int) -> list[StoredRollout]:
    """All samples of ``count`` groups, drawn by their names: the same ones each time, and of more
    groups those of fewer are a part. All groups where there are no more."""
    names = sorted(groups_of(rollouts), key=lambda n: hashlib.sha256(n.encode()).digest())
    chosen = set(names[:count])
    return [rollout for rollout in rollouts if rollout.group in chosen]


#: What makes two questions the same one: the request, and with the batched form its company.
Key = Hashable
#: No part of what a judgement is.
_NOT_OF_A_JUDGEMENT = ("max_failed_share",)
_VERDICT = ("score", "status", "detail", "title", "polarity", "weight", "source")


class Question(NamedTuple):
    """Question to a judge, and its description where its judgement is stored."""

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


def items_of(rollouts: Iterable[StoredRollout]) -> list[RewardInput]:
    """Rollouts as the reward reads them."""
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
    """Key of the question that a stored judgement answers."""
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
