"""Area ``python``: the interpreter and the packages, against what refiner's own metadata asks for.

Reads metadata alone; imports none of the packages.
"""

from __future__ import annotations

import importlib.metadata as metadata
import platform
import shlex
import sys

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from infra.doctor.check import Check, Finding, Look, fine, found


def _interpreter(look: Look) -> Finding:
    asked = metadata.metadata("refiner")["Requires-Python"] or ""
    version = platform.python_version()
    what = f"Python {version} at {sys.executable}"
    if SpecifierSet(asked).contains(version, prereleases=True):
        return fine(what)
    mend = "python3.12 -m venv .venv && .venv/bin/python -m pip install ."
    return found("broken", f"{what}, and refiner asks {asked}", mend)


def _packages(look: Look) -> list[Finding]:
    wanted = [r for r in _requirements() if r.marker is None or r.marker.evaluate({"extra": ""})]
    wrong: list[Finding] = []
    for requirement in wanted:
        name, there = requirement.name, installed(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            is_ = "is not installed" if there is None else f"is {there}"
            asked = f"{name}{requirement.specifier}"
            what = f"{name} {is_}, and refiner asks for {asked}"
            wrong.append(found("broken", what, install(asked), name=name))
    named = ("torch", "transformers", "prefect", "submitit", "wandb", "huggingface-hub")
    versions = ", ".join(f"{name} {installed(name)}" for name in named)
    return wrong or [fine(f"all {len(wanted)} as asked for: {versions}")]


def _requirements() -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires("refiner") or ()]


def asked_for(name: str) -> str:
    """A requirement of refiner's own, as pip takes it: ``torch>=2.13,<2.15``."""
    return next((f"{r.name}{r.specifier}" for r in _requirements() if r.name == name), name)


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
    Check("python", "interpreter", _interpreter, needed=lambda _: True),
    Check("python", "packages", _packages, needed=lambda _: True),
)
