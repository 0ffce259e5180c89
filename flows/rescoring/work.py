"""A rescoring from beginning to end.

::

    rollouts ─> questions per setting ─ less what is stored with them ─> judges ─> scores
    scores ─> fidelity · comparisons with the baseline · judge x policy matrix ─> document

In: what is :class:`Wanted`. Out: a :class:`Planned` rescoring, which says what would be asked and
has asked nothing; then a :class:`Done` one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from flows.rescoring.asking import Bill, JudgePlan, Prices, ask
from flows.rescoring.judges import judge_for, store_of
from flows.rescoring.reading import Part, Policy, read_policies
from flows.rescoring.settings import AGAIN, OWN, Options, Setting, make_settings, own_setting
from infra.workspace import Workspace
from refiner_core.contract.config import RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fingerprint import digest
from refiner_core.contract.loading import suggest
from refiner_core.contract.records import RunRecord, to_json
from refiner_core.contract.types import Judgement
from refiner_core.judges import LexicalJudge
from refiner_core.rescoring.agreement import CriterionAgreement, judges_agree
from refiner_core.rescoring.compare import Comparison, compare
from refiner_core.rescoring.matrix import Matrix, common_prompts, make_matrix
from refiner_core.rescoring.questions import (
    Key,
    NobodyToAsk,
    Question,
    Recorded,
    RecordedJudge,
    is_batched,
    judge_identity,
    questions_of,
    recorded,
)
from refiner_core.rescoring.scores import (
    Fidelity,
    Metric,
    Scores,
    fidelity,
    scores_under,
    stored_scores,
)
from refiner_core.rubrics import rubric_set_digest

#: Of the reward, what decides which questions are asked.
_ASKS = ("rubric_source", "static_rubrics", "instance_rubrics_only")
#: What a run's rollouts are scored by is seen at a glance up to so many steps back.
LAST_STEPS = "last:5"


@dataclass(frozen=True)
class Wanted:
    """What somebody asks for. ``steps`` None is all, or the last few of several runs."""

    workspace: Workspace
    runs: tuple[RunRecord, ...]
    options: Options
    part: Part
    steps: str | None = None
    baseline: str = OWN
    metric: Metric = "total"
    common: bool = False
    prices: Prices = field(default_factory=Prices)


@dataclass
class Planned:
    """What would be done. ``asks`` and ``recorded`` are by policy and kind of questions."""

    wanted: Wanted
    policies: list[Policy]
    settings: list[Setting]
    judges: dict[str, JudgePlan] = field(default_factory=dict)
    questions: dict[tuple[str, str], list[tuple[Question, ...]]] = field(default_factory=dict)
    recorded: dict[str, Recorded] = field(default_factory=dict)

    @property
    def new_calls(self) -> int:
        """Calls of servers that it would take."""
        return sum(plan.calls for plan in self.judges.values())

    @property
    def short_id(self) -> str:
        """Of what was asked: the same question has the same id."""
        asked = {
            "policies": [[p.stage_id, p.name, len(p.rollouts), p.steps] for p in self.policies],
            "part": to_json(self.wanted.part),
            "settings": [[s.name, *_identity(s.config), _rubrics(s)] for s in self.settings],
            "judges": sorted(self.judges),
            "baseline": self.wanted.baseline,
            "metric": self.wanted.metric,
            "common": self.wanted.common,
        }
        return digest(asked)[:10]


def _rubrics(setting: Setting) -> str | None:
    """What the set says that a setting names: a file may be edited."""
    static = "static" in setting.reward.rubric_source and not setting.reward.instance_rubrics_only
    return rubric_set_digest(setting.reward.static_rubrics) if static else None


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


def plan_rescore(wanted: Wanted) -> Planned:
    """Read the rollouts and see what would have to be asked; asks nothing, writes nothing.

    Raises
    ------
    ConfigurationError, DataError, WorkspaceError
        Something that was asked for is not there or cannot be meant.
    """
    default = "all" if len(wanted.runs) == 1 else LAST_STEPS
    wanted = replace(wanted, part=replace(wanted.part, steps=wanted.steps or default))
    policies = read_policies(wanted.workspace, wanted.runs, wanted.part)
    policies = _comparable(policies, wanted)
    settings = _settings(policies, wanted)
    planned = Planned(wanted, policies, settings)
    for policy in policies:
        _read_recorded(planned, policy)
    for setting in settings:
        for policy in policies:
            _note_questions(planned, policy, setting)
    for plan in planned.judges.values():
        if plan.served and plan.unknown:
            with store_of(plan, wanted.workspace) as store:
                plan.count(store)
    return planned


def _comparable(policies: list[Policy], wanted: Wanted) -> list[Policy]:
    if len(policies) < 2:
        return policies
    common = common_prompts({p.name: p.rollouts for p in policies}, restrict=wanted.common)
    return [replace(p, rollouts=tuple(common[p.name])) for p in policies]


def _settings(policies: Sequence[Policy], wanted: Wanted) -> list[Setting]:
    """The runs' own settings, each once, then what was asked for (over those of the first run)."""
    owners: list[Policy] = []
    for policy in policies:
        if all(_identity(policy.config) != _identity(other.config) for other in owners):
            owners.append(policy)
    settings = [
        own_setting(
            policy.config,
            wanted.options.overrides,
            OWN if len(owners) == 1 else f"{OWN} of {policy.run_name}",
        )
        for policy in owners
    ]
    settings += make_settings(policies[0].config, wanted.options)
    names = [setting.name for setting in settings]
    if wanted.baseline not in (OWN, *names):
        raise ConfigurationError(
            f"There is no setting {wanted.baseline!r} to compare with."
            f"{suggest(wanted.baseline, names)}",
            expected="one of: " + "; ".join(names),
            fix="name one of these with --baseline",
        )
    return settings


