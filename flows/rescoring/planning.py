"""Settings to rescore under, and what a rescoring would ask; asks nothing and writes nothing.

::

    rollouts ─> settings ─> questions of each ─ less what is stored with them ─> plan per judge

In: what is wanted. Out: a :class:`Planned` rescoring. Every option (``--judge``,
``--rubrics``, ``--citation-weight``) is a :class:`Setting` of its own, or with ``cross`` every
combination of them; ``KEY=VALUE`` apply to all, and are a setting of their own where there is no
other.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

from flows.rescoring.asking import JudgePlan, Prices
from flows.rescoring.reading import Part, Policy, read_policies
from flows.running.status import find_run
from flows.stages.judging import stored
from infra.host.secrets import mask_keys_of
from infra.store.workspace import Workspace
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import LEXICAL_MODELS, JudgeConfig, RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError, no_such
from refiner_core.contract.files import yaml_fields
from refiner_core.contract.fingerprint import digest
from refiner_core.contract.loading import apply_overrides, parse_config
from refiner_core.contract.marks import walk
from refiner_core.contract.recipes import settled
from refiner_core.contract.records import RunRecord, to_json
from refiner_core.contract.types import Judgement
from refiner_core.judges import judge_prompts_digest
from refiner_core.rescoring.compare import common_prompts
from refiner_core.rescoring.rollouts import (
    Key,
    Metric,
    Question,
    is_batched,
    judge_identity,
    questions_of,
    recorded,
)
from refiner_core.rubrics import load_rubric_set, rubric_set_digest

OWN = "own"
AGAIN = "own, again"
_PAIRS = re.compile(r",(?=\s*[a-z_]+(?:\.[a-z_]+)*=)")
_EXECUTION = frozenset(path for path, info in walk(JudgeConfig) if info.mark == "execution")


class Setting(NamedTuple):
    """Rewards and a judge under a name."""

    name: str
    config: RecipeConfig


@dataclass(frozen=True)
class Options:
    """Options of the call."""

    judges: tuple[str, ...] = ()
    rubrics: tuple[str, ...] = ()
    citation_weights: tuple[float, ...] = ()
    overrides: tuple[str, ...] = ()
    cross: bool = False


def own_setting(config: RecipeConfig, overrides: Sequence[str] = (), name: str = OWN) -> Setting:
    """A run's own settings; of the overrides only those that say where or how its judge is asked
    have a part in them."""
    return Setting(name, apply_overrides(config, [o for o in overrides if _says_where(o)]))


def make_settings(base: RecipeConfig, options: Options) -> list[Setting]:
    """The settings that the options ask for, over ``base``.

    Raises
    ------
    ConfigurationError
        A judge, a rubric set, a weight or a key cannot be meant.
    """
    for override in options.overrides:
        if not override.startswith(("reward.", "judge.")):
            raise ConfigurationError(
                f"`refiner rescore` does not know {override!r}.",
                expected="runs, workspace=DIR, and fields of `reward` and `judge` as KEY=VALUE",
                fix="leave it out, or correct it",
            )
    factors: list[list[tuple[str, Any]]] = [
        [("judge", spec) for spec in options.judges],
        [("rubrics", name) for name in options.rubrics],
        [("citation_weight", weight) for weight in options.citation_weights],
    ]
    changes = [(change,) for factor in factors for change in factor]
    if options.cross and changes:
        changes = list(product(*(factor for factor in factors if factor)))  # type: ignore[arg-type]
    if not changes and any(not _says_where(o) for o in options.overrides):
        return [_setting(base, (), options.overrides)]
    made = [_setting(base, change, options.overrides) for change in changes]
    again = Counter[str]()
    for place, setting in enumerate(made):  # no two of one name
        again[setting.name] += 1
        if (number := again[setting.name]) > 1:
            made[place] = setting._replace(name=f"{setting.name} #{number}")
    return made


def _says_where(override: str) -> bool:
    """Yes for one that says where or how a judge is asked, and not what is asked."""
    return override.partition("=")[0].removeprefix("judge.") in _EXECUTION


def _setting(
    base: RecipeConfig, change: Sequence[tuple[str, Any]], overrides: Sequence[str]
) -> Setting:
    config, names = base, []
    for kind, value in change:
        if kind == "judge":
            name, judge = judge_of(str(value), config)
            config = replace(config, judge=judge)
        elif kind == "rubrics":
            name, config = str(value), replace(config, reward=rubrics_of(str(value), config.reward))
        else:
            name = f"{value:g}"
            fields = {"paper_citation_weight": value, "apply_paper_citation_reward": True}
            config = replace(config, reward=replace(config.reward, **fields))
        is_file = kind == "rubrics" and name.endswith((".yaml", ".yml"))
        names.append(f"{kind}={Path(name).stem if is_file else name}")
    names += [o for o in overrides if not _says_where(o)]
    config = check_config(apply_overrides(config, list(overrides)))
    mask_keys_of(config)
    if "static" in config.reward.rubric_source and not config.reward.instance_rubrics_only:
        load_rubric_set(config.reward.static_rubrics)
    return Setting(", ".join(names), config)


def rubrics_of(name: str, reward: RewardConfig) -> RewardConfig:
    """The reward with another rubric set, or with ``instance`` or ``none``.

    A run that had instance rubrics keeps them beside the set; ``static:SET`` uses the set alone,
    ``instance+SET`` both.
    """
    if name in ("instance", "none"):
        source: Any = name
        return replace(reward, rubric_source=source, instance_rubrics_only=False)
    source = "static" if reward.rubric_source in ("static", "none") else "instance+static"
    for prefix, meant in (("static:", "static"), ("instance+", "instance+static")):
        if name.startswith(prefix):
            name, source = name.removeprefix(prefix), meant
    load_rubric_set(name)
    return replace(reward, static_rubrics=name, rubric_source=source, instance_rubrics_only=False)


def judge_of(spec: str, base: RecipeConfig) -> tuple[str, JudgeConfig]:
    """A judge by ``lexical``, a YAML file, or ``key=value`` pairs over the run's own judge; and its
    name.

    Raises
    ------
    ConfigurationError
        It is none of these.
    """
    if spec == "lexical":
        return "lexical", replace(JudgeConfig(), max_failed_share=base.judge.max_failed_share)
    path = Path(spec).expanduser()
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path.stem, _from_file(path)
    pairs = [pair.strip() for pair in _PAIRS.split(spec)]
    if not all("=" in pair for pair in pairs):
        raise ConfigurationError(
            f"--judge {spec} is not understood.",
            expected="`lexical`, a YAML file with a section `judge`, or pairs such as "
            "model=NAME,base_url=http://127.0.0.1:8000/v1",
            fix="write it in one of these ways",
        )
    given = dict(pair.removeprefix("judge.").split("=", 1) for pair in pairs)
    if "kind" not in given and ({"model", "base_url"} & given.keys()):
        given = {"kind": "openai", **given}
    start = base
    if given.get("kind", base.judge.kind) != base.judge.kind:
        start = replace(base, judge=JudgeConfig())
    elif given.get("model", base.judge.model) != base.judge.model:
        start = replace(base, judge=replace(base.judge, revision=None))
    judge = apply_overrides(start, [f"judge.{k}={v}" for k, v in given.items()]).judge
    return _name_given(given), judge


def _name_given(given: Mapping[str, str]) -> str:
    """The model, and whatever else is no matter of where or how it is asked."""
    rest = [f"{k}={v}" for k, v in given.items() if k not in {*_EXECUTION, "kind", "model"}]
    model = [given["model"].rpartition("/")[2]] if "model" in given else []
    return ",".join(model + rest) or given.get("kind", "own")


def _from_file(path: Path) -> JudgeConfig:
    example = "judge: {kind: openai, model: NAME, base_url: URL}"
    values = yaml_fields(path, f"The judge {path}", example, resolve=False)
    from omegaconf import OmegaConf

    node = settled(OmegaConf.create({"judge": values.get("judge", values)}), path.parent)
    plain = cast(dict[str, Any], OmegaConf.to_container(node))
    return parse_config(plain, origin=path.name).judge


#: Of the reward, what decides which questions are asked.
_ASKS = ("rubric_source", "static_rubrics", "instance_rubrics_only")
#: What a run's rollouts are scored by is seen at a glance up to so many steps back.
LAST_STEPS = "last:5"
#: Who writes into the workspace's store of judgements.
WRITER = "rescore"


@dataclass
class Planned:
    """What is wanted, and the work that it takes. ``questions`` are by policy and kind of
    questions; ``recorded``, the judgements stored with the rollouts, and ``unused``, how many of
    these nobody asks for any more, by policy."""

    workspace: Workspace
    runs: tuple[RunRecord, ...]
    options: Options
    part: Part
    baseline: str = OWN
    metric: Metric = "total"
    common: bool = False
    prices: Prices = (None, None)
    policies: list[Policy] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    judges: dict[str, JudgePlan] = field(default_factory=dict)
    questions: dict[tuple[str, str], list[tuple[Question, ...]]] = field(default_factory=dict)
    recorded: dict[str, Mapping[Key, Sequence[Judgement]]] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)

    @property
    def new_calls(self) -> int:
        """Calls of servers that it would take."""
        return sum(plan.calls for plan in self.judges.values())

    @property
    def short_id(self) -> str:
        """Of what was asked: the same question has the same id."""
        asked = {
            "policies": [[p.stage_id, p.name, len(p.rollouts), p.steps] for p in self.policies],
            "part": to_json(self.part),
            "settings": [
                [s.name, *identity_of(s.config), _rubrics(s.config.reward)] for s in self.settings
            ],
            "judges": sorted(self.judges),
            "baseline": self.baseline,
            "metric": self.metric,
            "common": self.common,
        }
        return digest(asked)[:10]

    def judge_key(self, policy: Policy, setting: Setting) -> str:
        """The judge of a setting on a policy's rollouts. A setting that changes nothing of the
        judge has the run's own one, as it was then; any other is as it is today."""
        same = judge_fields(policy.config) == judge_fields(setting.config)
        prompts = policy.sources.get("judge_prompt") if same else None
        judge = setting.config.judge
        identity = judge_identity(judge, prompts)
        key = digest(identity)
        if key not in self.judges:
            name = "lexical" if judge.model == LEXICAL_MODELS[0] else judge.model
            self.judges[key] = JudgePlan(name, judge, identity)
        return key

    def questions_under(self, policy: Policy, reward: RewardConfig) -> list[tuple[Question, ...]]:
        """Found once for all settings that ask the same."""
        which = json.dumps([getattr(reward, name) for name in _ASKS])
        if (policy.name, which) not in self.questions:
            self.questions[policy.name, which] = questions_of(policy.rollouts, reward)
        return self.questions[policy.name, which]

    def baseline_of(self, policy: Policy) -> str:
        """The setting that a policy's others are compared with: by default its run's own."""
        if self.baseline != OWN:
            return self.baseline
        own = (s.name for s in self.settings if identity_of(s.config) == identity_of(policy.config))
        return next(own)


