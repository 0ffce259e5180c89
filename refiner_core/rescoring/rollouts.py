"""Stored rollouts and evaluation samples as values, the questions that judging them asks, and their
totals and advantages: as they were stored, and under other settings.

In: rows of Parquet files and the prompts that they were sampled from; settings of a reward; a
judge. Out: :class:`StoredRollout` values in the order of their rows, their groups (samples of one
prompt, whose advantages are relative to each other), their questions, judges that answer from what
is recorded; :class:`Scores`, parallel to the rollouts; and :func:`fidelity`: whether the run's own
settings give back to the bit what was stored, without which no difference between settings would
mean anything.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from refiner_core.contract.config import LEXICAL_MODELS, JudgeConfig, RewardConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import walk
from refiner_core.contract.types import Judge, Judgement, JudgeRequest, PromptRow
from refiner_core.judge_report.material import is_batched as is_batched
from refiner_core.judges import judge_prompts_digest
from refiner_core.rewards import RewardInput, compute_rewards
from refiner_core.training.rollouts.rollout import DropReason, Normalization, group_advantages

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


def stored_rollouts(
    rows: Iterable[Mapping[str, Any]], prompts: Sequence[PromptRow], decoding: str = ""
) -> list[StoredRollout]:
    """Rollouts of training steps; with a ``decoding``, samples of an evaluation.

    Raises
    ------
    DataError
        A row's prompt is not among ``prompts``.
    """
    found = []
    for row, prompt in _with_prompts(rows, prompts):
        if decoding:
            group = f"{decoding}, {row['sample_id']}"
            components = {component: row.get(m) for m, component in _OF_SAMPLES.items()}
        else:
            group = f"step {row['step']}, prompt {row.get('prompt_index', row['sample_id'])}"
            mine = (n for n in row if n.startswith(_COMPONENT))
            components = {n.removeprefix(_COMPONENT): row[n] for n in mine}
        judged = row["judgements"]
        rollout = StoredRollout(
            group=group,
            step=row.get("step"),
            sample_index=int(row["sample_index"]),
            prompt=prompt,
            text=str(row["response_text"]),
            stopped=row["finish_reason"] == "stop",
            status=str(row["status"]),
            total=row["reward"],
            advantage=row.get("advantage"),
            components={n: float(v) for n, v in components.items() if v is not None},
            judgements=tuple((json.loads(judged) if isinstance(judged, str) else judged) or ()),
        )
        found.append(rollout)
    return found


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


#: Question to a judge, and its description where its judgement is stored.
Question = tuple[JudgeRequest, Mapping[str, Any]]


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
        tuple((listener.heard[int(d["detail"])], d) for d in result.judgements)
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
) -> tuple[dict[Key, list[Judgement]], int]:
    """The judgements that stand with the rollouts, by the questions that their own settings ask, in
    the order of the rollouts: several of a question that several rollouts have asked. And how many
    judgements of the files are not among the questions that today's code asks."""
    known: dict[Key, list[Judgement]] = defaultdict(list)
    unused = 0
    for rollout, asked in zip(rollouts, questions, strict=True):
        stored: dict[Hashable, deque[Mapping[str, Any]]] = defaultdict(deque)
        for entry in rollout.judgements:
            stored[described(entry)].append(entry)
        keys = keys_of([request for request, _ in asked], batched=batched)
        for key, (_, detail) in zip(keys, asked, strict=True):
            if entries := stored.get(described(detail)):
                known[key].append(_verdict(entries.popleft()))
        unused += sum(map(len, stored.values()))
    return known, unused


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


Metric = Literal["total", "rubric", "citation"]
METRICS: tuple[Metric, ...] = ("total", "rubric", "citation")
#: Relative; advantages of nearly equal rewards magnify what rounding does to them.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Scores:
    """One entry per rollout; ``dropped`` has one per group, None for a group that is trained on.

    A rollout whose judge failed has neither total nor advantage.
    """

    totals: tuple[float | None, ...]
    advantages: tuple[float | None, ...]
    statuses: tuple[str, ...]
    components: tuple[Mapping[str, float], ...]
    judgements: tuple[Sequence[Mapping[str, Any]], ...]
    dropped: Mapping[str, DropReason | None] = field(default_factory=dict)

    @property
    def unscored(self) -> int:
        """Rollouts without a total."""
        return sum(total is None for total in self.totals)

    def values(self, metric: Metric) -> list[float | None]:
        """A metric per rollout; None where there is none: the judge failed, the row has no rubrics
        or no evidence to cite."""
        if metric == "total":
            return list(self.totals)
        return [
            None if total is None else _component(components, metric)
            for total, components in zip(self.totals, self.components, strict=True)
        ]


def _component(components: Mapping[str, float], metric: Metric) -> float | None:
    if metric == "rubric" and components.get("no_rubrics"):
        return None
    if metric == "citation" and not components.get("citation_applicable", 1.0):
        return None
    return components.get(metric)