def _identity(config: RecipeConfig) -> list[object]:
    """What is the same of two settings that are the same."""
    return [to_json(config.reward), _judge_fields(config)]


def _judge_fields(config: RecipeConfig) -> dict[str, object]:
    """A judge by its configuration alone, whatever its prompts say by now."""
    return judge_identity(config.judge, "-")


def _judge_key(planned: Planned, policy: Policy, setting: Setting) -> str:
    """The judge of a setting on a policy's rollouts. A setting that changes nothing of the judge
    has the run's own one, as it was then; any other is as it is today."""
    same = _judge_fields(policy.config) == _judge_fields(setting.config)
    prompts = policy.sources.get("judge_prompt") if same else None
    identity = judge_identity(setting.judge, prompts)
    key = digest(identity)
    if key not in planned.judges:
        planned.judges[key] = JudgePlan(_judge_name(setting.config), setting.judge, identity)
    planned.judges[key].config = setting.judge  # with the address that this call has given
    return key


def _read_recorded(planned: Planned, policy: Policy) -> None:
    """What is known of the policy's own judge."""
    questions = _questions(planned, policy, policy.config.reward)
    batched = is_batched(policy.config.judge)
    found = recorded(policy.rollouts, questions, batched=batched)
    planned.recorded[policy.name] = found
    plan = planned.judges[_judge_key(planned, policy, own_setting(policy.config))]
    for key, judgements in found.known.items():
        plan.known.setdefault(key, judgements)


def _note_questions(planned: Planned, policy: Policy, setting: Setting) -> None:
    """What a setting asks of its judge; a run's own settings have been asked already."""
    plan = planned.judges[_judge_key(planned, policy, setting)]
    if _identity(setting.config) == _identity(policy.config):
        return
    for asked in _questions(planned, policy, setting.reward):
        plan.need([question.request for question in asked])


def _questions(
    planned: Planned, policy: Policy, reward: RewardConfig
) -> list[tuple[Question, ...]]:
    """Found once for all settings that ask the same."""
    which = json.dumps([getattr(reward, name) for name in _ASKS])
    if (policy.name, which) not in planned.questions:
        planned.questions[policy.name, which] = questions_of(policy.rollouts, reward)
    return planned.questions[policy.name, which]


def _judge_name(config: RecipeConfig) -> str:
    return "lexical" if config.judge.kind == "lexical" else config.judge.model


# ---------------------------------------------------------------- carrying it out


class Watcher(Protocol):
    """Who is told how judging goes."""

    def judged(self, judge: str, done: int, total: int) -> None:
        """So many judgements of a judge have come, of so many."""
        ...

    def paused(self, why: str) -> None:
        """All servers are gone; with an empty text: one is back."""
        ...


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
    for policy in planned.policies:
        again = _own_again(planned, policy)
        faithful[policy.name] = _fidelity(planned, policy, again)
        normalization = policy.config.grpo.advantage_normalization_type
        stored = stored_scores(policy.rollouts, again, normalization)
        of_policy: dict[str, Scores] = {}
        for setting in planned.settings:
            if _identity(setting.config) == _identity(policy.config):
                of_policy[setting.name] = stored
                continue
            judge = _judge_of(planned, policy, setting, answers)
            of_policy[setting.name] = scores_under(
                policy.rollouts, setting.reward, judge, normalization
            )
        if not faithful[policy.name].sound:
            of_policy[AGAIN] = again
        scores[policy.name] = of_policy
    return Done(
        planned, scores, faithful, tuple(_compare_all(planned, scores)), _matrix(planned, scores),
        tuple(bills),
    )  # fmt: skip


def _judge_of(
    planned: Planned,
    policy: Policy,
    setting: Setting,
    answers: Mapping[str, Mapping[Key, Judgement]],
) -> RecordedJudge:
    """Everything that is known of a setting's judge by now; each rollout's own judgements first."""
    key = _judge_key(planned, policy, setting)
    known: dict[Key, Sequence[Judgement]] = {q: [j] for q, j in answers.get(key, {}).items()}
    known |= planned.judges[key].known
    if key == _judge_key(planned, policy, own_setting(policy.config)):
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
    rest = LexicalJudge() if config.judge.kind == "lexical" else NobodyToAsk()
    known = planned.recorded[policy.name].known
    judge = RecordedJudge(known, rest, batched=is_batched(config.judge))
    normalization = config.grpo.advantage_normalization_type
    return scores_under(policy.rollouts, config.reward, judge, normalization)


def _fidelity(planned: Planned, policy: Policy, again: Scores) -> Fidelity:
    found = planned.recorded[policy.name]
    rejudged = alike = 0
    if policy.config.judge.kind == "lexical":
        questions = _questions(planned, policy, policy.config.reward)
        requests = [q.request for asked in questions for q in asked if q.request in found.known]
        today = LexicalJudge().judge(requests)
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
        base, judge = of_policy[baseline], _judge_fields(configs[baseline])
        for name, other in of_policy.items():
            if other is base:
                continue
            agreement: list[CriterionAgreement] = []
            if _judge_fields(configs.get(name, policy.config)) != judge:
                agreement = judges_agree(policy.rollouts, base, other, resamples=resamples)
            comparison = compare(policy.rollouts, base, other, resamples=resamples)
            found.append(Compared(policy.name, name, baseline, comparison, tuple(agreement)))
    return found


def baseline_of(planned: Planned, policy: Policy) -> str:
    """The setting that a policy's others are compared with: by default its run's own."""
    if planned.wanted.baseline != OWN:
        return planned.wanted.baseline
    own = (s.name for s in planned.settings if _identity(s.config) == _identity(policy.config))
    return next(own)


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
