"""`refiner doctor` as a function: checks of this machine, with or without a recipe.

In: a recipe or none, overrides. Out: :class:`~infra.doctor.check.Finding` values. Checks of machine
and services are in :mod:`infra.doctor`; this module has those that need a recipe: its plan, its
disk forecast, and its judge.

>>> from flows.doctor import examine
>>> [f.what for f in examine(only=("python",)) if f.state == "broken"]
[]
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from infra.disk.keeper import gib
from infra.doctor import gpu, machine, services, slurm
from infra.doctor.check import (
    AREAS,
    Check,
    Finding,
    Look,
    absent,
    doubtful,
    fine,
    found,
    run_checks,
)
from infra.host.processes import host_name
from infra.host.secrets import mask_keys_of, masked, shown_override
from infra.store.provenance import read_certificates, versions
from infra.store.workspace import Workspace
from infra.tracking import shown_address
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError, no_such
from refiner_core.contract.loading import apply_overrides, load_recipe
from refiner_core.contract.plan import Plan
from refiner_core.contract.services import asks_judge, serves

#: Maximum wait for a job to appear, seconds; see ``--job``.
JOB_WAIT_S = 120.0
_JUDGE_S = 60.0
_SETTING = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)*=[^\s`;,)]+")


def examine(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    offline: bool = False,
    only: Sequence[str] = (),
    job: bool = False,
    wait_s: float = JOB_WAIT_S,
    limit_s: float | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """Check this machine; changes nothing.

    Parameters
    ----------
    recipe
        A requirement of it that does not work is ``broken``; without a recipe, what is absent is
        ``missing``.
    overrides
        ``key=value`` words, on the recipe or on the defaults.
    offline
        Send no requests outside this machine and its cluster.
    only
        Areas to check (default: all of :data:`~infra.doctor.check.AREAS`).
    job
        Also submit a tiny job, and report from its node; waits for it at most ``wait_s`` seconds.
    limit_s
        Time limit of each check, seconds.
    tell
        Receives the numbers of finished and of all checks.

    Raises
    ------
    ConfigurationError
        There is no such recipe, override or area.
    """
    for area in only:
        if area not in AREAS:
            raise no_such("There is no area", area, AREAS)
    config = (
        load_recipe(recipe, overrides) if recipe else apply_overrides(RecipeConfig(), overrides)
    )
    mask_keys_of(config)
    plan, refusal = _planned(recipe, overrides) if recipe else (None, None)
    words = shlex.join([*([recipe] if recipe else []), *map(shown_override, overrides)])
    stages = tuple(plan.stages) if plan else ()
    look = Look(config, words if recipe else "", words, stages, offline)
    areas = (machine, gpu, slurm, services)
    checks = [check for area in areas for check in area.CHECKS]
    checks += _recipe_checks(plan, refusal, look)
    if job:
        checks.append(_job_check(look, wait_s))
    chosen = [c for c in checks if not only or c.area in only or (job and c.area == "node")]
    found = run_checks(chosen, look, limit_s=limit_s, tell=tell)
    return [replace(f, what=masked(f.what), mend=masked(f.mend), why=masked(f.why)) for f in found]


def findings_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Findings as JSON. ``works`` is False if a requested check found an error."""
    return {
        "version": 1,
        "works": all(f.ok for f in findings),
        "findings": [asdict(f) for f in findings],
    }


def _planned(recipe: str, overrides: Sequence[str]) -> tuple[Plan | None, RefinerError | None]:
    from flows.running.calls import check_supported, make_recipe_plan

    plan = None
    try:
        plan = make_recipe_plan(recipe, overrides)
        check_supported(plan.config)
    except RefinerError as error:
        return plan, error
    return plan, None


def _job_check(look: Look, wait_s: float) -> Check:
    from infra.doctor.node import node_check

    if not look.on_slurm:
        raise ConfigurationError(
            "--job checks a compute node, and jobs run on this machine (dispatch.executor=local).",
            expected="a recipe, or overrides, that name Slurm and your cluster's profile",
            fix="refiner doctor --job dispatch.executor=slurm dispatch.profile=PROFILE",
        )
    return node_check(wait_s)


# ---------------------------------------------------------------- checks of the recipe


def _recipe_checks(plan: Plan | None, refusal: RefinerError | None, look: Look) -> list[Check]:
    checks = [
        Check(
            *("judge", "judge", _judge),
            limit_s=_JUDGE_S,
            needed=lambda x: x.recipe and asks_judge(x.config) and x.config.judge.kind == "openai",
            hung="curl --max-time 10 JUDGE/models",
        ),
    ]
    checks.append(Check("gpu", "certificate", _certificate, limit_s=20))
    if look.recipe:
        checks.append(
            Check("recipe", "plan", lambda _: _plan(plan, refusal, look), needed=lambda _: True)
        )
    if plan is not None:
        checks.append(Check("workspace", "forecast", lambda _: _forecast(plan, look), limit_s=60))
    return checks


