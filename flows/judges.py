"""Judges: measure them, ask them a question, list and stop their servers.

In: a workspace, a run or none, overrides of `judge` and `reward`. Out: a
:data:`~refiner_core.judge_report.build.Report`, and ``report.md`` with ``report.json``; or an
:class:`JudgeReply`. The store of judgements is not used: stored answers would repeat forever.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from flows.running.status import required_run
from flows.stages.judging import Endpoints, endpoints_by_hand
from infra.host.secrets import mask_keys_of
from infra.services.judges import RUNNING, ServiceStatus, end_service, services_of
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, no_such
from refiner_core.contract.fingerprint import canonical_json
from refiner_core.contract.loading import apply_overrides
from refiner_core.contract.records import picked
from refiner_core.contract.types import Judge, Judgement, JudgeRequest, JudgeUsage, PromptRow
from refiner_core.judge_report.build import Report, judge_report, markdown, report_json
from refiner_core.judge_report.material import Material, run_material, shipped_material
from refiner_core.judges import build_judge
from refiner_core.judges.context import JudgeContext, MemoryStore, usage_of, usage_to_json

if TYPE_CHECKING:
    from flows.rescoring.reading import SampledPolicy


#: Default number of questions of a run, and of answers to each.
QUESTIONS = 20
ANSWERS = 2
#: A user is waiting: a missing server is awaited for less time than in training.
PATIENCE_S = 20.0
SHORT_S = 5.0

Kind = Literal["rubric", "citation_recall", "citation_precision", "citation_needed"]
#: Kinds of questions of a run, each with its own scores.
KINDS: tuple[Kind, ...] = get_args(Kind)
REPORT, TEXT = "report.json", "report.md"


class NamedReport(NamedTuple):
    """A report and its name: the same question to the same judge has the same name."""

    name: str
    report: Report


def measure_judge(
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    overrides: Sequence[str] = (),
    against: Sequence[str] = (),
    sample: int | None = None,
    repeats: int = 3,
    tell: Callable[[str, int], None] = lambda what, count: None,
) -> NamedReport:
    """Measure a judge: repeatability, agreement, bias, hostile answers, cost. Writes nothing.

    Parameters
    ----------
    run
        Run with the answers (default: a small shipped set with gold scores).
    workspace
        The folder that has the run's records.
    overrides
        Fields of the judge (default: the run's own, or the lexical one).
    against
        Fields of a second judge that differ from the first.
    sample
        Maximum number of questions.
    repeats
        Repetitions of each unchanged question.
    tell
        Receives the kind of the next questions, and their number.

    Returns
    -------
    report, name
        The report and its name; ``flows.judges.write_report`` writes it.

    Raises
    ------
    ConfigurationError
        A field, run or judge is invalid.
    JudgeOutage
        The judge did not answer.
    WorkspaceError
        The records of the run may have been written by another user.
    """
    ws = Workspace.read_only(workspace)
    if run is not None:
        ws.require_trust()  # its record names the judge, and the key that it gets
        config, material = _material_of_run(ws, run, overrides, sample or QUESTIONS)
    else:
        config, material = _checked(RecipeConfig(), overrides), shipped_material(sample)
    other = _checked(config, against).judge if against else None
    with ExitStack() as servers:

        @functools.cache
        def endpoints(judge: JudgeConfig) -> Endpoints | None:
            return servers.enter_context(endpoints_by_hand(ws, judge))

        report = judge_report(
            material,
            config.judge,
            lambda judge: _judge(judge, endpoints(judge)),
            against=other,
            repeats=repeats,
            told=tell,
        )
    identity = canonical_json([*map(report.get, ("judge", "against", "material")), repeats])
    return NamedReport(hashlib.sha256(identity.encode()).hexdigest()[:12], report)


def write_report(report: Report, folder: Path) -> None:
    """Write ``report.md`` and, last, ``report.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / TEXT, markdown(report) + "\n")
    text = json.dumps(report_json(report), indent=1, ensure_ascii=False, allow_nan=False)
    atomic.write_text(folder / REPORT, text + "\n")


# ---------------------------------------------------------------- material


