"""A judge, measured: from the words of a person to a report and its files.

In: a workspace, a run or none, overrides of `judge` and `reward`. Out: a
:class:`~refiner_core.judges.report.build.Report`, and ``report.md`` with ``report.json``. Past the
workspace's store: answers that are kept would repeat themselves for ever.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infra import atomic
from infra.workspace import Workspace
from refiner_core.contract.checks import check_config
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fingerprint import canonical_json
from refiner_core.contract.loading import apply_overrides
from refiner_core.contract.plan import judge_service
from refiner_core.contract.types import Endpoint, Judge, PromptRow
from refiner_core.judges.build import Surroundings, build_judge
from refiner_core.judges.report.build import Options, Report, judge_report
from refiner_core.judges.report.material import Material, run_material, shipped_material
from refiner_core.judges.report.text import markdown
from refiner_core.judges.store import MemoryStore

if TYPE_CHECKING:
    from flows.rescoring.reading import Policy
    from refiner_core.contract.records import RunRecord

#: Of a run, so many questions unless somebody says otherwise, with so many answers each.
QUESTIONS = 20
ANSWERS = 2
#: A person waits: a server that is gone is not waited for as long as a training would.
PATIENCE_S = 20.0

Endpoints = Callable[[], Sequence[Endpoint]]
REPORT, TEXT = "report.json", "report.md"


@dataclass(frozen=True)
class Wanted:
    """What was asked for. ``run`` None measures on the set that comes with refiner; ``sample`` is
    a number of questions; ``against`` overrides of a second judge, on top of ``overrides``."""

    workspace: Workspace
    run: RunRecord | None
    overrides: tuple[str, ...]
    against: tuple[str, ...] = ()
    sample: int | None = None
    repeats: int = 3


@dataclass(frozen=True)
class Made:
    """A report, and what it is called: the same question to the same judge has the same name."""

    name: str
    report: Report


def make_report(
    wanted: Wanted,
    told: Callable[[str, int], None],
    paused: Callable[[str], None] = lambda _: None,
) -> Made:
    """Measure.

    Parameters
    ----------
    told
        Hears what is asked next and how many questions that is.
    paused
        Hears in words that all servers are gone, and an empty text when one is back.

    Raises
    ------
    ConfigurationError
        A field, run or judge that does not fit.
    JudgeOutage
        Nobody answered.
    """
    config, material = _material(wanted)
    check_config(config)
    other = None
    if wanted.against:
        changed = apply_overrides(config, wanted.against)
        check_config(changed)
        other = changed.judge
    named = [material.name, str(wanted.sample), str(wanted.repeats)]
    with ExitStack() as servers:
        endpoints = functools.cache(functools.partial(_endpoints, wanted.workspace, servers))

        def make(judge: JudgeConfig) -> Judge:
            return _judge(judge, endpoints(judge), paused)

        report = judge_report(
            material,
            config.judge,
            make,
            against=other,
            options=Options(repeats=wanted.repeats, told=told),
        )
    identity = canonical_json([report.judge, report.against, named])
    return Made(hashlib.sha256(identity.encode()).hexdigest()[:12], report)


def write_report(made: Made, folder: Path) -> None:
    """``report.md`` and, last, ``report.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / TEXT, markdown(made.report) + "\n")
    text = json.dumps(made.report.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    atomic.write_text(folder / REPORT, text + "\n")


def judge_by_overrides(overrides: Sequence[str]) -> JudgeConfig:
    """The judge of a recipe that says nothing but this, checked.

    Raises
    ------
    ConfigurationError
        A field that does not fit.
    """
    config = apply_overrides(RecipeConfig(), overrides)
    check_config(config)
    return config.judge


# ---------------------------------------------------------------- material


def _material(wanted: Wanted) -> tuple[RecipeConfig, Material]:
    """The configuration to judge by, and what is judged."""
    if wanted.run is None:
        return apply_overrides(RecipeConfig(), wanted.overrides), shipped_material(wanted.sample)
    policies = _policies(wanted)
    config = apply_overrides(policies[0].config, wanted.overrides)
    answers = _answers(policies, wanted.sample or QUESTIONS)
    material = run_material(f"answers of run {wanted.run.run}", answers, config.reward)
    if not material.items:
        raise ConfigurationError(
            f"Run {wanted.run.run} has no answers that could be judged",
            expected="answers with a single answer block, and rubrics or evidence to judge them by",
            fix="name a later run, or none for the set that comes with refiner",
        )
    return config, material


def _policies(wanted: Wanted) -> list[Policy]:
    """Samples of evaluations, which no training has seen; else rollouts of the last step."""
    from flows.rescoring.reading import Part, read_policies

    assert wanted.run is not None
    try:
        return read_policies(wanted.workspace, [wanted.run], Part(source="evaluation"))
    except ConfigurationError:
        part = Part(source="rollouts", steps="last:1")
        return read_policies(wanted.workspace, [wanted.run], part)


def _answers(policies: Sequence[Policy], questions: int) -> Iterable[tuple[PromptRow, str]]:
    """Different answers to each of the first questions by a digest of their id, which is a draw
    that comes out the same each time."""
    found: dict[str, dict[str, PromptRow]] = {}
    for policy in policies:
        for rollout in policy.rollouts:
            if rollout.status != "malformed":
                answers = found.setdefault(rollout.prompt.sample_id, {})
                if len(answers) < ANSWERS:
                    answers.setdefault(rollout.text, rollout.prompt)
    drawn = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    for name in drawn[:questions]:
        for text, prompt in found[name].items():
            yield prompt, text


# ---------------------------------------------------------------- the judge


def _judge(
    config: JudgeConfig, endpoints: Endpoints | None, paused: Callable[[str], None]
) -> Judge:
    """A judge that knows nothing yet."""
    patience_s = min(config.outage_patience_s, PATIENCE_S)
    around = Surroundings(store=MemoryStore(), endpoints=endpoints, on_pause=paused)
    return build_judge(replace(config, outage_patience_s=patience_s), around)


def _endpoints(workspace: Workspace, servers: ExitStack, config: JudgeConfig) -> Endpoints | None:
    """Where a server is that refiner has started, which is then kept; None where it starts none.

    Raises
    ------
    ConfigurationError
        None of them runs.
    """
    service = judge_service(replace(RecipeConfig(), judge=config))
    if service is None or config.base_url or config.base_urls:
        return None
    from infra.services.leases import HeldLease, Lease, hand_holder
    from infra.services.registry import live_endpoints

    if not live_endpoints(workspace, service.id, config):
        raise ConfigurationError(
            f"No server of the judge {config.model} runs in {workspace.root}",
            expected="a server that a run has started (see `refiner judge servers`), or an address",
            fix="set judge.base_url to a server that answers, or start a run that needs this one",
        )
    lease = Lease(workspace.layout.service(service.id), hand_holder())
    servers.enter_context(HeldLease(lease))
    return functools.partial(live_endpoints, workspace, service.id, config)
