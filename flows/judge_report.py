"""A judge, measured or asked by hand: from the words of a person to a report, or to one answer.

In: a workspace, a run or none, overrides of `judge` and `reward`. Out: a
:class:`~refiner_core.judge_report.build.Report`, and ``report.md`` with ``report.json``; or an
:class:`Asked`. Past the workspace's store: answers that are kept would repeat themselves for ever.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows.stages.judging import Endpoints, endpoints_by_hand
from infra.host.secrets import mask_keys_of
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fingerprint import canonical_json
from refiner_core.contract.loading import apply_overrides
from refiner_core.contract.types import (
    Judge,
    Judgement,
    JudgeRequest,
    JudgeUsage,
    PromptRow,
)
from refiner_core.judge_report.build import Options, Report, judge_report
from refiner_core.judge_report.material import Material, run_material, shipped_material
from refiner_core.judge_report.text import markdown
from refiner_core.judges import build_judge
from refiner_core.judges.surroundings import MemoryStore, Surroundings, usage_of, usage_to_json

if TYPE_CHECKING:
    from flows.rescoring.reading import Policy
    from refiner_core.contract.records import RunRecord

#: Of a run, so many questions unless somebody says otherwise, with so many answers each.
QUESTIONS = 20
ANSWERS = 2
#: A person waits: a server that is gone is not waited for as long as a training would.
PATIENCE_S = 20.0
SHORT_S = 5.0

Kind = Literal["rubric", "citation_recall", "citation_needed", "citation_precision"]
#: What a run asks, each with scores of its own that are allowed.
KINDS: tuple[Kind, ...] = ("rubric", "citation_recall", "citation_precision", "citation_needed")
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


def make_report(wanted: Wanted, told: Callable[[str, int], None]) -> Made:
    """Measure.

    Parameters
    ----------
    told
        Hears what is asked next and how many questions that is. That all servers are gone is
        logged.

    Raises
    ------
    ConfigurationError
        A field, run or judge that does not fit.
    JudgeOutage
        Nobody answered.
    """
    config, material = _material(wanted)
    other = _checked(config, wanted.against).judge if wanted.against else None
    with ExitStack() as servers:

        @functools.cache
        def endpoints(judge: JudgeConfig) -> Endpoints | None:
            return servers.enter_context(endpoints_by_hand(wanted.workspace, judge))

        def make(judge: JudgeConfig) -> Judge:
            return _judge(judge, endpoints(judge))

        report = judge_report(
            material,
            config.judge,
            make,
            against=other,
            options=Options(repeats=wanted.repeats, told=told),
        )
    identity = canonical_json([report.judge, report.against, report.material, wanted.repeats])
    return Made(hashlib.sha256(identity.encode()).hexdigest()[:12], report)


def write_report(made: Made, folder: Path) -> None:
    """``report.md`` and, last, ``report.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / TEXT, markdown(made.report) + "\n")
    text = json.dumps(made.report.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    atomic.write_text(folder / REPORT, text + "\n")


# ---------------------------------------------------------------- material


def _material(wanted: Wanted) -> tuple[RecipeConfig, Material]:
    """The configuration to judge by, and what is judged."""
    if wanted.run is None:
        return _checked(RecipeConfig(), wanted.overrides), shipped_material(wanted.sample)
    policies = _policies(wanted)
    config = _checked(policies[0].config, wanted.overrides)
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
    config: JudgeConfig,
    endpoints: Endpoints | None,
    *,
    patience_s: float = PATIENCE_S,
    alone: bool = False,
) -> Judge:
    """A judge that knows nothing yet. With ``alone`` it is made for one question: a server that
    does not answer that one is taken to be gone."""
    config = replace(config, outage_patience_s=min(config.outage_patience_s, patience_s))
    around = Surroundings(store=MemoryStore(), endpoints=endpoints)
    if not alone or config.kind == "lexical":
        return build_judge(config, around)
    from refiner_core.http.fleet import BreakerSettings
    from refiner_core.judges.openai import OpenAIJudge

    return OpenAIJudge(config, around, breaker=BreakerSettings(threshold=1))


# ---------------------------------------------------------------- one question