def _material_of_run(
    workspace: Workspace, wanted: str, overrides: Sequence[str], questions: int
) -> tuple[RecipeConfig, Material]:
    """Configuration of the judge, and samples of evaluations, which no training has seen; else
    rollouts of the last step."""
    from flows.rescoring.reading import RolloutSelection, read_policies

    run = required_run(workspace, wanted, "a run to measure on")
    try:
        policies = read_policies(workspace, [run], RolloutSelection(source="evaluation"))
    except ConfigurationError:
        policies = read_policies(
            workspace, [run], RolloutSelection(source="rollouts", steps="last:1")
        )
    config = _checked(policies[0].config, overrides)
    answers = _answers(policies, questions)
    material = run_material(f"answers of run {run.run}", answers, config.reward)
    if not material.items:
        raise ConfigurationError(
            f"Run {run.run} has no answers that could be judged",
            expected="answers with a single answer block, and rubrics or evidence to judge them by",
            fix="name a later run, or none for the shipped set",
        )
    return config, material


def _answers(policies: Sequence[SampledPolicy], questions: int) -> Iterable[tuple[PromptRow, str]]:
    """Different answers to each of the first questions, ordered by a digest of their id: a
    reproducible draw."""
    found: dict[str, dict[str, PromptRow]] = {}
    for policy in policies:
        for rollout in policy.rollouts:
            if rollout.result.status != "malformed":
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
    """A judge without stored judgements. With ``alone`` it is made for one question: a server that
    does not answer that one counts as gone."""
    config = replace(config, outage_patience_s=min(config.outage_patience_s, patience_s))
    around = JudgeContext(store=MemoryStore(), endpoints=endpoints)
    if not alone or config.kind == "lexical":
        return build_judge(config, around)
    from refiner_core.http.fleet import BreakerSettings
    from refiner_core.judges.openai import OpenAIJudge

    return OpenAIJudge(config, around, breaker=BreakerSettings(threshold=1))


# ---------------------------------------------------------------- one question


class JudgeReply(NamedTuple):
    """One question. ``usage`` is None for a judge without a server; ``schema`` tells whether the
    server accepted the schema of the reply."""

    request: JudgeRequest
    judgement: Judgement
    judge: str
    seconds: float
    usage: JudgeUsage | None
    schema: str

    @property
    def reasoning(self) -> str:
        """What the judge's reasoning costs, with or without a score; empty without reasoning."""
        if self.usage is None or not (self.usage.reasoned or "reasoning" in self.usage.unusable):
            return ""
        each = self.usage.completion_tokens // max(self.usage.calls, 1)
        said = "before its score" if self.judgement.status == "scored" else "without a score"
        return f"the judge reasons {said}: {each} tokens a call"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        usage = None if self.usage is None else usage_to_json(self.usage)
        said = picked(self, "judge", "request", "seconds", "schema", "reasoning")
        return {"version": 1, **asdict(self.judgement), **said, "usage": usage}


def ask_judge(
    overrides: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    kind: Kind | None = None,
    question: str | None = None,
    answer: str | None = None,
    criterion: str | None = None,
) -> JudgeReply:
    """Ask a judge one question.

    Parameters
    ----------
    overrides
        Fields of the judge, such as ``judge.base_url=…`` and ``judge.model=…`` (default: lexical).
    workspace
        The workspace with the judge servers.
    kind
        Kind of question, a rubric by default.
    question, answer, criterion
        The text to judge, and its criterion; without any, an example, and without a kind one of
        each: the result is the first without a score, or else the rubric's.

    Returns
    -------
    NamedTuple
        The judgement with its time and tokens; ``judgement.score`` is None without a score.

    Raises
    ------
    ConfigurationError
        A field is invalid, or a server refuses.
    JudgeOutage
        No answer within a few seconds.
    """
    config = _checked(RecipeConfig(), overrides).judge
    requests = examples((kind,) if kind else KINDS)
    if any(part is not None for part in (question, answer, criterion)):
        kind = kind or "rubric"
        request = JudgeRequest(kind, question or "", answer or "", criterion or "")
        _require_recorded(request)
        if kind == "citation_needed" and not criterion:  # then the passage is the whole answer
            request = replace(request, reference=request.text)
        requests = [request]
    return ask_each(Workspace.read_only(workspace), config, requests)


