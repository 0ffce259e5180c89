"""Checks of ``refiner doctor``: what they get to know, what they find, how they ask programs.

In: a recipe's configuration and planned stages, or the defaults where no recipe is named. Out: a
:class:`Look`, from which every check reads what is needed here, and :class:`Finding` values.
Programs are always asked with a time limit, and so are checks: all look at once, and one that hangs
(a dead NFS server, a Slurm controller or a Hub that takes calls and never answers) becomes a
finding that says so; its thread is left behind, which keeps no process from ending. Nothing heavy
is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infra.host.files import existing
from infra.host.processes import environment
from infra.slurm.profiles import Profile, load_profile
from infra.store.atomic import TEMPORARY
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.kinds import kinds_of
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.services import asks_judge, engine_of, serves

#: ``ok``: works. ``missing``: not there, and nothing that was asked for needs it. ``warning``:
#: works, but will surprise. ``broken``: what was asked for needs it, and it does not work.
State = Literal["ok", "missing", "warning", "broken"]
#: The order in which areas are shown.
AREAS = (
    *("recipe", "python", "machine", "gpu", "workspace", "slurm", "node"),
    *("prefect", "hub", "wandb", "judge", "vllm", "network"),
)


@dataclass(frozen=True)
class Finding:
    """One check of ``refiner doctor``.

    Attributes
    ----------
    area, name
        What was looked at: one of :data:`AREAS` (``node``: from a compute node); name in words.
    what
        What was found, in a line, with the numbers.
    mend
        The one command (or line of a file) that mends it; empty where nothing is to be mended.
    why
        What it is needed for, where it is missing or broken.
    """

    area: str
    name: str
    state: State
    what: str
    mend: str = ""
    why: str = ""

    @property
    def ok(self) -> bool:
        """True if nothing that was asked for suffers from it."""
        return self.state != "broken"


@dataclass(frozen=True)
class Look:
    """Subject of an examination.

    Attributes
    ----------
    config
        The recipe's configuration; the defaults (which need nothing special) without one.
    recipe
        As it was named on the command line, with overrides; empty without one.
    words
        The same, and the overrides where there is no recipe.
    stages
        The planned stages; empty where there is no plan.
    offline
        Ask nobody outside this machine and its cluster.
    on_node
        This is a compute node, where a job of ours looks.
    asked_gpus
        GPUs that this job has asked for.
    """

    config: RecipeConfig = field(default_factory=RecipeConfig)
    recipe: str = ""
    words: str = ""
    stages: tuple[PlannedStage, ...] = ()
    offline: bool = False
    on_node: bool = False
    asked_gpus: int = 0

    @property
    def workspace(self) -> Path:
        """Folder of the records."""
        return Path(self.config.workspace).expanduser().absolute()

    @property
    def folders(self) -> dict[str, Path]:
        """The workspace, and the folder of its large files where that is another."""
        given = {"workspace": self.config.workspace, "data_root": self.config.data_root}
        return {name: Path(f).expanduser().absolute() for name, f in given.items() if f is not None}

    @property
    def on_slurm(self) -> bool:
        """True if jobs go to Slurm."""
        return self.config.dispatch.executor == "slurm"

    @functools.cached_property
    def profile(self) -> Profile:
        """The cluster; raises ConfigurationError for one that cannot be read."""
        return load_profile(self.config.dispatch.profile)

    def here(self, stages: Iterable[PlannedStage]) -> list[PlannedStage]:
        """Those that run on the machine that is looked at."""
        if not self.on_slurm:
            return list(stages)
        where = "slurm" if self.on_node else "local"
        return [s for s in stages if self.profile.executor_for(s) == where]

    @property
    def gpus(self) -> int:
        """The most GPUs that a stage asks for on the machine that is looked at."""
        return max((s.resources.gpus for s in self.here(self.stages)), default=self.asked_gpus)

    @property
    def most_gpus(self) -> int:
        """The most GPUs that a stage of the recipe asks for, wherever it runs."""
        return max((s.resources.gpus for s in self.stages), default=0)

    @property
    def rollout_servers(self) -> bool:
        """True if a stage starts vLLM servers for rollouts."""
        config = self.config
        if not self.recipe:
            given = config.grpo.rollout_server != RecipeConfig().grpo.rollout_server
            return given or config.grpo.generation_backend == "vllm"
        sampling = [k.samples_with for k in kinds_of(config.stages) if k.samples_with]
        return any(getattr(config, s).generation_backend == "vllm" for s in sampling)

    @property
    def serves_here(self) -> bool:
        """True if servers of models would be started on the machine that is looked at."""
        kinds = [s.kind for s in self.here(self.stages)]
        return self.on_node or not self.on_slurm or bool({"grpo", "sample"}.intersection(kinds))

    @property
    def judge_engine(self) -> str:
        """Engine of a judge that refiner starts: `vllm`, `transformers`, `command`; or empty."""
        config = self.config
        asked = asks_judge(config) if self.recipe else True
        return engine_of(config.judge) if asked and serves(config.judge) else ""

    @property
    def publishes(self) -> bool:
        """True if something goes to the Hub."""
        return self.config.publish.target == "hub" and "publish" in self.config.stages

    @property
    def needs_network(self) -> list[str]:
        """Names of stages that need the internet."""
        return [s.name for s in self.stages if s.needs_network]

    def command(self, *more: str) -> str:
        """The recipe's own word with something added, for a mend: `refiner plan tiny …`."""
        return " ".join(("refiner", *more, self.recipe or "RECIPE"))

    def again(self, *more: str) -> str:
        """The same look with something added, for a mend."""
        return " ".join(filter(None, ("refiner doctor", self.words, *more)))


