"""`refiner doctor` as a function: checks of this machine, with or without a recipe.

In: a recipe or none, overrides. Out: :class:`~infra.doctor.check.CheckResult` values. Checks of
machine and services are in :mod:`infra.doctor`; this module has those that need a recipe: its plan,
its disk forecast, and its judge.

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

from infra.doctor import machine, services
from infra.doctor.check import (
    AREAS,
    CheckResult,
    DoctorCheck,
    SystemInfo,
    absent,
    doubtful,
    fine,
    found,
    run_checks,
)
from infra.host.processes import host_name
from infra.host.secrets import mask_keys_of, masked, masked_override
from infra.store.provenance import read_certificates, versions
from infra.store.workspace import Workspace
from infra.tracking import masked_address
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import RefinerError, no_such
from refiner_core.contract.loading import apply_overrides, load_recipe
from refiner_core.contract.plan import Plan
from refiner_core.contract.services import asks_judge, serves
from refiner_core.contract.types import THINKING_OFF, WITHOUT_REASONING
from refiner_core.report.printing import size

_SETTING = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)*=[^\s`;,)]+")


def examine(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    offline: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[CheckResult]:
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
    words = shlex.join([*([recipe] if recipe else []), *map(masked_override, overrides)])
    info = SystemInfo(config, words if recipe else "", words, plan, refusal, offline)
    checks = (*machine.CHECKS, *services.CHECKS, *CHECKS)
    chosen = [c for c in checks if not only or c.area in only]
    found = run_checks(chosen, info, limit_s=limit_s, tell=tell)
    return [replace(f, what=masked(f.what), fix=masked(f.fix), why=masked(f.why)) for f in found]


def findings_json(findings: Sequence[CheckResult]) -> dict[str, Any]:
    """Findings as JSON. ``works`` is False if a requested check found an error."""
    return {
        "version": 1,
        "works": all(f.ok for f in findings),
        "findings": [{**asdict(f), "mend": f.fix} for f in findings],  # mend: former name
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


# ---------------------------------------------------------------- checks of the recipe


def _certificate(info: SystemInfo) -> Iterator[CheckResult]:
    """The certificate of this node: failed checks, and changes since."""
    fix = shlex.join(["refiner", "certify", f"workspace={info.workspace}"])
    known = read_certificates(Workspace.read_only(info.workspace))
    made = next((c for c in known if c.host.get("name") == host_name()), None)
    if made is None:
        if info.gpus or shutil.which("nvidia-smi"):
            what = "this node has none: its GPUs were not tested"
            yield found("missing", what, fix, "trust in numbers")
        return
    now, counts = versions(), [f"{made.count(v)} {v}" for v in ("pass", "fail", "absent")]
    changed = [
        f"{name} is {now[name]} (certified: {old})"
        for name, old in sorted(made.versions.items())
        if now.get(name, old) != old
    ]
    failed = [f"failed: {check.name}" for check in made.checks if check.verdict == "fail"]
    what = "; ".join([f"certified on {made.made_at[:10]}: {', '.join(counts)}", *changed, *failed])
    outdated = found("warning", what, fix, "it no longer describes this node")
    yield outdated if changed or failed else fine(what)


def _plan(info: SystemInfo) -> Iterator[CheckResult]:
    if (refusal := info.refusal) is not None:
        proposed = _SETTING.search(refusal.fix)  # the first `key=value`
        fix = f"refiner doctor {info.recipe}" + (f" {proposed[0]}" if proposed else "")
        yield found("broken", refusal.what, fix, refusal.fix)
        return
    if (plan := info.plan) is None:
        return
    from flows.checking.resources import planning_notes

    names = ", ".join(s.name for s in plan.stages)
    yield fine(f"{plan.recipe}: {len(plan.stages)} stages ({names})")
    for note in planning_notes(plan):
        yield found("warning", note, f"refiner plan {info.recipe}", name="note")


def _gpu_use(info: SystemInfo) -> CheckResult | None:
    """Whether the jobs that must run together have enough GPUs, here or on the cluster's nodes."""
    from flows.checking.resources import gpu_use

    use = gpu_use(info.plan) if info.plan else None
    if use is None or use.nodes is None:
        return None
    if use.lacks:
        return found("broken", use.lacks, f"refiner plan {info.recipe}", use.fix)
    return fine(f"{use.at_once} are needed at the same time, and {sum(use.nodes)} are there")


def _forecast(info: SystemInfo) -> CheckResult | None:
    from flows.disk import planned_space

    if info.plan is None:
        return None
    space = planned_space([info.plan])
    needed, free = space.forecast.needed_bytes, space.free_bytes
    what = f"takes up to {size(needed)}; {size(free)} are free"
    if space.forecast.unknown:
        what += f"; unknown: {', '.join(space.forecast.unknown)}"
    if not space.forecast.stages:
        what = f"nothing is left to write; {size(free)} are free"
    why = "the run pauses when the disk is full, and continues when there is space"
    fix = f"refiner plan {info.recipe} --disk"
    return fine(what) if space.fits else found("warning", what, fix, why)


# ---------------------------------------------------------------- the judge


def _judge(info: SystemInfo) -> Iterator[CheckResult]:
    """Ask a real question of each kind, as `refiner judge ask` does."""
    judge = info.config.judge
    if info.recipe and not asks_judge(info.config):
        return
    if judge.kind == "lexical":
        yield fine(f"{judge.model}: word overlap, needs no server")
        return
    if judge.base_url or judge.base_urls:
        yield _answer(info, judge)
    elif serves(judge):
        served = f"{judge.model} is served by refiner itself ({judge.serve.engine})"
        yield fine(f"{served}; its environment is checked under vllm")
    else:
        yield found(
            absent(info.recipe),
            f"{judge.model} has no address",
            f"{info.command('run')} judge.base_url=http://HOST:8000/v1",
            "rubrics and citations are scored by it",
        )


def _answer(info: SystemInfo, judge: JudgeConfig) -> CheckResult:
    from flows.judges import KINDS, ask_each, examples
    from infra.store.workspace import Workspace

    address = masked_address(judge.base_url or judge.base_urls[0])
    fix = f"curl --max-time 10 {shlex.quote(address)}/models"
    try:
        workspace = Workspace.read_only(info.workspace)
        # An environment asks only about assertions.
        kinds = KINDS[:1] if info.config.environment.name else KINDS
        asked = ask_each(workspace, judge, examples(kinds))
    except RefinerError as error:
        return found(doubtful(info.recipe), error.what, fix, error.fix)
    what = f"{asked.judge} answered in {asked.seconds:.2f} s; schema {asked.schema}"
    scored = asked.judgement.status == "scored"
    if asked.reasoning:
        state = "warning" if scored else doubtful(info.recipe)
        what = f"{what}; {asked.reasoning}"
        return found(state, what, info.again(THINKING_OFF), WITHOUT_REASONING)
    if scored:
        return fine(what)
    return found(
        doubtful(info.recipe),
        f"{what}, but gave no score to {asked.request.kind}: {asked.judgement.detail}",
        fix,
        "a judgement without a score removes its rollout from the loss",
    )


CHECKS = (
    DoctorCheck(
        *("judge", "judge", _judge, 60),
        lambda x: x.recipe and asks_judge(x.config) and x.config.judge.kind == "openai",
        "curl --max-time 10 JUDGE/models",
    ),
    DoctorCheck("gpu", "certificate", _certificate),
    DoctorCheck("recipe", "plan", _plan, needed=lambda _: True),
    DoctorCheck("recipe", "GPUs", _gpu_use),
    DoctorCheck("workspace", "forecast", _forecast, limit_s=60),
)
