"""Judges: measured, asked by hand, their servers listed and ended.

In: a workspace, a run or none, overrides of `judge` and `reward`. Out: a
:data:`~refiner_core.judge_report.build.Report`, and ``report.md`` with ``report.json``; or an
:class:`_Asked`. Past the workspace's store: answers that are kept would repeat themselves for ever.
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
from refiner_core.judges.surroundings import MemoryStore, Surroundings, usage_of, usage_to_json

if TYPE_CHECKING:
    from flows.rescoring.reading import Policy


#: Of a run, so many questions unless somebody says otherwise, with so many answers each.
QUESTIONS = 20
ANSWERS = 2
#: A person waits: a server that is gone is not waited for as long as a training would.
PATIENCE_S = 20.0
SHORT_S = 5.0

Kind = Literal["rubric", "citation_recall", "citation_precision", "citation_needed"]
#: What a run asks, each with scores of its own that are allowed.
KINDS: tuple[Kind, ...] = get_args(Kind)
REPORT, TEXT = "report.json", "report.md"


class _Made(NamedTuple):
    """A report, and what it is called: the same question to the same judge has the same name."""

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
) -> _Made:
    """Measure a judge: repeatability, agreement, bias, hostile answers, cost. Writes nothing.

    Parameters
    ----------
    run
        Whose answers are judged (default: a small set with gold scores that comes with refiner).
    workspace
        The folder that the run is recorded in.
    overrides
        Which judge (default: the run's own, or the lexical one).
    against
        Fields of a second judge that differ from the first.
    sample
        At most so many questions.
    repeats
        How often everything is asked as it is.
    tell
        Hears what is asked next, and how many questions that is.

    Returns
    -------
    report, name
        The report, and what it is called; ``flows.judges.write_report`` writes it.

    Raises
    ------
    ConfigurationError
        A field, run or judge that does not fit.
    JudgeOutage
        Nobody answered.
    WorkspaceError
        Somebody else may have written what is recorded of the run.
    """
    room = Workspace.read_only(workspace)
    if run is not None:
        room.require_trust()  # its record names the judge, and whose key it gets
        config, material = _material_of_run(room, run, overrides, sample or QUESTIONS)
    else:
        config, material = _checked(RecipeConfig(), overrides), shipped_material(sample)
    other = _checked(config, against).judge if against else None
    with ExitStack() as servers:

        @functools.cache
        def endpoints(judge: JudgeConfig) -> Endpoints | None:
            return servers.enter_context(endpoints_by_hand(room, judge))

        report = judge_report(
            material,
            config.judge,
            lambda judge: _judge(judge, endpoints(judge)),
            against=other,
            repeats=repeats,
            told=tell,
        )
    identity = canonical_json([*map(report.get, ("judge", "against", "material")), repeats])
    return _Made(hashlib.sha256(identity.encode()).hexdigest()[:12], report)


def write_report(report: Report, folder: Path) -> None:
    """``report.md`` and, last, ``report.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / TEXT, markdown(report) + "\n")
    text = json.dumps(report_json(report), indent=1, ensure_ascii=False, allow_nan=False)
    atomic.write_text(folder / REPORT, text + "\n")


# ---------------------------------------------------------------- material


def _material_of_run(
    workspace: Workspace, wanted: str, overrides: Sequence[str], questions: int
) -> tuple[RecipeConfig, Material]:
    """The configuration to judge by, and samples of evaluations, which no training has seen; else
    rollouts of the last step."""
    from flows.rescoring.reading import Part, read_policies

    run = required_run(workspace, wanted, "a run to measure on")
    try:
        policies = read_policies(workspace, [run], Part(source="evaluation"))
    except ConfigurationError:
        policies = read_policies(workspace, [run], Part(source="rollouts", steps="last:1"))
    config = _checked(policies[0].config, overrides)
    answers = _answers(policies, questions)
    material = run_material(f"answers of run {run.run}", answers, config.reward)
    if not material.items:
        raise ConfigurationError(
            f"Run {run.run} has no answers that could be judged",
            expected="answers with a single answer block, and rubrics or evidence to judge them by",
            fix="name a later run, or none for the set that comes with refiner",
        )
    return config, material


def _answers(policies: Sequence[Policy], questions: int) -> Iterable[tuple[PromptRow, str]]:
    """Different answers to each of the first questions by a digest of their id, which is a draw
    that comes out the same each time."""
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