def absent(needed: object) -> State:
    """State of what is not there: broken only where it is needed."""
    return "broken" if needed else "missing"


def doubtful(needed: object) -> State:
    """State of what does not work: broken where it is needed, else it may surprise."""
    return "broken" if needed else "warning"


def found(state: State, what: str, mend: str = "", why: str = "", *, name: str = "") -> Finding:
    """A finding of the check that is at work; ``name`` where it is not the check's own."""
    return Finding("", name, state, what, mend, why)


def fine(what: str, *, name: str = "") -> Finding:
    """A finding that all is well."""
    return Finding("", name, "ok", what)


@dataclass(frozen=True)
class Check:
    """One thing to look at.

    Attributes
    ----------
    look
        Gives the findings; those without area and name get the check's. It may raise a
        RefinerError, which becomes one.
    limit_s
        After so many seconds it counts as hung.
    needed
        Whether what was asked for suffers if it does not answer.
    hung
        What mends it then.
    """

    area: str
    name: str
    look: Callable[[Look], Finding | Iterable[Finding] | None]
    limit_s: float = 20.0
    needed: Callable[[Look], object] = lambda _: False
    hung: str = ""


def run_checks(
    checks: Sequence[Check],
    look: Look,
    *,
    limit_s: float | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """The findings of all checks, which look at the same time.

    Parameters
    ----------
    limit_s
        No check gets more than this, seconds; by default its own limit.
    tell
        Told how many of how many are done.
    """
    made: dict[int, list[Finding]] = {}

    def work(number: int, check: Check) -> None:
        made[number] = _named(check, _looked(check, look))

    threads = [
        threading.Thread(target=work, args=(number, check), daemon=True)
        for number, check in enumerate(checks)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    findings: list[Finding] = []
    for number, (check, thread) in enumerate(zip(checks, threads, strict=True)):
        limit = min(check.limit_s, limit_s or check.limit_s)
        thread.join(max(0.0, began + limit - time.monotonic()))
        silent = found(doubtful(check.needed(look)), f"no answer in {limit:g} s", check.hung)
        findings += made.get(number) or (_named(check, [silent]) if thread.is_alive() else [])
        tell(number + 1, len(checks))
    return sorted(findings, key=lambda f: AREAS.index(f.area))


def _looked(check: Check, look: Look) -> list[Finding]:
    try:
        made = check.look(look) or ()
        return [made] if isinstance(made, Finding) else list(made)
    except RefinerError as error:
        return [found(doubtful(check.needed(look)), error.what, error.fix)]
    except OSError as error:
        return [found(doubtful(check.needed(look)), f"the system refused: {error}", check.hung)]
    except Exception as error:  # the others' findings are worth having all the same
        what = f"this check itself failed ({type(error).__name__}: {error})"
        return [found("warning", what, "refiner doctor --debug")]


def _named(check: Check, made: Iterable[Finding]) -> list[Finding]:
    return [replace(o, area=o.area or check.area, name=o.name or check.name) for o in made]


class Answer(NamedTuple):
    """Answer of a program. ``code`` is None where it is not there; -1: no answer in time."""

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
        """The line where programs say what went wrong."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip()[:300] if lines else "it printed nothing"


def last_json(text: str) -> dict[str, Any] | None:
    """The last line of an answer that is a JSON object; None if there is none."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else None


def ask(command: Sequence[str], timeout_s: float) -> Answer:
    """Run a program; it and all that it has started are ended after ``timeout_s`` seconds."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**environment(), "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        return Answer(None, err=str(error))
    _asked.add(process)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return Answer(-1, err=f"no answer in {timeout_s:.0f} s")
    finally:
        _asked.discard(process)
    return Answer(process.returncode, out, err)


#: Programs that have not answered yet: a check that was given up leaves them, a doctor does not.
_asked: set[subprocess.Popen[str]] = set()


@atexit.register
def _end_asked() -> None:
    for process in list(_asked):
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    """A new folder below ``folder``, or below the nearest one above it that exists."""
    made = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}doctor-", dir=existing(folder)))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
