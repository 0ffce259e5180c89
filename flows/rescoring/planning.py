"""What a rescoring is about, and what it would ask; asks nothing and writes nothing.

::

    rollouts ─> settings ─> questions of each ─ less what is stored with them ─> plan per judge

In: what is :class:`Wanted`. Out: a :class:`Planned` rescoring.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flows.rescoring.asking import JudgePlan, Prices
from flows.rescoring.judges import store_of
from flows.rescoring.reading import Part, Policy, read_policies
from flows.rescoring.settings import OWN, Options, Setting, make_settings, own_setting
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.fingerprint import digest
from refiner_core.contract.judge_config import LEXICAL_MODELS
from refiner_core.contract.records import RunRecord, to_json
from refiner_core.judges import judge_prompts_digest
from refiner_core.rescoring.matrix import common_prompts
from refiner_core.rescoring.questions import (
    Question,
    Recorded,
    is_batched,
    judge_identity,
    questions_of,
    recorded,
)
from refiner_core.rescoring.scores import (
    Metric,
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
            "settings": [[s.name, *identity_of(s.config), _rubrics(s)] for s in self.settings],
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
            _check_prompts(plan)
            with store_of(plan, wanted.workspace) as store:
                plan.count(store)
    return planned


def _check_prompts(plan: JudgePlan) -> None:
    """Refuse to ask in other words than those in which the same judge was asked before."""
    judge, then = plan.config, str(plan.identity["prompt_digest"])
    now = judge_prompts_digest(judge.prompt, judge.form)
    if now == then:
        return
    raise ConfigurationError(
        f"The judge's prompts {judge.prompt} have changed since the run ({then[:12]} then, "
        f"{now[:12]} now), and {len(plan.unknown)} questions have not been asked with the old ones",
        expected="one wording for all that a judge is asked",
        fix="put them back as they were; or copy the new ones to a folder of another name, and "
        "name it with --judge prompt=DIR, which asks everything anew",
    )


def _comparable(policies: list[Policy], wanted: Wanted) -> list[Policy]:
    if len(policies) < 2:
        return policies
    common = common_prompts({p.name: p.rollouts for p in policies}, restrict=wanted.common)
    return [replace(p, rollouts=tuple(common[p.name])) for p in policies]


def _settings(policies: Sequence[Policy], wanted: Wanted) -> list[Setting]:
    """The runs' own settings, each once, then what was asked for (over those of the first run)."""
    owners: list[Policy] = []
    for policy in policies:
        if all(identity_of(policy.config) != identity_of(other.config) for other in owners):
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


def identity_of(config: RecipeConfig) -> list[object]:
    """What is the same of two settings that are the same."""
    return [to_json(config.reward), judge_fields(config)]


def judge_fields(config: RecipeConfig) -> dict[str, object]:
    """A judge by its configuration alone, whatever its prompts say by now."""
    return judge_identity(config.judge, "-")


def judge_key(planned: Planned, policy: Policy, setting: Setting) -> str:
    """The judge of a setting on a policy's rollouts. A setting that changes nothing of the judge
    has the run's own one, as it was then; any other is as it is today."""
    same = judge_fields(policy.config) == judge_fields(setting.config)
    prompts = policy.sources.get("judge_prompt") if same else None
    identity = judge_identity(setting.judge, prompts)
    key = digest(identity)
    if key not in planned.judges:
        planned.judges[key] = JudgePlan(_judge_name(setting.config), setting.judge, identity)
    return key


def _read_recorded(planned: Planned, policy: Policy) -> None:
    """What is known of the policy's own judge."""
    questions = questions_under(planned, policy, policy.config.reward)
    batched = is_batched(policy.config.judge)
    found = recorded(policy.rollouts, questions, batched=batched)
    planned.recorded[policy.name] = found
    plan = planned.judges[judge_key(planned, policy, own_setting(policy.config))]
    for key, judgements in found.known.items():
        plan.known.setdefault(key, judgements)


def _note_questions(planned: Planned, policy: Policy, setting: Setting) -> None:
    """What a setting asks of its judge; a run's own settings have been asked already."""
    plan = planned.judges[judge_key(planned, policy, setting)]
    plan.config = setting.judge  # with the address that this call has given
    if identity_of(setting.config) == identity_of(policy.config):
        return
    for asked in questions_under(planned, policy, setting.reward):
        plan.need([question.request for question in asked])


def questions_under(
    planned: Planned, policy: Policy, reward: RewardConfig
) -> list[tuple[Question, ...]]:
    """Found once for all settings that ask the same."""
    which = json.dumps([getattr(reward, name) for name in _ASKS])
    if (policy.name, which) not in planned.questions:
        planned.questions[policy.name, which] = questions_of(policy.rollouts, reward)
    return planned.questions[policy.name, which]


def _judge_name(config: RecipeConfig) -> str:
    return "lexical" if config.judge.model == LEXICAL_MODELS[0] else config.judge.model


def baseline_of(planned: Planned, policy: Policy) -> str:
    """The setting that a policy's others are compared with: by default its run's own."""
    if planned.wanted.baseline != OWN:
        return planned.wanted.baseline
    own = (s.name for s in planned.settings if identity_of(s.config) == identity_of(policy.config))
    return next(own)
