"""Area ``python``: the interpreter and the packages, against what refiner's own metadata asks for.

Reads metadata alone; imports none of the packages.
"""

from __future__ import annotations

import importlib.metadata as metadata
import platform
import shlex
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from infra.doctor.check import Check, Finding, Look

_AREA = "python"


def _interpreter(look: Look) -> Iterator[Finding]:
    asked = metadata.metadata("refiner")["Requires-Python"] or ""
    version = platform.python_version()
    fits = SpecifierSet(asked).contains(version, prereleases=True)
    yield Finding(
        _AREA,
        "interpreter",
        "ok" if fits else "broken",
        f"Python {version} at {sys.executable}" + ("" if fits else f", and refiner asks {asked}"),
        mend="" if fits else "python3.12 -m venv .venv && .venv/bin/python -m pip install .",
    )


def _packages(look: Look) -> Iterator[Finding]:
    wanted = [r for r in map(Requirement, metadata.requires("refiner") or ()) if _applies(r)]
    wrong: list[Requirement] = []
    for requirement in wanted:
        found = installed(requirement.name)
        if found is not None and requirement.specifier.contains(found, prereleases=True):
            continue
        wrong.append(requirement)
        there = "is not installed" if found is None else f"is {found}"
        asked = f"{requirement.name}{requirement.specifier}"
        yield Finding(
            _AREA,
            requirement.name,
            "broken",
            f"{requirement.name} {there}, and refiner asks for {asked}",
            mend=install(asked),
        )
    if not wrong:
        named = ("torch", "transformers", "prefect", "submitit", "wandb", "huggingface-hub")
        versions = ", ".join(f"{name} {installed(name)}" for name in named)
        yield Finding(_AREA, "packages", "ok", f"all {len(wanted)} as asked for: {versions}")


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def asked_for(name: str) -> str:
    """A requirement of refiner's own, as pip takes it: ``torch>=2.13,<2.15``."""
    wanted = map(Requirement, metadata.requires("refiner") or ())
    return next((f"{r.name}{r.specifier}" for r in wanted if r.name == name), name)


def installed(name: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def install(*asked: str) -> str:
    """The command that installs these into the environment of this process."""
    return shlex.join([sys.executable, "-m", "pip", "install", *asked])


CHECKS = (
    Check(_AREA, "interpreter", _interpreter, needed=lambda _: True),
    Check(_AREA, "packages", _packages, needed=lambda _: True),
)
