"""The house keeps its shape: arrows point down, planning never imports torch, help is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "sweeps", "infra", "refiner_core")
#: What each package may import of ours.
MAY_IMPORT = {
    "flows": {"flows", "sweeps", "infra", "refiner_core"},
    "sweeps": {"sweeps", "refiner_core"},
    "infra": {"infra", "refiner_core"},
    "refiner_core": {"refiner_core"},
}
#: The science knows nothing of orchestration.
NOT_IN_CORE = {"prefect", "submitit", "wandb", "huggingface_hub"}
#: What takes long to import, and who only looks has no use for.
HEAVY = ["torch", "transformers", "prefect", "submitit", "wandb", "pandas", "pyarrow", "datasets"]
TOP_LEVEL = {
    ".ci",
    ".git",
    ".gitignore",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "flows",
    "infra",
    "pyproject.toml",
    "refiner_core",
    "sweeps",
    "tests",
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_down(package: str) -> None:
    for path in sources(package):
        ours = {n.split(".")[0] for n in imports(path)} & set(PACKAGES)
        assert ours <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {ours}"


def test_the_science_imports_no_orchestration() -> None:
    for path in sources("refiner_core"):
        assert not {n.split(".")[0] for n in imports(path)} & NOT_IN_CORE, path.relative_to(ROOT)


def test_the_contract_imports_nothing_of_ours_but_itself() -> None:
    for path in sources("refiner_core/contract"):
        ours = {n for n in imports(path) if n.split(".")[0] in PACKAGES}
        assert all(n.startswith("refiner_core.contract") for n in ours), path.name


def test_no_module_is_without_a_docstring() -> None:
    for package in PACKAGES:
        for path in sources(package):
            assert ast.get_docstring(ast.parse(path.read_text())), path.relative_to(ROOT)


def test_nothing_strange_at_the_top_level() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    assert {line.split("/")[0] for line in tracked.stdout.splitlines()} <= TOP_LEVEL


def test_every_file_that_is_no_code_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = settings["tool"]["setuptools"]["package-data"]["*"]
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert any(path.match(g) for g in globs), f"{path.relative_to(ROOT)} is left out"


@pytest.mark.parametrize(
    ("argv", "forbidden"),
    [
        (
            ["--help"],
            ["torch", "transformers", "prefect", "omegaconf", "rich", "numpy", "submitit"],
        ),
        (["plan", "tiny", "workspace={tmp}/none"], ["torch", "prefect", "wandb"]),
        (["run", "refiner-gpt54", "--dry-run", "workspace={tmp}/none"], ["torch", "prefect"]),
        (["explain", "grpo", "tiny", "workspace={tmp}/none"], ["torch", "prefect"]),
        (["status", "--workspace", "{tmp}/none"], ["torch", "prefect"]),
        (
            ["sweep", "kl-tiny", "--dry-run", "workspace={tmp}/none"],
            ["torch", "prefect", "submitit", "aiohttp"],
        ),
        (["report", "workspace={tmp}/none"], ["torch", "prefect", "submitit", "aiohttp", "wandb"]),
        (["disk", "workspace={tmp}/none"], HEAVY),
        (["profiles"], HEAVY),
        (["logs", "data", "workspace={tmp}/none"], HEAVY),
        (["cancel", "nothing", "workspace={tmp}/none"], HEAVY),
    ],
)
def test_commands_that_only_look_import_nothing_heavy(
    argv: list[str], forbidden: list[str], tmp_path: Path
) -> None:
    script = (
        "import sys\n"
        "from flows.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        f"print('HEAVY', sorted(set({forbidden!r}) & set(sys.modules)), code, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *(a.format(tmp=tmp_path) for a in argv)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "HEAVY []" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == [], "a command that only looks has written something"
