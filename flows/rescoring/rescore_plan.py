"""Settings of a rescoring, and the questions that it would ask; asks nothing and writes nothing.

::

    rollouts ─> settings ─> questions of each ─ less stored judgements ─> plan per judge

In: the options. Out: a :class:`RescorePlan` rescoring. Every option (``--judge``, ``--rubrics``,
``--citation-weight``) is a :class:`RewardSetting` of its own, or with ``cross`` every combination
of them; ``KEY=VALUE`` apply to all, and are a setting of their own if there is no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

from flows.rescoring.reading import RolloutSelection, SampledPolicy, read_policies
from flows.running.status import required_run
from flows.stages.judging import stored
from infra.host.secrets import mask_keys_of
from infra.store.workspace import Workspace
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import LEXICAL_MODELS, JudgeConfig, RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.files import yaml_fields
from refiner_core.contract.fingerprint import canonical_json, digest
from refiner_core.contract.loading import apply_overrides, parse_config
from refiner_core.contract.marks import walk
from refiner_core.contract.recipes import settled
from refiner_core.contract.records import to_json
from refiner_core.contract.types import Judgement, JudgeRequest
from refiner_core.judge_report.material import is_batched
from refiner_core.judges import judge_prompts_digest
from refiner_core.judges.calls import ChatCall, plan_calls
from refiner_core.rescoring.rollouts import (
    Metric,
    Question,
    common_prompts,
    items_of,
    judge_identity,
    questions_of,
    recorded,
)
from refiner_core.rubrics import load_rubric_set

OWN = "own"
AGAIN = "own, again"
_PAIRS = re.compile(r",(?=\s*[a-z_]+(?:\.[a-z_]+)*=)")
_EXECUTION = frozenset(path for path, info in walk(JudgeConfig) if info.mark == "execution")


class RewardSetting(NamedTuple):
    """A reward and a judge, with a name."""

    name: str
    config: RecipeConfig


@dataclass(frozen=True)
class RescoreOptions:
    """Options of the command."""

    judges: tuple[str, ...] = ()
    rubrics: tuple[str, ...] = ()
    citation_weights: tuple[float, ...] = ()
    overrides: tuple[str, ...] = ()
    cross: bool = False


def own_setting(
    config: RecipeConfig, overrides: Sequence[str] = (), name: str = OWN
) -> RewardSetting:
    """A run's own settings; of the overrides only those on where or how its judge is asked
    apply."""
    return RewardSetting(name, apply_overrides(config, [o for o in overrides if _says_where(o)]))


def make_settings(base: RecipeConfig, options: RescoreOptions) -> list[RewardSetting]:
    """The settings of the options, based on ``base``.

    Raises
    ------
    ConfigurationError
        A judge, a rubric set, a weight or a key is invalid.
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
    return [_setting(base, change, options.overrides) for change in changes]


def _says_where(override: str) -> bool:
    """True for an override on where or how a judge is asked, not on what is asked."""
    return override.partition("=")[0].removeprefix("judge.") in _EXECUTION


def _setting(
    base: RecipeConfig, change: Sequence[tuple[str, Any]], overrides: Sequence[str]
) -> RewardSetting:
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
    return RewardSetting(", ".join(names), config)


def rubrics_of(name: str, reward: RewardConfig) -> RewardConfig:
    """The reward with another rubric set, or with ``instance`` or ``none``.

    A run that had instance rubrics keeps them beside the set; ``static:SET`` uses the set alone.
    """
    source: Any = name
    if name not in ("instance", "none"):
        alone = name.startswith("static:") or "instance" not in reward.rubric_source
        name, source = name.removeprefix("static:"), "static" if alone else "instance+static"
        load_rubric_set(name)
        reward = replace(reward, static_rubrics=name)
    return replace(reward, rubric_source=source, instance_rubrics_only=False)


