"""Which packages may import which, and the layers inside them.

In: the source. Out: findings. A layer may import, when it is loaded, only layers before it in
:data:`LAYERS`. An import inside a function (a factory that picks one of several, something that is
slow to load) counts between packages, and not between layers.
"""

from __future__ import annotations

import ast
import graphlib
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
#: The science does not depend on orchestration.
NOT_IN_CORE = ("prefect", "submitit", "wandb", "huggingface_hub")

#: Layers from the lowest up: each may use those before it.
LAYERS: Mapping[str, Sequence[str]] = {
    "refiner_core": (
        *(
            "contract",
            "http",
            "synthetic_words",
            "answers",
            "judges",
            "rubrics",
            "rewards",
            "generation",
        ),
        *("environments", "samples", "batches", "data", "models", "evaluation", "report", "cards"),
        *("nightly", "training", "rejection", "judge_report", "rescoring"),
    ),
    "refiner_core.training": (
        *("pulse", "ranks", "batches", "equality", "model", "engines", "steps", "export"),
        *("rollouts", "updates", "sft", "monitor", "grpo"),
    ),
    "infra": (
        *(
            "host",
            "store",
            "jobs",
            "judgements",
            "publishing",
            "hub",
            "process",
            "external",
            "disk",
        ),
        *("tracking", "profiles", "slurm", "prefect_server", "attempt", "orchestrator", "services"),
        *("ranks", "rollouts", "doctor"),
    ),
    "flows": (
        *("former", "recipes", "protocols", "checking", "stages", "ranks", "worker", "evaluations"),
        *("artifacts", "running", "notifying", "stored", "tracking", "cards", "publishing"),
        *("adopting", "disk", "plans", "durations", "doctor", "rescoring"),
        *("attacking", "judges", "sweeping", "runs", "why"),
        *("diffing", "proving", "certify"),
        *(
            "nightly",
            "reporting",
            "frames",
            "starting",
            "api",
            "flow_runs",
            "ensure_task",
            "pipeline",
        ),
        *("sweep", "serving", "terminal_runs", "attach", "examples", "cli"),
    ),
}


def findings() -> Iterator[Finding]:
    """All imports that point the wrong way."""
    yield from _packages()
    yield from _layers()
    yield from _cycles()


def _packages() -> Iterator[Finding]:
    for module in modules():
        package = module.name.split(".")[0]
        for found in module.imports:
            where, other = f"{module.where}:{found.line}", found.target.split(".")[0]
            if other not in MAY_IMPORT[package]:
                fix = "pass the value in, or move what both need into refiner_core"
                yield Finding(where, f"{package} imports {other}", fix)
            if _layer(module.name, "refiner_core") == "contract" and (
                _layer(found.target, "refiner_core") != "contract"
            ):
                fix = "the contract is the lowest layer: move what it needs into it"
                yield Finding(where, f"the contract imports {found.target}", fix)
        if package == "refiner_core":
            for name, line in _imported(module):
                if name.split(".")[0] in NOT_IN_CORE:
                    fix = "what talks to schedulers, trackers and hubs belongs to infra"
                    yield Finding(f"{module.where}:{line}", f"refiner_core imports {name}", fix)


def _imported(module: Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def _layers() -> Iterator[Finding]:
    for top, order in LAYERS.items():
        place = {layer: number for number, layer in enumerate(order)}
        inside = modules(top.replace(".", "/"))
        here = {_layer(m.name, top) for m in inside} - {""}
        for layer in sorted(here ^ place.keys()):
            fix = "list each folder and module once in LAYERS of tests/lint/arrows.py"
            yield Finding(f"{top}.{layer}", "not listed among the layers, or gone", fix)
        for module in inside:
            mine = place.get(_layer(module.name, top))
            for found in module.imports:
                other = place.get(_layer(found.target, top))
                if mine is not None and other is not None and other > mine and not found.lazy:
                    yield Finding(
                        f"{module.where}:{found.line}",
                        f"{top}.{order[mine]} imports {found.target}, which is a layer above it",
                        "move what both need to the lower one, or pass it in; only a factory or "
                        "something slow may be imported inside a function",
                    )


def _layer(name: str, top: str) -> str:
    """The layer of ``top`` that a module lies in; "" for ``top`` itself and all outside."""
    return name.removeprefix(f"{top}.").split(".")[0] if name.startswith(f"{top}.") else ""


def _cycles() -> Iterator[Finding]:
    """Modules that import each other, inside functions and for types alone too."""
    graph = {m.name: {i.target for i in m.imports} - {m.name} for m in modules()}
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        ring = " -> ".join(reversed(error.args[1]))
        fix = "move what they share into a module that imports neither"
        yield Finding(error.args[1][0], f"a cycle of imports: {ring}", fix)
