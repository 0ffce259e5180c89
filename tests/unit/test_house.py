"""Packaging, and quick commands. ``make lint`` checks what is read from the source alone."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.lint.source import PACKAGES, ROOT

pytestmark = pytest.mark.slow

#: Packages that take long to import and that a look at records does not need.
HEAVY = "torch transformers prefect submitit wandb pandas pyarrow datasets"
TOP_LEVEL = {
    ".ci",
    ".git",
    ".gitignore",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "flows",
    "infra",
    "pyproject.toml",
    "requirements.lock",
    "refiner_core",
    "sweeps",
    "tests",
}


def test_nothing_strange_at_the_top_level() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    assert {line.split("/")[0] for line in tracked.stdout.splitlines()} <= TOP_LEVEL


def test_every_data_file_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = settings["tool"]["setuptools"]["package-data"]["*"]
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert any(path.match(g) for g in globs), f"{path.relative_to(ROOT)} is left out"


#: In this order in one process: what a command imports is forbidden to those before it.
LOOKING: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--help",), "torch transformers prefect omegaconf rich numpy submitit"),
    (("show", "grpo.beta"), f"{HEAVY} omegaconf"),
    (("list", "profiles"), HEAVY),
    (("disk", "workspace={tmp}/none"), HEAVY),
    (("logs", "data", "workspace={tmp}/none"), HEAVY),
    (("cancel", "nothing", "workspace={tmp}/none"), HEAVY),
    (("status", "--workspace", "{tmp}/none"), "torch prefect"),
    (("plan", "tiny", "workspace={tmp}/none"), "torch prefect wandb"),
    (("run", "refiner-gpt54", "--dry-run", "workspace={tmp}/none"), "torch prefect"),
    (("explain", "grpo", "tiny", "workspace={tmp}/none"), "torch prefect"),
    (("sweep", "kl-tiny", "--dry-run", "workspace={tmp}/none"), "torch prefect submitit aiohttp"),
    (("report", "workspace={tmp}/none"), "torch prefect submitit aiohttp wandb"),
    (("doctor", "tiny", "--offline", "--only", "recipe"), "torch prefect wandb transformers"),
)


def test_commands_that_only_look_import_nothing_heavy(tmp_path: Path) -> None:
    calls = [([a.format(tmp=tmp_path) for a in argv], words.split()) for argv, words in LOOKING]
    script = (
        "import sys\n"
        "from flows.cli.main import main\n"
        f"for argv, forbidden in {calls!r}:\n"
        "    main(argv)\n"
        "    heavy = sorted(set(forbidden) & set(sys.modules))\n"
        "    if heavy: sys.exit(f'{argv[0]} imports {heavy}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.iterdir()) == [], "a command that only looks has written something"


#: Modules that a reader of the way from the command to the first step has to look at, at most.
MOST_MODULES = 110
_UNTIL_THE_FIRST_JOB = """
import os, sys
from infra.jobs import dispatch

def submit(*_):
    print(sum(m.partition(".")[0] in {packages} for m in sys.modules))
    sys.stdout.flush()
    os._exit(0)

dispatch.LocalDispatcher.submit = submit
from flows.cli.main import main
sys.argv = ["refiner", "run", "tiny", "workspace={folder}", "--no-server"]
main()
"""


def test_a_run_starts_its_first_job_with_few_modules(tmp_path: Path) -> None:
    program = _UNTIL_THE_FIRST_JOB.format(packages=PACKAGES, folder=tmp_path / "runs")
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 50 < int(said.stdout) <= MOST_MODULES