def _rubrics(reward: RewardConfig) -> str | None:
    """Digest of the set that a setting names: a file may be edited."""
    static = "static" in reward.rubric_source and not reward.instance_rubrics_only
    return rubric_set_digest(reward.static_rubrics) if static else None


def plan_rescoring(
    runs: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    options: Options | None = None,
    part: Part | None = None,
    steps: str | None = None,
    prices: Prices | None = None,
    **more: Any,
) -> Planned:
    """What scoring stored rollouts again would take. Asks no judge and writes nothing.

    Parameters
    ----------
    runs
        Which ones (default: the newest).
    workspace
        The folder that they are recorded in.
    options
        Judges, rubrics, weights and overrides (:class:`flows.rescoring.planning.Options`).
    part
        Which rollouts or samples (:class:`flows.rescoring.reading.Part`).
    steps
        ``all``, ``last:5`` or ``40-50`` (default: all, or the last few of several runs).
    prices
        Of a million tokens that judges read, and that they write.
    **more
        ``baseline``, ``metric`` and ``common`` of :class:`flows.rescoring.planning.Planned`.

    Returns
    -------
    Planned
        ``new_calls`` says how often judges would be asked.

    Raises
    ------
    ConfigurationError, DataError, WorkspaceError
        Something that was asked for is not there, or cannot be meant.
    """
    room = Workspace.read_only(workspace)
    # A publication by hand is a run as well, and has no rollouts.
    trains = "" if part is not None and part.source != "rollouts" else "grpo"
    found = [find_run(room, name) for name in runs] or [find_run(room, stage=trains)]
    wanted = tuple({run.run: run for run in found if run is not None}.values())
    if not wanted:
        raise ConfigurationError(
            f"{room.root} has no runs.",
            expected="a workspace in which something was trained",
            fix="name another one with workspace=DIR",
        )
    default = "all" if len(wanted) == 1 else LAST_STEPS
    part = replace(part or Part(), steps=steps or default)
    prices = prices or (None, None)
    planned = Planned(room, wanted, options or Options(), part, prices=prices, **more)
    _fill(planned)
    return planned


