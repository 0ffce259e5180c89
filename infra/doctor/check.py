"""Checks of ``refiner doctor``: their input, their findings, and how they call programs.

In: a recipe's configuration and planned stages, or the defaults without a recipe. Out: a
:class:`SystemInfo`, from which every check reads the needs of the recipe, and :class:`CheckResult`
values. Programs and checks have a time limit: all checks run at once, and one that hangs (a dead
NFS server, a Slurm controller or a Hub that accepts calls and never answers) becomes a finding; its
thread is abandoned, and does not keep the process from ending. Nothing heavy is imported.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infra.host.processes import environment, run_program
from infra.slurm.profiles import Profile, load_profile
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import kinds_of
from refiner_core.contract.placement import starts_servers
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.services import asks_judge, engine_of, serves

#: ``ok``: works. ``missing``: absent, but not needed by the recipe. ``warning``: works, with a
#: surprise. ``broken``: needed by the recipe, and does not work.
State = Literal["ok", "missing", "warning", "broken"]
#: Areas in the order of the report.
AREAS = (
    *("recipe", "python", "machine", "gpu", "workspace", "slurm"),
    *("prefect", "hub", "wandb", "judge", "vllm", "network"),
)


@dataclass(frozen=True)
class CheckResult:
    """One finding of ``refiner doctor``.

    Attributes
    ----------
    area, name
        The subject: one of :data:`AREAS`; its name in words.
    what
        The finding in a line, with numbers.
    fix
        The one command (or line of a file) that fixes it; empty if nothing needs fixing.
    why
        What needs it, if it is missing or broken.
    """

    area: str
    name: str
    state: State
    what: str
    fix: str = ""
    why: str = ""

    @property
    def ok(self) -> bool:
        """True if it does not affect the recipe."""
        return self.state != "broken"

    @property
    def mend(self) -> str:
        """Former name of ``fix``, for one release."""
        warnings.warn("finding.mend is finding.fix now", DeprecationWarning, stacklevel=2)
        return self.fix


@dataclass(frozen=True)
class SystemInfo:
    """Subject of an examination.

    Attributes
    ----------
    config
        The recipe's configuration; the defaults (which need nothing special) without one.
    recipe
        The recipe as named on the command line, with overrides; empty without one.
    words
        The same, or only the overrides without a recipe.
    plan, refusal
        The recipe's plan, if it can be made, and why it would be refused.
    offline
        Ask nothing outside this machine and its cluster.
    """

    config: RecipeConfig = field(default_factory=RecipeConfig)
    recipe: str = ""
    words: str = ""
    plan: Plan | None = None
    refusal: RefinerError | None = None
    offline: bool = False

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        """The planned stages; empty without a plan."""
        return self.plan.stages if self.plan else ()

    @property
    def workspace(self) -> Path:
        """Folder of the records."""
        return Path(self.config.workspace).expanduser().absolute()

    @property
    def on_node(self) -> bool:
        """True on a compute node, within a job: `srun refiner doctor`."""
        return "SLURMD_NODENAME" in os.environ

    @property
    def folders(self) -> dict[str, Path]:
        """The workspace, and the folder of its large files if that is another."""
        given = {"workspace": self.config.workspace, "data_root": self.config.data_root}
        return {name: Path(f).expanduser().absolute() for name, f in given.items() if f is not None}

    @property
    def on_slurm(self) -> bool:
        """True if jobs go to Slurm."""
        return self.config.dispatch.executor == "slurm"

    @functools.cached_property
    def profile(self) -> Profile:
        """The cluster; raises ConfigurationError if it cannot be read."""
        return load_profile(self.config.dispatch.profile)

    def here(self, stages: Iterable[PlannedStage]) -> list[PlannedStage]:
        """Stages that run on the examined machine."""
        if not self.on_slurm:
            return list(stages)
        where = "slurm" if self.on_node else "local"
        return [s for s in stages if self.profile.executor_for(s) == where]

    @property
    def gpus(self) -> int:
        """The most GPUs requested by a stage on the examined machine."""
        return max((s.resources.gpus for s in self.here(self.stages)), default=0)

    @property
    def rollout_servers(self) -> bool:
        """True if a stage starts vLLM servers for rollouts."""
        config = self.config
        if not self.recipe:
            given = config.grpo.rollout_server != RecipeConfig().grpo.rollout_server
            return given or config.grpo.generation_backend == "vllm"
        return any(starts_servers(config, kind.name) for kind in kinds_of(config.stages))

    @property
    def rollout_gpus(self) -> int:
        """The most GPUs of a stage that starts vLLM servers for rollouts."""
        config = self.config
        kinds = [k for k in kinds_of(config.stages) if starts_servers(config, k.name)]
        sections = [k.samples_with for k in kinds] or ["grpo"]
        return max(int(get_field(config, f"{name}.resources.gpus")) for name in sections)

    @property
    def serves_here(self) -> bool:
        """True if servers of models would be started on the examined machine."""
        kinds = [s.kind for s in self.here(self.stages)]
        served = any(starts_servers(self.config, kind) for kind in kinds)
        return self.on_node or not self.on_slurm or served

    @property
    def judge_engine(self) -> str:
        """Engine of a judge that refiner starts: `vllm`, `transformers`, `command`; or empty."""
        config = self.config
        asked = asks_judge(config) if self.recipe else True
        return engine_of(config.judge) if asked and serves(config.judge) else ""

    @property
    def publishes(self) -> bool:
        """True if the recipe publishes to the Hub."""
        return self.config.publish.target == "hub" and "publish" in self.config.stages

    @property
    def needs_network(self) -> list[str]:
        """Names of stages that need the internet."""
        return [s.name for s in self.stages if s.needs_network]

    def command(self, *more: str) -> str:
        """A command with the recipe, for a fix: `refiner plan tiny …`."""
        return " ".join(("refiner", *more, self.recipe or "RECIPE"))

    def again(self, *more: str) -> str:
        """The same examination with additions, for a fix."""
        return " ".join(filter(None, ("refiner doctor", self.words, *more)))


def absent(needed: object) -> State:
    """State of a missing thing: broken only if it is needed."""
    return "broken" if needed else "missing"


def doubtful(needed: object) -> State:
    """State of a defect: broken if it is needed, else a warning."""
    return "broken" if needed else "warning"


def found(state: State, what: str, fix: str = "", why: str = "", *, name: str = "") -> CheckResult:
    """A finding of the running check; ``name`` if it is not the check's own."""
    return CheckResult("", name, state, what, fix, why)