def judge_of(spec: str, base: RecipeConfig) -> tuple[str, JudgeConfig]:
    """A judge from ``lexical``, a YAML file, or ``key=value`` pairs over the run's own judge; and
    its
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
    return _named(given), judge


def _named(given: Mapping[str, str]) -> str:
    """The model, and all other settings except those on where or how it is asked."""
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


#: Fields of the reward that decide which questions are asked.
_ASKS = ("rubric_source", "static_rubrics", "instance_rubrics_only")
#: Number of last steps that identify what a run's rollouts were scored by.
LAST_STEPS = "last:5"
#: Writer id in the workspace's store of judgements.
WRITER = "rescore"


@dataclass(eq=False)
class JudgePlan:
    """One judge, and its questions under all settings.

    ``known`` are the judgements stored with rollouts that this judge has judged. They answer
    ``reused`` of the questions, and ``unknown`` are the others; of their ``calls``, ``missing`` are
    not in the workspace's store (none for a judge without a server).
    """

    name: str
    config: JudgeConfig
    identity: Mapping[str, Any]
    known: dict[JudgeRequest, Judgement] = field(default_factory=dict)
    reused: set[JudgeRequest] = field(default_factory=set)
    unknown: set[JudgeRequest] = field(default_factory=set)
    calls: dict[tuple[bytes, ...], ChatCall] = field(default_factory=dict)
    missing: list[ChatCall] = field(default_factory=list)

    @property
    def served(self) -> bool:
        """True if asking it takes calls."""
        return self.config.kind != "lexical"

    @property
    def asked(self) -> int:
        """Number of questions that it has to answer."""
        if not self.served:
            return len(self.unknown)
        return len({request for call in self.missing for request in call.requests})

    def need(
        self, requests: Iterable[JudgeRequest], known: Mapping[JudgeRequest, Judgement]
    ) -> None:
        """Add the questions on a policy's rollouts under one setting."""
        new = dict.fromkeys(request for request in requests if request not in known)
        self.reused.update(request for request in requests if request in known)
        self.unknown.update(new)
        if new and self.served:
            self.calls |= {call.keys: call for call in plan_calls(list(new), self.config)}

    def figures(self) -> dict[str, Any]:
        """Counts of questions and calls."""
        return {
            **{"judge": self.name, "identity": self.identity},
            **{"questions": len(self.reused | self.unknown), "reused": len(self.reused)},
            "stored": len(self.unknown) - self.asked,
            **{"asked": self.asked, "calls": len(self.missing)},
        }


@dataclass
class RescorePlan:
    """The settings, and the work that they take. ``questions`` are by policy and kind of question;
    ``recorded`` are the judgements stored with the rollouts, by policy."""

    workspace: Workspace
    options: RescoreOptions
    part: RolloutSelection
    metric: Metric
    policies: list[SampledPolicy]
    settings: list[RewardSetting]
    judges: dict[str, JudgePlan] = field(default_factory=dict)
    questions: dict[tuple[str, str], list[tuple[Question, ...]]] = field(default_factory=dict)
    recorded: dict[str, Mapping[JudgeRequest, Judgement]] = field(default_factory=dict)

    @property
    def new_calls(self) -> int:
        """Number of calls of servers that it would take."""
        return sum(len(plan.missing) for plan in self.judges.values())

    def judge_of(self, policy: SampledPolicy, config: RecipeConfig) -> JudgePlan:
        """The judge of a setting on a policy's rollouts. A setting that does not change the judge
        has the run's own one, as it was then; any other is the current one."""
        same = judge_fields(policy.config) == judge_fields(config)
        judge = config.judge
        identity = judge_identity(judge, policy.sources.get("judge_prompt") if same else None)
        name = "lexical" if judge.model == LEXICAL_MODELS[0] else judge.model
        return self.judges.setdefault(digest(identity), JudgePlan(name, judge, identity))

    def known(
        self, policy: SampledPolicy, config: RecipeConfig
    ) -> Mapping[JudgeRequest, Judgement]:
        """Stored judgements for a setting's questions. A judge that is asked about all rubrics of
        an answer at once may judge differently in another combination."""
        plan = self.judge_of(policy, config)
        batched, other = is_batched(config.judge), _asks(config) != _asks(policy.config)
        return {} if batched and other else plan.known

    def questions_under(
        self, policy: SampledPolicy, config: RecipeConfig
    ) -> list[tuple[Question, ...]]:
        """Questions, computed once for all settings that ask the same."""
        key = policy.name, _asks(config)
        if key not in self.questions:
            self.questions[key] = questions_of(items_of(policy.rollouts), config.reward)
        return self.questions[key]

    def baseline_of(self, policy: SampledPolicy) -> str:
        """The reference setting of a policy: its run's own."""
        own = (s.name for s in self.settings if identity_of(s.config) == identity_of(policy.config))
        return next(own)


def _asks(config: RecipeConfig) -> str:
    return json.dumps([getattr(config.reward, name) for name in _ASKS])


