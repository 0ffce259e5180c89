"""What `make setup` asks pip for: a small torch where there is no GPU, checked hashes in CI."""

import os
import re
from pathlib import Path

import pytest

from tests.lint.source import PACKAGES, ROOT
from tests.support.command import finished

#: Stands for python, in a new environment too: notes what is asked.
PYTHON = """#!/bin/sh
echo "$@" >> "$ASKED"
case "$*" in
  *"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
esac
"""


def setup(folder: Path, *variables: str) -> list[str]:
    """What pip was asked to install."""
    python, asked = folder / "python", folder / "asked"
    python.write_text(PYTHON)
    python.chmod(0o755)
    make = ["make", "setup", f"PYTHON={python}", f"VENV={folder / 'venv'}", *variables]
    done = finished(make, ROOT, {**os.environ, "ASKED": str(asked)})
    assert done.code == 0, done.stderr
    lines = asked.read_text().splitlines()
    return [line.partition("--no-compile ")[2] for line in lines if " pip install " in line]


def test_without_a_gpu_torch_is_a_cpu_build(tmp_path: Path) -> None:
    asked = setup(tmp_path, "NVIDIA=/nonexistent", "TORCH_INDEX=http://127.0.0.1/cpu")
    assert re.fullmatch(r"--extra-index-url http://127\.0\.0\.1/cpu torch==[\d.]+\+cpu", asked[0])
    assert asked[1:] == ["--constraint constraints.txt --editable .[dev]"]


def test_ci_installs_what_is_locked_and_nothing_besides(tmp_path: Path) -> None:
    asked = setup(tmp_path, "LOCK=requirements.lock")
    assert asked == [
        "--require-hashes --no-deps --requirement requirements.lock",
        "--no-deps --no-build-isolation --editable .",
    ]
    assert "LOCK=requirements.lock" in (ROOT / ".ci" / "run").read_text()


def test_the_lock_has_the_tested_versions() -> None:
    lock, tests = ((ROOT / n).read_text() for n in ("requirements.lock", "constraints.txt"))
    locked = dict(re.findall(r"(?m)^(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}$", lock))
    tested = dict(re.findall(r"(?m)^(\S+)==(\S+)$", tests))
    other = {n: v for n, v in locked.items() if v.removesuffix("+cpu") != tested.get(n, v)}
    assert not other


@pytest.mark.slow
def test_what_is_imported_is_declared() -> None:
    """Otherwise it is gone with the package that happens to bring it."""
    import ast
    import sys
    import tomllib
    from importlib.metadata import packages_distributions

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {re.split(r"[<>=\[~ ]", d)[0].lower() for d in project["dependencies"]}
    for_tests = {re.split(r"[<>=\[~ ]", d)[0].lower() for e in extras.values() for d in e}
    brings = packages_distributions()
    missing = set()
    for folder in (*PACKAGES, "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if "tau2_fake" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    names = [node.module]
                for name in (n.partition(".")[0] for n in names):
                    known = {d.lower().replace("_", "-") for d in brings.get(name, ())}
                    allowed = declared if folder != "tests" else declared | for_tests
                    own = name in (*PACKAGES, "tests") or name in sys.stdlib_module_names
                    if not own and not known & allowed and path.name != "compare_two_arms.py":
                        missing.add(f"{folder}: {name} ({path.relative_to(ROOT)})")
    assert not missing, "\n".join(sorted(missing))