def fine(what: str, *, name: str = "") -> CheckResult:
    """A positive finding."""
    return CheckResult("", name, "ok", what)


@dataclass(frozen=True)
class DoctorCheck:
    """One check.

    Attributes
    ----------
    info
        Returns the findings; those without area and name get the check's. It may raise a
        RefinerError, which becomes one.
    limit_s
        Time limit, seconds.
    needed
        Whether the recipe depends on an answer.
    hung
        The fix if it hangs.
    """

    area: str
    name: str
    look: Callable[[SystemInfo], CheckResult | Iterable[CheckResult] | None]
    limit_s: float = 20.0
    needed: Callable[[SystemInfo], object] = lambda _: False
    hung: str = ""


def run_checks(
    checks: Sequence[DoctorCheck],
    info: SystemInfo,
    *,
    limit_s: float | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[CheckResult]:
    """The findings of all checks, which run at the same time.

    Parameters
    ----------
    limit_s
        Limit for each check, seconds; by default its own.
    tell
        Called with the numbers of finished checks and of all.
    """
    made: dict[int, list[CheckResult]] = {}

    def work(number: int, check: DoctorCheck) -> None:
        made[number] = _named(check, _looked(check, info))

    threads = [
        threading.Thread(target=work, args=(number, check), daemon=True)
        for number, check in enumerate(checks)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    findings: list[CheckResult] = []
    for number, (check, thread) in enumerate(zip(checks, threads, strict=True)):
        limit = min(check.limit_s, limit_s or check.limit_s)
        thread.join(max(0.0, began + limit - time.monotonic()))
        silent = found(doubtful(check.needed(info)), f"no answer in {limit:g} s", check.hung)
        findings += made.get(number) or (_named(check, [silent]) if thread.is_alive() else [])
        tell(number + 1, len(checks))
    return sorted(findings, key=lambda f: AREAS.index(f.area))


def _looked(check: DoctorCheck, info: SystemInfo) -> list[CheckResult]:
    try:
        made = check.look(info) or ()
        return [made] if isinstance(made, CheckResult) else list(made)
    except RefinerError as error:
        return [found(doubtful(check.needed(info)), error.what, error.fix)]
    except OSError as error:
        return [found(doubtful(check.needed(info)), f"the system refused: {error}", check.hung)]
    except Exception as error:  # the other findings are useful all the same
        what = f"this check itself failed ({type(error).__name__}: {error})"
        return [found("warning", what, "refiner doctor --debug")]


def _named(check: DoctorCheck, made: Iterable[CheckResult]) -> list[CheckResult]:
    return [replace(o, area=o.area or check.area, name=o.name or check.name) for o in made]


class ProgramOutput(NamedTuple):
    """Answer of a program. ``code`` is None if it is missing; -1: no answer in time."""

    code: int | None
    out: str = ""
    err: str = ""

    @property
    def ok(self) -> bool:
        """True if it ended well."""
        return self.code == 0

    @property
    def hung(self) -> bool:
        """True if it gave no answer in time."""
        return self.code == -1

    @property
    def last_line(self) -> str:
        """The line in which programs name their error."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip()[:300] if lines else "it printed nothing"


def last_json(text: str) -> dict[str, Any] | None:
    """The last line of an answer that is a JSON object; None if there is none."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else None


def ask(command: Sequence[str], timeout_s: float) -> ProgramOutput:
    """Run a program; it is ended after ``timeout_s`` seconds."""
    try:
        done = run_program(command, timeout_s, {**environment(), "LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        return ProgramOutput(-1, err=f"no answer in {timeout_s:.0f} s")
    except OSError as error:
        return ProgramOutput(None, err=str(error))
    return ProgramOutput(done.returncode, done.stdout, done.stderr)
