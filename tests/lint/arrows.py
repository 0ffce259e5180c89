"""Who may import whom: packages, and the rooms inside them.

In: the source. Out: findings. A room may import, when it is loaded, only rooms that stand before it
in :data:`ROOMS`; an import inside a function (a factory that picks one of several, something that
is slow to load) is no arrow between rooms, but it is one between packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from tests.lint.findings import Finding
from tests.lint.source import PACKAGES, Module, modules

#: What each package may import of ours.
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "flows": frozenset(PACKAGES),
    "sweeps": frozenset({"sweeps", "refiner_core"}),
    "infra": frozenset({"infra", "refiner_core"}),
    "refiner_core": frozenset({"refiner_core"}),
}
#: The science knows nothing of orchestration.
NOT_IN_CORE = ("prefect", "submitit", "wandb", "huggingface_hub")

#: Rooms from the lowest up, as data flows: each may use those before it.
ROOMS: Mapping[str, Sequence[str]] = {
    "refiner_core": (
        *("contract", "http", "words", "answers", "judges", "rubrics", "rewards", "generation"),
        *("environments", "samples", "batches", "data", "models", "evaluation", "report", "cards"),
        *("nightly", "training", "rejection", "judge_report", "rescoring"),
    ),
    "refiner_core.training": (
        *("ranks", "batches", "equality", "model", "engines", "steps", "export"),
        *("rollouts", "updates", "sft", "grpo"),
    ),
    "infra": (
        *("host", "store", "jobs", "judgements", "publishing", "hub", "process", "foreign", "disk"),
        *("tracking", "profiles", "slurm", "prefect_server", "attempt", "orchestrator", "services"),
        *("ranks", "rollouts", "doctor"),
    ),
    "flows": (
        *(
            "recipes",
            "protocols",
            "checking",
            "stages",
            "ranks",
            "worker",
            "evaluations",
        ),
        *("artifacts", "running", "notifying", "stored", "tracking", "cards", "publishing"),
        *("adopting", "disk", "plans", "doctor", "rescoring"),
        *("judges", "sweeping", "why", "diffing", "proving", "certify"),
        *("nightly", "reporting"),
        *(
            "frames",
            "starting",
            "api",
            "flow_runs",
            "ensuring",
            "pipeline",
            "sweep",
            "serving",
            "terminal_runs",
            "attach",
            "examples",
            "cli",
        ),
    ),
}


def findings() -> Iterator[Finding]:
    """All arrows that point back."""
    yield from _packages()
    yield from _rooms()
    yield from _cycles()


def _packages() -> Iterator[Finding]:
    for module in modules():
        package = module.name.split(".")[0]
        for found in module.imports:
            if (other := found.target.split(".")[0]) not in MAY_IMPORT[package]:
                yield Finding(
                    f"{module.where}:{found.line}",
                    f"{package} imports {other}",
                    "arrows point down (flows -> sweeps, infra -> refiner_core): hand the value "
                    "in, or move what both need into refiner_core",
                )
        if package == "refiner_core":
            yield from _foreign(module)
        if module.name.startswith("refiner_core.contract"):
            for found in module.imports:
                if not found.target.startswith("refiner_core.contract"):
                    yield Finding(
                        f"{module.where}:{found.line}",
                        f"the contract imports {found.target}",
                        "the contract is the lowest room: move what it needs into it",
                    )


def _foreign(module: Module) -> Iterator[Finding]:
    for node in ast.walk(module.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in NOT_IN_CORE:
                yield Finding(
                    f"{module.where}:{node.lineno}",
                    f"the science imports {name}",
                    "what speaks to schedulers, trackers and hubs belongs to infra",
                )


def _rooms() -> Iterator[Finding]:
    for top, order in ROOMS.items():
        place = {room: number for number, room in enumerate(order)}
        here = {_room(m.name, top) for m in modules(top.replace(".", "/"))} - {""}
        for room in sorted(here - set(order)):
            yield Finding(
                f"{top}.{room}",
                "a room that the order of rooms does not know",
                f"say in ROOMS of {_HERE} which rooms it may use: put it behind them",
            )
        for room in sorted(set(order) - here):
            yield Finding(top, f"there is no room {room!r}", f"take it out of ROOMS of {_HERE}")
        for module in modules(top.replace(".", "/")):
            mine = place.get(_room(module.name, top))
            for found in module.imports:
                other = place.get(_room(found.target, top))
                if mine is None or other is None or found.lazy or other <= mine:
                    continue
                yield Finding(
                    f"{module.where}:{found.line}",
                    f"{top}.{order[mine]} imports {found.target}, which stands above it",
                    "move what both need to the lower one, or hand it in; only a factory or "
                    "something slow may be imported inside a function",
                )


def _room(name: str, top: str) -> str:
    """The room of ``top`` that a module lies in; "" for ``top`` itself and all outside."""
    return name.removeprefix(f"{top}.").split(".")[0] if name.startswith(f"{top}.") else ""


def _cycles() -> Iterator[Finding]:
    """Modules that import each other, inside functions and for types alone too."""
    graph = {m.name: {i.target for i in m.imports} for m in modules()}
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        walk: list[Iterator[str]] = [iter((start,))]
        while walk:
            name = next(walk[-1], None)
            if name is None:
                walk.pop()
                if path:
                    done.add(path.pop())
            elif name in path:
                ring = [*path[path.index(name) :], name]
                yield Finding(
                    name,
                    f"a ring of imports: {' -> '.join(ring)}",
                    "move what they share into a module that imports neither",
                )
            elif name in graph and name not in done:
                path.append(name)
                walk.append(iter(sorted(graph[name] - {name})))


_HERE = "tests/lint/arrows.py"