def _certificate(look: Look) -> Iterator[Finding]:
    """The certificate of this node: failed checks, and changes since."""
    mend = shlex.join(["refiner", "certify", f"workspace={look.workspace}"])
    known = read_certificates(Workspace.read_only(look.workspace))
    made = next((c for c in known if c.host.get("name") == host_name()), None)
    if made is None:
        if look.gpus or shutil.which("nvidia-smi"):
            what = "this node has none: its GPUs were not tested"
            yield found("missing", what, mend, "trust in numbers")
        return
    now, counts = versions(), [f"{made.count(v)} {v}" for v in ("pass", "fail", "absent")]
    changed = [
        f"{name} is {now[name]} (certified: {old})"
        for name, old in sorted(made.versions.items())
        if now.get(name, old) != old
    ]
    failed = [f"failed: {check.name}" for check in made.checks if check.verdict == "fail"]
    what = "; ".join([f"certified on {made.made_at[:10]}: {', '.join(counts)}", *changed, *failed])
    outdated = found("warning", what, mend, "it no longer describes this node")
    yield outdated if changed or failed else fine(what)


def _plan(plan: Plan | None, refusal: RefinerError | None, look: Look) -> Iterator[Finding]:
    if refusal is not None:
        proposed = _SETTING.search(refusal.fix)  # the first `key=value`
        mend = f"refiner doctor {look.recipe}" + (f" {proposed[0]}" if proposed else "")
        yield found("broken", refusal.what, mend, refusal.fix)
        return
    assert plan is not None
    from flows.checking.resources import planning_notes

    names = ", ".join(s.name for s in plan.stages)
    yield fine(f"{plan.recipe}: {len(plan.stages)} stages ({names})")
    for note in planning_notes(plan):
        yield found("warning", note, f"refiner plan {look.recipe}", name="note")


def _forecast(plan: Plan, look: Look) -> Finding:
    from flows.disk import planned_room

    room = planned_room([plan])
    needed, free = room.forecast.needed_bytes, room.free_bytes
    what = f"takes up to {gib(needed)}; {gib(free)} are free"
    if room.forecast.unknown:
        what += f"; unknown: {', '.join(room.forecast.unknown)}"
    if not room.forecast.stages:
        what = f"nothing is left to write; {gib(free)} are free"
    why = "the run pauses when the disk is full, and continues when there is space"
    mend = f"refiner plan {look.recipe} --disk"
    return fine(what) if room.fits else found("warning", what, mend, why)


# ---------------------------------------------------------------- the judge


def _judge(look: Look) -> Iterator[Finding]:
    """Ask a real question of each kind, as `refiner judge ask` does."""
    judge = look.config.judge
    if look.recipe and not asks_judge(look.config):
        return
    if judge.kind == "lexical":
        yield fine(f"{judge.model}: word overlap, needs no server")
        return
    if judge.base_url or judge.base_urls:
        yield _answer(look, judge)
    elif serves(judge):
        served = f"{judge.model} is served by refiner itself ({judge.serve.engine})"
        yield fine(f"{served}; its environment is checked under vllm")
    else:
        yield found(
            absent(look.recipe),
            f"{judge.model} has no address",
            f"{look.command('run')} judge.base_url=http://HOST:8000/v1",
            "rubrics and citations are scored by it",
        )


def _answer(look: Look, judge: JudgeConfig) -> Finding:
    from flows.judges import KINDS, ask_in_turn, examples
    from infra.store.workspace import Workspace

    address = shown_address(judge.base_url or judge.base_urls[0])
    mend = f"curl --max-time 10 {shlex.quote(address)}/models"
    try:
        workspace = Workspace.read_only(look.workspace)
        # An environment asks only about assertions.
        kinds = KINDS[:1] if look.config.environment.name else KINDS
        asked = ask_in_turn(workspace, judge, examples(kinds))
    except RefinerError as error:
        return found(doubtful(look.recipe), error.what, mend, error.fix)
    what = f"{asked.judge} answered in {asked.seconds:.2f} s; schema {asked.schema}"
    if asked.judgement.status == "scored":
        return fine(what)
    return found(
        doubtful(look.recipe),
        f"{what}, but gave no score to {asked.request.kind}: {asked.judgement.detail}",
        mend,
        "a judgement without a score removes its rollout from the loss",
    )