def _fill(planned: Planned) -> None:
    policies = read_policies(planned.workspace, planned.runs, planned.part)
    if len(policies) > 1:
        common = common_prompts({p.name: p.rollouts for p in policies}, restrict=planned.common)
        policies = [replace(p, rollouts=tuple(common[p.name])) for p in policies]
    planned.policies, planned.settings = policies, _settings(policies, planned)
    for policy in policies:
        questions = planned.questions_under(policy, policy.config.reward)
        batched = is_batched(policy.config.judge)
        known, planned.unused[policy.name] = recorded(policy.rollouts, questions, batched=batched)
        planned.recorded[policy.name] = known
        own = planned.judges[planned.judge_key(policy, own_setting(policy.config))]
        own.known = {**known, **own.known}
    for setting, policy in product(planned.settings, policies):
        plan = planned.judges[planned.judge_key(policy, setting)]
        plan.config = setting.config.judge  # with the address that this call has given
        # A run's own settings have been asked already.
        if identity_of(setting.config) != identity_of(policy.config):
            asked = planned.questions_under(policy, setting.config.reward)
            plan.need([request for questions in asked for request, _ in questions])
    for plan in planned.judges.values():
        if plan.served and plan.open:
            _check_prompts(plan)
            with stored(plan.config, planned.workspace, WRITER) as store:
                plan.count(store)


def _check_prompts(plan: JudgePlan) -> None:
    """Refuse to ask in other words than those in which the same judge was asked before."""
    judge, then = plan.config, str(plan.identity["prompt_digest"])
    now = judge_prompts_digest(judge.prompt, judge.form)
    if now == then:
        return
    raise ConfigurationError(
        f"The judge's prompts {judge.prompt} have changed since the run ({then[:12]} then, "
        f"{now[:12]} now), and {plan.open} questions have not been asked with the old ones",
        expected="one wording for all that a judge is asked",
        fix="put them back as they were; or copy the new ones to a folder of another name, and "
        "name it with --judge prompt=DIR, which asks everything anew",
    )


def _settings(policies: Sequence[Policy], wanted: Planned) -> list[Setting]:
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
        fix = "name one of these with --baseline"
        raise no_such("To compare with, there is no setting", wanted.baseline, names, fix)
    return settings


def identity_of(config: RecipeConfig) -> list[object]:
    """Values that two settings share if they are the same."""
    return [to_json(config.reward), judge_fields(config)]


def judge_fields(config: RecipeConfig) -> dict[str, object]:
    """A judge by its configuration alone, whatever its prompts say by now."""
    return judge_identity(config.judge, "-")