class _Asked(NamedTuple):
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
        usage = None if self.usage is None else usage_to_json(self.usage)
        said = picked(self, "judge", "request", "seconds", "schema")
        return {"version": 1, **asdict(self.judgement), **said, "usage": usage}


def ask_judge(
    overrides: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    kind: Kind | None = None,
    question: str | None = None,
    answer: str | None = None,
    criterion: str | None = None,
) -> _Asked:
    """Ask a judge one question.

    Parameters
    ----------
    overrides
        Which judge, such as ``judge.base_url=…`` and ``judge.model=…`` (default: the lexical one).
    workspace
        Whose servers of judges are used.
    kind
        What is asked, a rubric by default.
    question, answer, criterion
        What is judged, and against what; without any, an example, and without a kind one of each:
        what comes back is the first without a score, or else the rubric's.

    Returns
    -------
    NamedTuple
        The judgement with its time and tokens; ``judgement.score`` is None where there is none.

    Raises
    ------
    ConfigurationError
        A field that does not fit, or a server that refuses.
    JudgeOutage
        Nobody answered within a few seconds.
    """
    config = _checked(RecipeConfig(), overrides).judge
    requests = examples((kind,) if kind else KINDS)
    if any(part is not None for part in (question, answer, criterion)):
        kind = kind or "rubric"
        request = JudgeRequest(kind, question or "", answer or "", criterion or "")
        _require_said(request)
        if kind == "citation_needed" and not criterion:  # then the passage is all of the answer
            request = replace(request, reference=request.text)
        requests = [request]
    return ask_in_turn(Workspace.read_only(workspace), config, requests)


def ask_in_turn(
    workspace: Workspace, config: JudgeConfig, requests: Sequence[JudgeRequest]
) -> _Asked:
    """Ask the judge of a configuration: the first question without a judgement, or else the first
    of all. Errors as of :func:`ask_judge`."""
    # A server that does not answer the first question is taken to be gone.
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
    return _Asked(request, judgement, named, seconds, usage, _schema_taken(config, usage))


def examples(kinds: Sequence[Kind] = KINDS) -> list[JudgeRequest]:
    """A question of each kind, since each allows other scores."""
    known = [item.request for item in shipped_material().items]
    return [next(request for request in known if request.kind == kind) for kind in kinds]


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


# ---------------------------------------------------------------- servers


class Stopped(NamedTuple):
    """Ids of servers that have ended, that have not yet, and that are needed by somebody."""

    ended: list[str]
    left: list[str]
    busy: list[str]


def list_judge_servers(
    service: str | None = None, workspace: str | Path = RecipeConfig.workspace
) -> list[ServiceStatus]:
    """The servers of judges that runs of a workspace have started.

    Parameters
    ----------
    service
        Only the one with this id, or those whose ids begin so.
    workspace
        The folder.

    Returns
    -------
    list of ServiceStatus
        How each is, where it answers, who needs it.

    Raises
    ------
    WorkspaceError
        It is no workspace, or a record is damaged.
    """
    return services_of(Workspace.read_only(workspace), service)


def stop_judge_servers(
    service: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    tell: Callable[[str], None] = lambda message: None,
) -> Stopped:
    """End a server of a judge, or all that nobody needs just now.

    Parameters
    ----------
    service
        An id or its beginning; it is ended though somebody needs it, who then starts another one.
    workspace
        The folder.
    tell
        Hears what is waited for.

    Returns
    -------
    Stopped
        Which have ended, and which have not.

    Raises
    ------
    ConfigurationError
        There is no such server; names the nearest.
    """
    room = Workspace.read_only(workspace)
    found = services_of(room, service)
    if service is not None and not found:
        raise no_such(f"{workspace} has no server", service, [one.id for one in services_of(room)])
    wanted = [one for one in found if one.state in (*RUNNING, "killed")]
    if service is None:
        wanted = [one for one in wanted if not one.leases]
    stopped = Stopped([], [], [one.id for one in found if one.leases])
    for one in wanted:
        for holder in one.leases:
            tell(f"{one.id} is needed by {holder}, which starts another one")
        over = end_service(room, one.id, "`refiner judge stop`", tell=tell)
        (stopped.ended if over else stopped.left).append(one.id)
    return stopped
