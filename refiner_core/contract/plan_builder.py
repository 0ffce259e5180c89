"""Builds the stages of a plan, each on the earlier ones; see :mod:`refiner_core.contract.plan`.

In: a configuration, digests of sources, a memo. Out: stages with their fingerprints, in the order
of their addition, with judges' servers and ``fetch`` before the stages that need them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fingerprint import identity_values, stage_fingerprint
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.kinds.serving import JUDGE_WEIGHTS
from refiner_core.contract.monitoring import monitor_identity
from refiner_core.contract.planned import (
    HEALTH_CHECKS_OF,
    HUB_DIGEST,
    NAMED_BY_SOURCE,
    NOT_IN_A_STAGE,
    ONLY_OF_A_SERVED_JUDGE,
    ONLY_OF_THE_BEST,
    SHIPPED_OR_FILE,
    PlannedStage,
)
from refiner_core.contract.protocols import AT, all_under, configs_under, golds_under, under
from refiner_core.contract.services import (
    JUDGE_SERVICE,
    asks_judge,
    has_service,
    serves,
    service_identity,
)


class PlanBuilder:
    """Adds stages one by one; each sees the fingerprints of those before it.

    ``under`` has the configuration and the sources of each protocol file, those of the monitor
    included (empty name: the recipe's own). No stage under a protocol file depends on the run's
    seed. ``memo`` caches stages by all their inputs: plans of one sweep share most of them.
    """

    def __init__(
        self, config: RecipeConfig, sources: Mapping[str, str], memo: dict[Hashable, PlannedStage]
    ) -> None:
        self.config, self._memo, self._sources = config, memo, sources
        self.under = {"": (config, own_sources(sources))}
        self._protocols = ("", *configs_under(config))
        self._golds = tuple(golds_under(config))
        for name, measured in all_under(config).items():
            self.under[name] = (measured, sources_under(sources, name, measured))
        self.stages: dict[str, PlannedStage] = {}
        self._evaluations: dict[str, str] = {}
        self._servers: dict[str, PlannedStage] = {}

    def add(self, name: str, kind: str, inputs: Mapping[str, str], **more: Any) -> str:
        """Add a stage, and return its name. ``more``: ``model``, ``at_step``, ``after``,
        ``protocol`` of :class:`PlannedStage`."""
        self._put(self._stage(name, kind, inputs, **more))
        return name

    def _put(self, stage: PlannedStage) -> None:
        """Add a stage, with its judge's server before the first stage that uses it."""
        for server in self._servers_of(stage.kind, stage.protocol):
            self.stages.setdefault(server.name, server)
        self.stages[stage.name] = stage

    def _stage(
        self,
        name: str,
        kind: str,
        inputs: Mapping[str, str],
        *,
        model: str = "",
        at_step: Mapping[str, int] = MappingProxyType({}),
        after: tuple[str, ...] = (),
        protocol: str = "",
    ) -> PlannedStage:
        config, sources = self.under[protocol]
        of_kind = KINDS[kind]
        fields, needed = of_kind.reads(of_kind, config, inputs)
        section = getattr(config, of_kind.section)
        wanted = {k: sources[k] for k in needed if k in sources}
        fingerprints = {role: self.stages[n].fingerprint for role, n in inputs.items()}
        after = (*after, *(server.name for server in self._servers_of(kind, protocol)))
        after = ("fetch", *after) if self._hub_sources(kind, protocol, wanted) else after

        texts = (name, protocol, model, after, *inputs.items(), *at_step.items(), *wanted.items())
        values = attrgetter(of_kind.section, *fields)(config)
        judged = (config.judge.kind, config.environment.name, config.environment.nl_assertions)
        made_of = (texts, fields, values, judged, *sources, *fingerprints.values())
        if (known := self._memo.get(made_of)) is not None:
            return known
        identity = stage_values(config, sources, fields, name == "publish-best")
        identity |= {f"{role}.step": step for role, step in at_step.items()}
        if kind == "grpo":
            identity |= monitor_identity(config, self._sources)
        own = of_kind.version_of_agents if config.environment.name else None
        version = of_kind.version if own is None else own
        made = self._memo[made_of] = PlannedStage(
            name=name,
            kind=kind,
            fingerprint=stage_fingerprint(kind, version, identity, wanted, fingerprints),
            identity=identity,
            sources=wanted,
            inputs=dict(inputs),
            input_fingerprints=fingerprints,
            resources=section.resources,
            model=model,
            needs_network=of_kind.needs_network(self.config),
            after=after,
            at_step=dict(at_step),
            protocol=protocol,
            version=version,
        )
        return made

    def add_evaluations(self, model: str, weights: str) -> dict[str, str]:
        """Add an evaluation under each protocol: role (``evaluation-grpo-step50``) -> name; none
        if another protocol measures the same."""
        found = {}
        for protocol in self._protocols:
            inputs = {"data": self._add_data(protocol)} | ({"weights": weights} if weights else {})
            name = under(f"evaluate-{model}", protocol)
            stage = self._stage(name, "evaluate", inputs, protocol=protocol, model=model)
            if self._evaluations.setdefault(stage.id, name) == name:
                self._put(stage)
                found[under(f"evaluation-{model}", protocol)] = name
        return found

    def _add_data(self, protocol: str) -> str:
        """The stage with a protocol's held-out prompts."""
        if not protocol or not self.under[protocol][0].data.all_held_out:
            return "data"
        name = under("data", protocol)
        if name in self.stages:
            return name
        stage = self._stage(name, "data", {}, protocol=protocol)
        same = (s.name for s in self.stages.values() if s.id == stage.id)
        return next(same, None) or self.add(name, "data", {}, protocol=protocol)

    def _servers_of(self, kind: str, protocol: str) -> list[PlannedStage]:
        """The servers of a stage's judges; GRPO has those of its monitor, too."""
        asked = (protocol, *(self._golds if kind == "grpo" else ()))
        found = {s.id: s for name in asked if (s := self._server(kind, name)) is not None}
        return list(found.values())

    def _server(self, kind: str, protocol: str) -> PlannedStage | None:
        """The server of a stage's judge, if it is a job of its own."""
        config, _ = self.under[protocol]
        made = judge_service(config, protocol) if asks_judge(config, kind) else None
        if made is None:
            return None
        if self._hub_sources("serve", protocol, {}):
            made = replace(made, after=("fetch",))
        return self._servers.setdefault(made.id, made)

    def all_stages(self) -> tuple[PlannedStage, ...]:
        """The stages, with ``fetch`` before those that read sources on a Hub."""
        wanted: dict[str, str] = {}
        for stage in self.stages.values():
            wanted |= self._hub_sources(stage.kind, stage.protocol, stage.sources)
        if not wanted:
            return tuple(self.stages.values())
        wanted = dict(sorted(wanted.items()))
        version = KINDS["fetch"].version
        fetch = PlannedStage(
            name="fetch",
            kind="fetch",
            fingerprint=stage_fingerprint("fetch", version, {}, wanted, {}),
            sources=wanted,
            resources=replace(self.config.data.resources, gpus=0, nodes=1),
            needs_network=True,
            version=version,
        )
        return (fetch, *self.stages.values())

    def _hub_sources(self, kind: str, protocol: str, read: Mapping[str, str]) -> dict[str, str]:
        """Digests of the sources that a stage reads from a Hub; ``read``: all its sources."""
        config, sources = self.under[protocol]
        if not any(digest.startswith(HUB_DIGEST) for digest in sources.values()):
            return {}
        names = KINDS[kind].hub_reads
        if asks_judge(config, kind) and not has_service(config):
            names = (*names, JUDGE_WEIGHTS)  # of a server within the job
        if kind == "command" and "model" in read:
            names = ("model",)
        hub = {k: sources[k] for k in names if sources.get(k, "").startswith(HUB_DIGEST)}
        own = self.under[""][1]
        return {k if own.get(k) == v else under(k, protocol): v for k, v in hub.items()}


def stage_values(
    config: RecipeConfig, sources: Mapping[str, str], fields: tuple[str, ...], best: bool
) -> dict[str, Any]:
    """The identity fields among ``fields``; ``best``: of the stage that
    publishes the best checkpoint."""
    environment = config.environment
    # An agent with tools is judged by its environment; without one, its fields have no effect.
    mute: tuple[str, ...] = () if environment.name else ("environment.",)
    if environment.name and environment.nl_assertions != "judge":
        mute = ("reward.", "judge.")
    left_out = NOT_IN_A_STAGE + (() if best else ONLY_OF_THE_BEST)
    if config.judge.kind != "openai":
        left_out += ONLY_OF_A_SERVED_JUDGE
    return {
        path: value
        for path, value in identity_values(config, fields).items()
        if path not in left_out
        and not path.startswith(mute)
        and NAMED_BY_SOURCE.get(path) not in sources
        and not (SHIPPED_OR_FILE.get(path) in sources and "/" in str(value))
        and (".health." not in path or _decides_updates(config, path))
        and not path.startswith("monitor.")  # see monitor_identity
    }


def _decides_updates(config: RecipeConfig, path: str) -> bool:
    """Tell whether a field of a health check affects training: only a check that skips updates
    does. So a run stopped by a check can resume under another policy or limit."""
    section, _, name = path.partition(".health.")
    health = getattr(config, section).health
    checks = HEALTH_CHECKS_OF.get(name, (name,))
    return any(getattr(health, check) == "skip" for check in checks)


#: Sources that a protocol file may replace.
OF_A_PROTOCOL = ("data.rl", "rubrics", "judge_prompt", JUDGE_WEIGHTS)


def own_sources(sources: Mapping[str, str]) -> dict[str, str]:
    """The recipe's own sources in a plan."""
    return {k: v for k, v in sources.items() if AT not in k}


def sources_under(
    sources: Mapping[str, str], protocol: str, measured: RecipeConfig
) -> dict[str, str]:
    """The sources of a configuration under a protocol, by their plain names.

    Sources that are missing under the protocol's name are the recipe's: a protocol that measures
    like the recipe has no entries of its own.
    """
    reward = measured.reward
    needed = {
        "data.rl": True,
        "rubrics": "static" in reward.rubric_source and not reward.instance_rubrics_only,
        "judge_prompt": measured.judge.kind == "openai",
        JUDGE_WEIGHTS: serves(measured.judge),
    }
    found = {k: v for k, v in own_sources(sources).items() if needed.get(k, True)}
    if measured.data.sft_path is None:
        found.pop("data.sft", None)
    of_its_own = {k: sources[under(k, protocol)] for k in needed if under(k, protocol) in sources}
    return found | of_its_own


def judge_service(config: RecipeConfig, protocol: str = "") -> PlannedStage | None:
    """The stage that serves a configuration's judge; None if refiner starts no server for it, or
    starts it within the jobs that use it. ``protocol`` is the judge's protocol.

    Raises
    ------
    ConfigurationError
        The server would be open to others.
    """
    if not has_service(config):
        return None
    values, version = service_identity(config), KINDS["serve"].version
    return PlannedStage(
        name=under(JUDGE_SERVICE, protocol),
        kind="serve",
        fingerprint=stage_fingerprint("serve", version, values, {}, {}),
        identity=values,
        resources=config.judge.resources,
        protocol=protocol,
        version=version,
    )