def scores_under(
    rollouts: Sequence[StoredRollout],
    reward: RewardConfig,
    judge: Judge,
    normalization: Normalization,
) -> Scores:
    """Reward the rollouts again. Errors as of :func:`~refiner_core.rewards.compute_rewards`."""
    results = compute_rewards(items_of(rollouts), reward, judge)
    totals = [result.total for result in results]
    advantages, dropped = _advantages(rollouts, totals, normalization)
    return Scores(
        totals=tuple(totals),
        advantages=tuple(advantages),
        statuses=tuple(result.status for result in results),
        components=tuple(result.components for result in results),
        judgements=tuple(result.judgements for result in results),
        dropped=dropped,
    )


def stored_scores(
    rollouts: Sequence[StoredRollout], again: Scores, normalization: Normalization
) -> Scores:
    """Stored scores. Advantages of an evaluation, which stores none, are made from its totals;
    components that its files leave out are those of ``again``, the same settings once more."""
    totals = [rollout.total for rollout in rollouts]
    made, dropped = _advantages(rollouts, totals, normalization)
    in_training = any(rollout.step is not None for rollout in rollouts)
    return Scores(
        totals=tuple(totals),
        advantages=tuple(r.advantage for r in rollouts) if in_training else tuple(made),
        statuses=tuple(rollout.status for rollout in rollouts),
        components=tuple(
            {**more, **rollout.components}
            for rollout, more in zip(rollouts, again.components, strict=True)
        ),
        judgements=tuple(rollout.judgements for rollout in rollouts),
        dropped=dropped,
    )


def _advantages(
    rollouts: Sequence[StoredRollout],
    totals: Sequence[float | None],
    normalization: Normalization,
) -> tuple[list[float | None], dict[str, DropReason | None]]:
    found: list[float | None] = [None] * len(rollouts)
    dropped: dict[str, DropReason | None] = {}
    for name, members in groups_of(rollouts).items():
        group = group_advantages([totals[i] for i in members], normalization)
        dropped[name] = group.dropped
        for position, value in zip(members, group.values, strict=True):
            found[position] = value
    return found, dropped


# ---------------------------------------------------------------- fidelity


def fidelity(
    rollouts: Sequence[StoredRollout],
    again: Scores,
    *,
    unused: int = 0,
    rejudged: int = 0,
    judged_alike: int = 0,
) -> dict[str, Any]:
    """Share of what was stored that the run's own settings give back, bit by bit.

    Parameters
    ----------
    unused
        Stored judgements that today's code does not ask for: it reads answers, evidence or
        rubrics in another way than the run did.
    rejudged, judged_alike
        With the lexical judge, which costs nothing: judgements made again, and how many of them
        are as they were stored.

    Returns
    -------
    dict
        ``totals`` and ``advantages``: how many of ``rollouts`` are the same (``advantages`` is None
        for an evaluation). ``far``: how many differ by more than rounding does. ``first``: the
        first that differs, in words. ``exact``: everything is as it was. ``sound``: differences
        between settings are those of the settings. ``warning``: empty where all is well.
    """
    in_training = any(rollout.step is not None for rollout in rollouts)
    totals = advantages = far = 0
    first = ""
    for rollout, total, advantage in zip(rollouts, again.totals, again.advantages, strict=True):
        pairs = {"total": (rollout.total, total)}
        if in_training:
            pairs["advantage"] = (rollout.advantage, advantage)
        other = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        totals += "total" not in other
        advantages += "advantage" not in other
        far += any(_is_far(*pair) for pair in other.values())
        if other and not first:
            name, (was, now) = next(iter(other.items()))
            first = f"{rollout.group}, sample {rollout.sample_index}: {name} {was} -> {now}"
    found = {
        **{"rollouts": len(rollouts), "totals": totals},
        **{"advantages": advantages if in_training else None, "far": far},
        **{"rejudged": rejudged, "judged_alike": judged_alike, "first": first, "unused": unused},
    }
    exact = not first and rejudged == judged_alike
    sound = not far and rejudged == judged_alike
    warning = "" if exact else _warning(found, sound=sound)
    return {**found, "exact": exact, "sound": sound, "warning": warning}


def _warning(found: Mapping[str, Any], *, sound: bool) -> str:
    """Warning about settings that do not give back what was stored."""
    first = f" (first: {found['first']})" if found["first"] else ""
    if sound:
        return (
            f"the run's own settings give back what was stored up to rounding alone{first}: this "
            "version adds in another order than the one that trained. No comparison below depends "
            "on that."
        )
    alike = found["rollouts"] if found["advantages"] is None else found["advantages"]
    counts = {
        "totals differ": (found["totals"], found["rollouts"]),
        "advantages differ": (alike, found["rollouts"]),
        "judgements differ (lexical judge)": (found["judged_alike"], found["rejudged"]),
    }
    parts = [f"{of - same} of {of} {what}" for what, (same, of) in counts.items() if same < of]
    unused = found["unused"]
    more = f", and {unused} stored judgements answer questions that are not asked any more"
    return (
        f"the run's own settings do not give back what was stored: {', '.join(parts)}{first}"
        f"{more if unused else ''}. Differences below are in part those of the code, not of the "
        "settings; the row `own, again` shows how much."
    )


def _is_far(was: float | None, now: float | None) -> bool:
    if was is None or now is None:
        return was is not now
    return abs(was - now) > ROUNDING * max(1.0, abs(was), abs(now))