def ask_each(
    workspace: Workspace, config: JudgeConfig, requests: Sequence[JudgeRequest]
) -> JudgeReply:
    """Ask the judge of a configuration; returns the first question without a judgement, else the
    first of all. Errors as of :func:`ask_judge`."""
    # A server that does not answer the first question counts as gone.
    found: list[tuple[JudgeRequest, Judgement, float]] = []
    with endpoints_by_hand(workspace, config) as endpoints, ExitStack() as ending:
        judge = _judge(config, endpoints, patience_s=SHORT_S, alone=True)
        ending.callback(getattr(judge, "close", lambda: None))
        for request in requests:
            began = time.perf_counter()
            (judgement,) = judge.judge([request])
            found.append((request, judgement, time.perf_counter() - began))
            if judgement.status != "scored":
                break
        usage = usage_of(judge)
    named = config.model if config.kind == "lexical" else f"{config.model} ({config.form})"
    shown = found[-1] if found[-1][1].status != "scored" else found[0]
    request, judgement, seconds = shown
    return JudgeReply(request, judgement, named, seconds, usage, _schema_accepted(config, usage))


def examples(kinds: Sequence[Kind] = KINDS) -> list[JudgeRequest]:
    """A question of each kind, since each has other scores."""
    known = [item.request for item in shipped_material().items]
    return [next(request for request in known if request.kind == kind) for kind in kinds]


def _require_recorded(request: JudgeRequest) -> None:
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


def _schema_accepted(config: JudgeConfig, usage: JudgeUsage | None) -> str:
    if usage is None or config.structured_output == "none":
        return "not asked for"
    refused = [s for s in usage.answers if s != 200 and 400 <= s < 500 and s not in (408, 429)]
    if refused and 200 in usage.answers:
        return f"refused (HTTP {refused[0]}), answered without"
    return "taken" if 200 in usage.answers else "unknown"


def _checked(config: RecipeConfig, overrides: Sequence[str]) -> RecipeConfig:
    """The configuration with overrides. An address implies a judge with a server."""
    given = {text.partition("=")[0].strip() for text in overrides}
    addressed = given & {"judge.base_url", "judge.base_urls"} and "judge.kind" not in given
    words = [*overrides, *(["judge.kind=openai"] if addressed else [])]
    changed = apply_overrides(config, words)
    check_config(changed)
    mask_keys_of(changed)
    return changed


# ---------------------------------------------------------------- servers


class StoppedServers(NamedTuple):
    """Ids of servers that have ended, that have not ended yet, and that are in use."""

    ended: list[str]
    left: list[str]
    busy: list[str]


def list_judge_servers(
    service: str | None = None, workspace: str | Path = RecipeConfig.workspace
) -> list[ServiceStatus]:
    """Judge servers started by runs of a workspace.

    Parameters
    ----------
    service
        Only the server with this id or beginning of an id.
    workspace
        The folder.

    Returns
    -------
    list of ServiceStatus
        State, address and users of each.

    Raises
    ------
    WorkspaceError
        The folder is no workspace, or a record is damaged.
    """
    return services_of(Workspace.read_only(workspace), service)


def stop_judge_servers(
    service: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    tell: Callable[[str], None] = lambda message: None,
) -> StoppedServers:
    """Stop a judge server, or all idle ones.

    Parameters
    ----------
    service
        An id or its beginning; it is stopped even if in use, and its user starts another one.
    workspace
        The folder.
    tell
        Receives progress messages.

    Returns
    -------
    StoppedServers
        Servers that have ended, and those that have not.

    Raises
    ------
    ConfigurationError
        There is no such server; the message names the nearest.
    """
    ws = Workspace.read_only(workspace)
    found = services_of(ws, service)
    if service is not None and not found:
        raise no_such(f"{workspace} has no server", service, [one.id for one in services_of(ws)])
    wanted = [one for one in found if one.state in (*RUNNING, "killed")]
    if service is None:
        wanted = [one for one in wanted if not one.leases]
    stopped = StoppedServers([], [], [one.id for one in found if one.leases])
    for one in wanted:
        for holder in one.leases:
            tell(f"{one.id} is needed by {holder}, which starts another one")
        over = end_service(ws, one.id, "`refiner judge stop`", tell=tell)
        (stopped.ended if over else stopped.left).append(one.id)
    return stopped
