"""The installed tau2-bench: its location, the parts used here, and its identity.

In: the importable packages, and ``TAU2_DATA_DIR``. Out: :class:`Parts`, or an error with
installation instructions; and a digest that needs no import.

Its gym (``tau2.gym``) is an agent with a loop around it. We use the agent with our own loop,
since the gym's environment hides exceptions of the user simulator (such an episode ends with
reward 0 there), parses answers that look like calls as calls, reads all tasks again at every step,
and asks a fixed model about assertions in plain language.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from refiner_core.contract.config import EnvironmentConfig
from refiner_core.contract.errors import UnsupportedError

#: The domains with a train and a test split.
DOMAINS = ("airline", "retail", "telecom")
DATA_VARIABLE = "TAU2_DATA_DIR"
#: Replaces the digest if tau2 is not installed, so that a recipe can still be planned.
ABSENT = "tau2: not installed where this was planned"
INSTALL = (
    "with Python 3.12 or 3.13: git clone https://github.com/sierra-research/tau2-bench, then "
    "`pip install -e 'tau2-bench[gym]'` into the environment that runs refiner (the name tau2 on "
    "the package index is another project)"
)
#: Modules that distinguish the benchmark from the chemistry library of the same name.
_TELLING = ("registry.py", "orchestrator", "domains", "user")
#: Folders of its code that decide the course and the value of an episode.
_DECIDING = ("domains", "environment", "evaluator", "gym", "orchestrator", "user", "data_model")
_DATA_SUFFIXES = (".json", ".toml", ".md")


#: The parts used here, by their own names (:data:`_WHERE`), and the ``version``.
Parts = SimpleNamespace

_WHERE: dict[str, tuple[str, ...]] = {
    "tau2.registry": ("registry",),
    "tau2.gym.gym_agent": ("GymAgent",),
    "tau2.user.user_simulator": ("UserSimulator",),
    "tau2.orchestrator.orchestrator": ("Orchestrator", "Role"),
    "tau2.evaluator.evaluator": ("evaluate_simulation", "EvaluationType"),
    "tau2.data_model.simulation": ("SimulationRun", "TerminationReason"),
    "tau2.data_model.tasks": ("Task",),
    "tau2.data_model.message": ("AssistantMessage", "UserMessage", "ToolMessage", "ToolCall"),
}


def missing_tau2() -> str:
    """Reason why it cannot be used here, as one paragraph; empty if it can be. Imports nothing."""
    try:
        _folder()
    except UnsupportedError as error:
        return error.paragraph()
    return ""


def load_tau2() -> Parts:
    """Import it, once per process and installation.

    Raises
    ------
    UnsupportedError
        It is not installed, is the other package of this name, or lacks something.
    """
    return _loaded(str(_folder()))


@functools.lru_cache(maxsize=4)
def _loaded(folder: str) -> Parts:
    _quieten()
    found: dict[str, Any] = {}
    for module, names in _WHERE.items():
        try:
            imported = importlib.import_module(module)
            found |= {name: getattr(imported, name) for name in names}
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"tau2-bench at {folder} cannot be used: {module}: {error}",
                expected="a version with its gym interface (tau2.gym), and gymnasium beside it",
                fix=INSTALL,
            ) from error
    return Parts(**found, version=_version())


def _quieten() -> None:
    """Quieten it: it logs every message to the terminal, and its client fetches prices from the
    network on import. Existing settings are kept."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    if importlib.util.find_spec("loguru") is not None:
        importlib.import_module("loguru").logger.disable("tau2")
    if importlib.util.find_spec("litellm") is not None:
        litellm: Any = importlib.import_module("litellm")
        litellm.suppress_debug_info = True


def widen_client(connections: int) -> None:
    """Allow so many users to be called at a time: its default is ten connections, and users waiting
    for one would soon count as slow."""
    if importlib.util.find_spec("litellm") is None or connections <= 10:
        return
    litellm: Any = importlib.import_module("litellm")
    httpx: Any = importlib.import_module("httpx")
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    litellm.client_session = httpx.Client(limits=limits)


def _folder() -> Path:
    """Folder of the package; found without importing it."""
    spec = importlib.util.find_spec("tau2")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError(
            "tau2-bench is not installed here (environment.name=tau2).",
            expected="its package `tau2`, which runs the episodes",
            fix=INSTALL,
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    lacking = [name for name in _TELLING if not (folder / name).exists()]
    if lacking:
        raise UnsupportedError(
            f"The package `tau2` at {folder} is not tau2-bench: it has no {', '.join(lacking)}.",
            expected="the benchmark of sierra-research, not the library for chemistry that the "
            "package index has under this name",
            fix=f"pip uninstall tau2; then, {INSTALL}",
        )
    return folder


def data_folder(folder: Path | None = None) -> Path:
    """Its data folder: ``TAU2_DATA_DIR``, or beside its source."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else (folder or _folder()).parents[1] / "data"


def _version() -> str:
    try:
        return importlib.metadata.version("tau2")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def tau2_digest(config: EnvironmentConfig) -> str:
    """Identity of tasks, rules and code, for plans: the version, and a hash over the domains' data
    and over the deciding modules. Reads files only: no import, no network.

    Without an installation the digest is :data:`ABSENT`: the recipe can be planned, and
    the data stage refuses to start (:class:`~refiner_core.contract.errors.UnsupportedError`). A
    plan made with an installation has another fingerprint.
    """
    try:
        folder = _folder()
    except UnsupportedError:
        return ABSENT
    return f"tau2 {_version()} {files_digest(config.domains or DOMAINS, config.tasks, folder)}"


def files_digest(
    domains: tuple[str, ...], tasks: str | None = None, folder: Path | None = None
) -> str:
    """SHA-256 over names and contents of the deciding files: 64 hexadecimal digits."""
    folder = folder or _folder()
    whole = hashlib.sha256()
    for path, name in _files(folder, domains):
        whole.update(f"{name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    if tasks is not None:
        whole.update(Path(tasks).expanduser().read_bytes())
    return whole.hexdigest()


def _files(folder: Path, domains: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for part in _DECIDING:
        for path in sorted((folder / part).rglob("*.py")):
            yield path, f"tau2/{path.relative_to(folder)}"
    data = data_folder(folder) / "tau2"
    for place in (data / "user_simulator", *(data / "domains" / name for name in domains)):
        for path in sorted(place.glob("*")):
            if path.suffix in _DATA_SUFFIXES:
                yield path, f"data/{path.relative_to(data)}"