def plan_rescoring(
    runs: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    options: RescoreOptions | None = None,
    part: RolloutSelection | None = None,
    steps: str | None = None,
    metric: Metric = "total",
) -> RescorePlan:
    """Plan a rescoring of stored rollouts. Asks no judge and writes nothing.

    Parameters
    ----------
    runs
        Run ids (default: the newest).
    workspace
        The folder that has their records.
    options
        Judges, rubrics, weights and overrides
        (:class:`flows.rescoring.rescore_plan.RescoreOptions`).
    part
        Selection of rollouts or samples (:class:`flows.rescoring.reading.RolloutSelection`).
    steps
        ``all``, ``last:5`` or ``40-50`` (default: all, or the last few of several runs).
    metric
        Metric of the judge x policy matrix of several runs: ``total``, ``rubric``, ``citation``.

    Returns
    -------
    RescorePlan
        ``new_calls`` is the number of judge calls.

    Raises
    ------
    ConfigurationError, DataError, WorkspaceError
        A run, setting or file does not exist, or is invalid.
    """
    ws = Workspace.read_only(workspace)
    # A publication by hand is a run as well, but has no rollouts.
    trains = "" if part is not None and part.source != "rollouts" else "grpo"
    what = "a workspace in which something was trained"
    names: Sequence[str | None] = runs or [None]
    found = [required_run(ws, name, what, stage=trains) for name in names]
    wanted = tuple({run.run: run for run in found}.values())
    part = replace(
        part or RolloutSelection(), steps=steps or ("all" if len(wanted) == 1 else LAST_STEPS)
    )
    options = options or RescoreOptions()
    policies = read_policies(ws, wanted, part)
    if len(policies) > 1:
        common = common_prompts({p.name: p.rollouts for p in policies})
        policies = [replace(p, rollouts=tuple(common[p.name])) for p in policies]
    planned = RescorePlan(ws, options, part, metric, policies, _settings(policies, options))
    for policy in policies:
        questions = planned.questions_under(policy, policy.config)
        known = planned.recorded[policy.name] = recorded(policy.rollouts, questions)
        planned.judge_of(policy, policy.config).known.update(known)
    for setting, policy in product(planned.settings, policies):
        plan = planned.judge_of(policy, setting.config)
        plan.config = setting.config.judge  # with the address of this call
        # A run's own settings have already been asked.
        if identity_of(setting.config) != identity_of(policy.config):
            asked = planned.questions_under(policy, setting.config)
            requests = [request for questions in asked for request, _ in questions]
            plan.need(requests, planned.known(policy, setting.config))
    for plan in planned.judges.values():
        if plan.calls:
            _check_prompts(plan)
            with stored(plan.config, ws, WRITER) as store:
                for call in plan.calls.values():
                    if store is None or None in store.get(call.keys):
                        plan.missing.append(call)
    return planned


def _check_prompts(plan: JudgePlan) -> None:
    """Refuse other prompts than those with which the same judge was asked before."""
    judge, then = plan.config, str(plan.identity["prompt_digest"])
    now = judge_prompts_digest(judge.prompt, judge.form)
    if now == then:
        return
    raise ConfigurationError(
        f"The judge's prompts {judge.prompt} have changed since the run ({then[:12]} then, "
        f"{now[:12]} now), and {len(plan.unknown)} questions were not asked with the old ones",
        expected="the same prompts for all questions to a judge",
        fix="put them back as they were; or copy the new ones to a folder of another name, and "
        "name it with --judge prompt=DIR, which asks everything again",
    )


def _settings(policies: Sequence[SampledPolicy], options: RescoreOptions) -> list[RewardSetting]:
    """The runs' own settings, each once, then those of the options (over the first run's)."""
    owners = {canonical_json(identity_of(p.config)): p for p in reversed(policies)}
    own = [
        own_setting(p.config, options.overrides, OWN if len(owners) == 1 else f"{OWN} of {p.run}")
        for p in reversed(owners.values())
    ]
    settings: dict[str, RewardSetting] = {}
    for setting in (*own, *make_settings(policies[0].config, options)):
        name = setting.name
        while name in settings:  # such as two files of the same name
            name += " (another)"
        settings[name] = setting._replace(name=name)
    return list(settings.values())


def identity_of(config: RecipeConfig) -> list[object]:
    """Values that are equal for equal settings."""
    return [to_json(config.reward), judge_fields(config)]


def judge_fields(config: RecipeConfig) -> dict[str, object]:
    """A judge by its configuration alone, whatever its prompts are now."""
    return judge_identity(config.judge, "-")