@dataclass(frozen=True)
class Asked:
    """One question by hand. ``usage`` is None of a judge that is no server; ``schema`` says whether
    the server took the schema of the reply."""

    request: JudgeRequest
    judgement: Judgement
    judge: str
    seconds: float
    usage: JudgeUsage | None
    schema: str

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "version": 1,
            "judge": self.judge,
            "request": asdict(self.request),
            **asdict(self.judgement),
            "seconds": self.seconds,
            "schema": self.schema,
            "usage": None if self.usage is None else usage_to_json(self.usage),
        }


def ask_once(
    workspace: Workspace,
    overrides: Sequence[str],
    kind: Kind | None,
    given: tuple[str | None, str | None, str | None],
) -> Asked:
    """Ask a judge one question. ``given`` are question, answer and criterion; where none of them
    is, an example of the kind is asked, and without a kind as of :func:`ask_judge`.

    Raises
    ------
    ConfigurationError
        A field that does not fit, or a server that refuses.
    JudgeOutage
        Nobody answered within a few seconds.
    """
    config = _checked(RecipeConfig(), overrides).judge
    question, text, reference = given
    requests = [_example(k) for k in ((kind,) if kind else KINDS)]
    if any(part is not None for part in given):
        kind = kind or "rubric"
        request = JudgeRequest(kind, question or "", text or "", reference or "")
        _require_said(request)
        if kind == "citation_needed" and not reference:  # then the passage is all of the answer
            request = replace(request, reference=request.text)
        requests = [request]
    return _ask_in_turn(workspace, config, requests)


def ask_judge(workspace: Workspace, config: JudgeConfig, kinds: Sequence[Kind] = KINDS) -> Asked:
    """Ask the judge of a configuration an example of each kind, since each allows other scores:
    the first without a judgement, or else the first of all. Errors as of :func:`ask_once`."""
    return _ask_in_turn(workspace, config, [_example(kind) for kind in kinds])


def _ask_in_turn(
    workspace: Workspace, config: JudgeConfig, requests: Sequence[JudgeRequest]
) -> Asked:
    with endpoints_by_hand(workspace, config) as endpoints:
        judge = _judge(config, endpoints, patience_s=SHORT_S, alone=True)
        found: list[tuple[JudgeRequest, Judgement, float]] = []
        try:
            for request in requests:
                began = time.perf_counter()
                (judgement,) = judge.judge([request])
                found.append((request, judgement, time.perf_counter() - began))
                if judgement.status != "scored":
                    break
            usage = usage_of(judge)
        finally:
            getattr(judge, "close", lambda: None)()
    named = config.model if config.kind == "lexical" else f"{config.model} ({config.form})"
    request, judgement, seconds = found[-1] if judgement.status != "scored" else found[0]
    return Asked(request, judgement, named, seconds, usage, _schema_taken(config, usage))


def _example(kind: Kind) -> JudgeRequest:
    return next(i.request for i in shipped_material().items if i.request.kind == kind)


def _require_said(request: JudgeRequest) -> None:
    needs = {"--answer": request.text}
    if request.kind != "citation_needed":
        needs["--criterion"] = request.reference
    if request.kind == "rubric":
        needs["--question"] = request.question
    if lacking := [name for name, text in needs.items() if not text.strip()]:
        raise ConfigurationError(
            f"A question of the kind {request.kind} lacks {', '.join(lacking)}",
            expected="all of its parts, or none of them for an example",
            fix="add " + " ".join(f"{name} TEXT" for name in lacking),
        )


def _schema_taken(config: JudgeConfig, usage: JudgeUsage | None) -> str:
    if usage is None or config.structured_output == "none":
        return "not asked for"
    refused = [s for s in usage.answers if s != 200 and 400 <= s < 500 and s not in (408, 429)]
    if refused and 200 in usage.answers:
        return f"refused (HTTP {refused[0]}), answered without"
    return "taken" if 200 in usage.answers else "unknown"


def _checked(config: RecipeConfig, overrides: Sequence[str]) -> RecipeConfig:
    """With overrides. Who gives an address means a judge that is served."""
    given = {text.partition("=")[0].strip() for text in overrides}
    addressed = given & {"judge.base_url", "judge.base_urls"} and "judge.kind" not in given
    words = [*overrides, *(["judge.kind=openai"] if addressed else [])]
    changed = apply_overrides(config, words)
    check_config(changed)
    mask_keys_of(changed)
    return changed
