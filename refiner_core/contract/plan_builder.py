"""Makes the stages of a plan, one on the other; see :mod:`refiner_core.contract.plan`.

In: a configuration, digests of sources, a memo. Out: stages with their fingerprints, in the order
in which they were added, then with judges' servers and ``fetch`` before those that need them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fingerprint import (
    canonical_json,
    get_field,
    identity_values,
    stage_fingerprint,
)
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.kinds.serve import JUDGE_WEIGHTS
from refiner_core.contract.planned import (
    HEALTH_CHECKS_OF,
    HUB_DIGEST,
    NAMED_BY_SOURCE,
    NOT_IN_A_STAGE,
    ONLY_OF_A_SERVED_JUDGE,
    ONLY_OF_THE_BEST,
    SHIPPED_OR_FILE,
    PlanMemo,
    PlannedStage,
)
from refiner_core.contract.protocols import AT, configs_under, under
from refiner_core.contract.services import (
    JUDGE_SERVICE,
    asks_judge,
    has_service,
    serves,
    service_identity,
)


class Builder:
    """Adds stages one by one; each sees the fingerprints of those before it.

    ``under`` has, by protocol file (empty: the recipe's own), the configuration under it and its
    sources. No stage under a protocol file depends on the run's seed.
    """

    def __init__(self, config: RecipeConfig, sources: Mapping[str, str], memo: PlanMemo) -> None:
        self.config, self.memo = config, memo
        self.under = {"": (config, own_sources(sources))}
        if config.evaluate.protocols:
            self.under |= self._under(sources)
        self._numbers: dict[tuple[str, tuple[str, ...]], int] = {}
        self.stages: dict[str, PlannedStage] = {}
        self._evaluations: dict[str, str] = {}

    def _under(self, sources: Mapping[str, str]) -> dict[str, tuple[RecipeConfig, dict[str, str]]]:
        config = self.config
        sections = (config.model, config.data, config.sft, config.grpo, config.reward)
        others = (config.judge, config.publish, config.evaluate, config.dispatch)
        further = (config.sample, config.rft, config.environment)
        made_of = ("under", self.memo.number((*sections, *others, *further)), *sources.items())
        return self.memo.once(
            made_of,
            lambda: {
                name: (measured, sources_under(sources, name, measured))
                for name, measured in configs_under(config).items()
            },
        )

    def add(self, name: str, kind: str, inputs: Mapping[str, str], **more: Any) -> str:
        """Add a stage, and give its name. ``more``: ``model``, ``at_step``, ``after``, ``protocol``
        of :class:`PlannedStage`."""
        self.stages[name] = self._stage(name, kind, inputs, **more)
        return name

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
        parts, best = self._number(protocol, fields), name == "publish-best"
        steps = {f"{role}.step": step for role, step in at_step.items()}

        def identify() -> tuple[dict[str, Any], str]:
            values = self._identity(protocol, fields, best) | steps
            return values, canonical_json(values)

        def make() -> PlannedStage:
            identity, text = self.memo.once(("identity", parts, best, *steps.items()), identify)
            version = of_kind.version_for(agents=bool(config.environment.name))
            return PlannedStage(
                name=name,
                kind=kind,
                fingerprint=stage_fingerprint(
                    kind, version, identity, wanted, fingerprints, text=text
                ),
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

        named = (name, protocol, model, after, *inputs.items(), *at_step.items(), *wanted.items())
        execution = self.memo.number((section,))
        return self.memo.once((named, parts, execution, *fingerprints.values()), make)

    def _number(self, protocol: str, fields: tuple[str, ...]) -> int:
        """Of all that :meth:`_identity` goes by."""
        if (protocol, fields) not in self._numbers:
            config, sources = self.under[protocol]
            values = (get_field(config, field) for field in fields)
            parts = (*fields, *sources, config.judge.kind, config.environment, *values)
            self._numbers[protocol, fields] = self.memo.number(parts)
        return self._numbers[protocol, fields]

    def _identity(self, protocol: str, fields: tuple[str, ...], best: bool) -> dict[str, Any]:
        """Identity fields of a stage; ``best``: of the one that publishes the best checkpoint."""
        found: dict[str, Any] = {}
        for part in fields:
            made_of = ("part", self._number(protocol, (part,)), best)
            read = functools.partial(stage_values, *self.under[protocol], (part,), best)
            found |= self.memo.once(made_of, read)
        return found

    def add_evaluations(self, model: str, weights: str) -> dict[str, str]:
        """Add an evaluation under each protocol: role (``evaluation-grpo-step50``) -> name; none
        where another protocol measures the same."""
        found = {}
        for protocol in self.under:
            inputs = {"data": self._add_data(protocol)} | ({"weights": weights} if weights else {})
            name = under(f"evaluate-{model}", protocol)
            stage = self._stage(name, "evaluate", inputs, protocol=protocol, model=model)
            if self._evaluations.setdefault(stage.id, name) == name:
                self.stages[name] = stage
                found[under(f"evaluation-{model}", protocol)] = name
        return found

    def _add_data(self, protocol: str) -> str:
        """The stage whose held-out prompts a protocol measures on."""
        if not protocol or not self.under[protocol][0].data.all_held_out:
            return "data"
        name = under("data", protocol)
        if name not in self.stages:
            stage = self._stage(name, "data", {}, protocol=protocol)
            same = (s.name for s in self.stages.values() if s.id == stage.id)
            if (found := next(same, None)) is not None:
                return found
            self.stages[name] = stage
        return name

    def with_judges(self) -> dict[str, PlannedStage]:
        """The stages, with each judge's server before the first of those that ask it."""
        found: dict[str, PlannedStage] = {}
        servers: dict[str, PlannedStage] = {}
        for name, stage in self.stages.items():
            config, _ = self.under[stage.protocol]
            if asks_judge(config, stage.kind):
                parts = self.memo.number((config.judge, config.dispatch))
                make = functools.partial(judge_service, config, stage.protocol)
                service = self.memo.once(("serve", stage.protocol, parts), make)
                if service is not None:
                    service = servers.setdefault(service.id, service)
                    found.setdefault(service.name, service)
                    stage = self.memo.changed(stage, after=(*stage.after, service.name))
            found[name] = stage
        return found

    def with_fetch(self) -> tuple[PlannedStage, ...]:
        """The stages, with ``fetch`` before those that read what lies on a Hub."""
        everywhere = (d for _, sources in self.under.values() for d in sources.values())
        if not any(digest.startswith(HUB_DIGEST) for digest in everywhere):
            return tuple(self.stages.values())
        reads = {name: self._hub_sources(stage) for name, stage in self.stages.items()}
        wanted = {k: digest for found in reads.values() for k, digest in found.items()}
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
        others = (
            self.memo.changed(stage, after=("fetch", *stage.after)) if reads[name] else stage
            for name, stage in self.stages.items()
        )
        return (fetch, *others)

    def _hub_sources(self, stage: PlannedStage) -> dict[str, str]:
        """Give what it reads of a Hub: digests by source."""
        config, sources = self.under[stage.protocol]
        names = KINDS[stage.kind].hub_reads
        if asks_judge(config, stage.kind) and not has_service(config):
            names = (*names, JUDGE_WEIGHTS)  # of a server beside it
        if stage.kind == "command" and "model" in stage.sources:
            names = ("model",)
        hub = {k: sources[k] for k in names if sources.get(k, "").startswith(HUB_DIGEST)}
        own = {k for k, digest in hub.items() if self.under[""][1].get(k) != digest}
        return {under(k, stage.protocol) if k in own else k: v for k, v in hub.items()}


def stage_values(
    config: RecipeConfig, sources: Mapping[str, str], fields: tuple[str, ...], best: bool
) -> dict[str, Any]:
    """The identity fields among ``fields``; see :meth:`Builder._identity`."""
    return {
        path: value
        for path, value in identity_values(config, fields).items()
        if path not in NOT_IN_A_STAGE
        and NAMED_BY_SOURCE.get(path) not in sources
        and not ("/" in str(value) and SHIPPED_OR_FILE.get(path) in sources)
        and (best or path not in ONLY_OF_THE_BEST)
        and (config.judge.kind == "openai" or path not in ONLY_OF_A_SERVED_JUDGE)
        and (".health." not in path or _decides_updates(config, path))
        and _has_a_say(config, path)
    }


def _has_a_say(config: RecipeConfig, path: str) -> bool:
    """Whether a field means anything in a recipe of its kind: an agent with tools is judged by its
    environment, and who has none is not."""
    environment, part = config.environment, path.partition(".")[0]
    if part == "environment":
        return bool(environment.name)
    if part in ("reward", "judge"):
        return not environment.name or environment.nl_assertions == "judge"
    return True


def _decides_updates(config: RecipeConfig, path: str) -> bool:
    """Say whether a field of a health check has a say in what is trained: only a check that skips
    updates has. So a run that a check has stopped goes on under another policy or limit."""
    section, _, name = path.partition(".health.")
    health = getattr(config, section).health
    checks = HEALTH_CHECKS_OF.get(name, (name,))
    return any(getattr(health, check) == "skip" for check in checks)


#: Sources that a protocol file may have of its own.
OF_A_PROTOCOL = ("data.rl", "rubrics", "judge_prompt", JUDGE_WEIGHTS)


def own_sources(sources: Mapping[str, str]) -> dict[str, str]:
    """The recipe's own among the sources of a plan."""
    return {k: v for k, v in sources.items() if AT not in k}


def sources_under(
    sources: Mapping[str, str], protocol: str, measured: RecipeConfig
) -> dict[str, str]:
    """The sources of a configuration under a protocol, by their plain names.

    What is not there under the protocol's name is the recipe's: a protocol that measures as the
    recipe does has left no record of its own.
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
    """The stage that serves a configuration's judge; None where refiner starts no server for it, or
    starts it within the jobs that ask it. ``protocol`` names whose judge it is.

    Raises
    ------
    ConfigurationError
        The server would be open to strangers.
    """
    if not has_service(config):
        return None
    values = service_identity(config)
    return PlannedStage(
        name=under(JUDGE_SERVICE, protocol),
        kind="serve",
        fingerprint=stage_fingerprint("serve", KINDS["serve"].version, values, {}, {}),
        identity=values,
        resources=config.judge.resources,
        protocol=protocol,
        version=KINDS["serve"].version,
    )
