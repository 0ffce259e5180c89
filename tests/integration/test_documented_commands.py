"""Every command that a README shows runs, and every file and link exists.

In the order in which they stand, in one folder, as a reader would: what an early line makes, a
later one finds. Runs are the tiny recipe cut down to seconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from flows.cli.main import main
from infra.store.workspace import Workspace
from refiner_core.data.synthetic import generate_rows
from tests.support.command import LONGER, Finished
from tests.support.documented import ROOT, Shown, anchors, links, paths_named, shown_commands
from tests.support.judge_server import JudgeServer
from tests.support.known_judges import KnownJudge
from tests.support.planted_judges import PlantedJudges
from tests.support.recorded_sweep import RecordedSweep
from tests.support.require import require
from tests.support.slurm_cluster import missing

COMMANDS = shown_commands()
#: More overrides of the second run, which the first is compared with.
SECOND = (
    *("sft.max_train_steps=2", "grpo.num_training_steps=2", "evaluate.models=[grpo]"),
    *("evaluate.decoding=[greedy]", "stages=[data,sft,grpo,evaluate]"),
)


@dataclass(frozen=True)
class Trial:
    """How a command is tried.

    ``small``: a run of tiny that is cut down. ``planned``: what would run for hours, or on GPUs, is
    planned with the same words. ``slurm``: it needs one. ``where``: ``swept`` is a folder whose
    workspace has a finished sweep, ``checkout`` that of the project. ``by``: the file of tests that
    runs it.
    ``words`` are put in the place of others, ``more`` is added, ``stdin`` is typed, ``codes`` are
    good ends.
    """

    pattern: str
    small: bool = False
    planned: bool = False
    slurm: bool = False
    where: str = ""
    by: str = ""
    words: tuple[tuple[str, str], ...] = ()
    more: tuple[str, ...] = ()
    stdin: str = ""
    codes: tuple[int, ...] = (0,)


_JUDGE = (("http://127.0.0.1:8000/v1", "{judge}"), ("NAME", "scripted"))
_SLURM = (("/tmp/slurm", "{place}/slurm"),)
_TRIALS = "citation-weight-tiny:citation-0/seed1 citation-weight-tiny:citation-0.5/seed1"
#: The first whose pattern fits the whole command counts; without one it is run as it stands.
TRIALS = (
    Trial("make (run|test)", words=(("make ", "make --dry-run "),), where="checkout"),
    Trial("refiner run tiny", small=True),
    Trial("refiner run tiny seed=2 .*", small=True, more=SECOND),
    Trial("refiner run tiny dispatch.*", planned=True, words=_SLURM),
    Trial("refiner run RECIPE .*", planned=True, words=(("RECIPE", "tiny"),)),
    Trial("(CUDA_VISIBLE_DEVICES=.* )?refiner run .*", planned=True),
    Trial("refiner why .*", words=(("8.633", "{number}"),)),
    Trial("refiner report A B", words=(("A B", _TRIALS),), where="swept"),
    Trial("refiner diff A B", words=(("A B", "{first} {second}"),)),
    Trial("refiner ui", by="integration/test_ui.py"),
    Trial("refiner (tag|rm|bundle) RUN.*", words=(("RUN", "{first}"),)),
    Trial("refiner unbundle .*", words=(("RUN", "{first}"), ("DIR", "unbundled"))),
    Trial("refiner disk pin .*", words=(("grpo-0123456789ab", "{grpo}"),)),
    Trial("refiner publish RUN .*", words=(("RUN --step 50", "{first} --step 8"),)),
    Trial("refiner (cancel|resume)", codes=(0, 2)),  # nothing is left to end or to go on with
    Trial("refiner environments play .*", stdin="finish\n", codes=(0, 1)),  # unsolved
    Trial("refiner environments show tau2", codes=(0, 8)),  # where it is not installed
    Trial("refiner judge (ask|report) .*", words=_JUDGE),
    Trial("refiner judge servers .*", words=(("DIR", "runs"),)),
    Trial("refiner judge stop .*", words=(("[SERVICE] workspace=DIR", "workspace=runs"),)),
    Trial("refiner (rubrics report|reward label).*", by="integration/test_labels.py"),
    Trial("refiner rescore RUN1 RUN2 .*", words=(("RUN1 RUN2", "{first} {second}"),)),
    Trial("refiner rescore RUN .*", words=(("RUN", "{first}"),)),
    Trial("refiner (report|diff|status|cancel) citation-weight-tiny.*", where="swept"),
    Trial(r"python -m tests.support.slurm_cluster .*", words=_SLURM, where="checkout", slurm=True),
    Trial("export SLURM.*", words=_SLURM),
    Trial("export TEAM.*"),
    Trial("refiner notify test .*TEAM_HOOK.*", by="integration/test_notifications.py"),
    Trial("refiner sweep .* --yes", by="integration/test_sweep.py"),
    Trial("refiner nightly (run|status|page) .*", by="integration/test_nights.py"),
    Trial("refiner (serve.*|deploy .*)", by="integration/test_flows.py"),
    Trial("refiner card check me/.*", by="integration/test_publishing.py"),
    Trial("refiner adopt .*", by="integration/test_adopt.py"),
    Trial("refiner logs judge .*", by="integration/test_judge_service.py"),
    Trial("(srun .*)?refiner certify.*", by="integration/test_certify.py"),
    Trial("refiner prove-resume .*", by="integration/test_prove_resume.py"),
    Trial("(git clone|pip install|export TAU2|REFINER_TAU2).*", by="unit/test_tau2.py"),
)


def trial_of(shown: Shown) -> Trial:
    """How a command is tried."""
    found = (t for t in TRIALS if re.fullmatch(t.pattern, shown.text))
    return next(found, Trial(""))


@dataclass(frozen=True)
class Place:
    """Where a reader types: a folder with a finished run and all files that the READMEs name."""

    folder: Path
    names: dict[str, str]
    small: tuple[str, ...]

    @property
    def newest(self) -> str:
        """The run that was begun last."""
        return Workspace.read_only(self.folder / "runs").run_ids()[-1]

    def type(self, shown: Shown, trial: Trial) -> subprocess.CompletedProcess[str]:
        """Run a command as it stands, but for what its trial says."""
        text = shown.text.replace("refiner run", "refiner plan", 1) if trial.planned else shown.text
        for old, new in trial.words:
            assert old in text, f"no {old} in {text}"
            text = text.replace(old, new.format(second=self.newest, **self.names))
        more = (*self.small, *trial.more) if trial.small else ()
        text = " ".join((text, *map(shlex.quote, more)))
        cwd = {"": self.folder, "swept": self.folder / "swept", "checkout": ROOT}[trial.where]
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
        env = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": python_path,
            "REFINER_STATE_DIR": str(self.folder / "state"),  # a Prefect server of its own
            "COLUMNS": "120",
        }
        if re.fullmatch(rf"refiner ({LOOKING}) [^|<>&;$*]*", text):
            return in_process(text, cwd, env)
        return subprocess.run(
            ["bash", "-c", text],
            cwd=cwd,
            env=env,
            input=trial.stdin,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )


#: Commands that only read records run in this process: they need no shell and start no job.
LOOKING = "plan|show|list|explain|status|report|why|diff|disk|card|rubrics|protocols|rescore"


def in_process(text: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command without its interpreter's start."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, env),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(shlex.split(text)[1:])
    return subprocess.CompletedProcess(text, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    small_run: tuple[Path, Finished],
    small: tuple[str, ...],
) -> Iterator[Place]:
    """Made once, with a copy of the small run."""
    folder = tmp_path_factory.mktemp("reader")
    write_files(folder)
    shutil.copytree(small_run[0], folder / "runs")
    workspace = Workspace.read_only(folder / "runs")
    first = workspace.run_ids()[0]  # another test may have called it again
    stages = workspace.read_run(first).stages
    sweep = RecordedSweep(
        folder / "swept" / "runs", ("citation-0", "citation-0.5"), name="citation-weight-tiny"
    )
    sweep.write()
    with JudgeServer(KnownJudge()) as judge, JudgeServer(PlantedJudges(())) as own:
        names = {
            "place": str(folder),
            "first": first,
            "grpo": stages["grpo"],
            "number": a_number(workspace, stages),
            "judge": judge.base_url,
        }
        (folder / "my-judge.yaml").write_text(
            f"judge: {{kind: openai, base_url: {own.base_url}, model: planted-none-0}}\n"
        )
        made = Place(folder, names, (*small, *LONGER))
        yield made
        made.type(Shown("", "refiner server stop"), Trial(""))


def a_number(workspace: Workspace, stages: dict[str, str]) -> str:
    """A number of the run as its table prints it: one that is not 0."""
    result = workspace.read_result(stages["evaluate-grpo"])
    found = (e["value"] for e in result.report["reference"] if e["value"])
    return f"{next(found):.3f}"


def block(readme: str, language: str) -> str:
    """The first block of a language that a README shows."""
    found = re.search(rf"```{language}\n(.*?)```", (ROOT / readme).read_text(), re.S)
    return found[1]


def write_files(folder: Path) -> None:
    """Files that the READMEs speak of as the reader's own."""
    shipped = ROOT / "refiner_core" / "rubrics" / "sets"
    shutil.copy(shipped / "v3.yaml", folder / "my-rubrics.yaml")
    shutil.copy(ROOT / "flows" / "nightly" / "tiny-nightly.yaml", folder / "my.yaml")
    greedy = (ROOT / "flows" / "protocols" / "held-out-greedy-v1.yaml").read_text()
    (folder / "mine.yaml").write_text(greedy.replace("held-out-greedy-v1", "mine"))
    (folder / "refiner.yaml").write_text("include: tiny\n")
    (folder / "swept").mkdir()
    profile = re.findall(
        r"```yaml\n(description:.*?)```", (ROOT / "infra/README.md").read_text(), re.S
    )
    (folder / "my-cluster.yaml").write_text(profile[0])
    guess = (ROOT / "refiner_core" / "environments" / "README.md").read_text()
    (folder / "guess.py").write_text(re.findall(r"```python\n(.*?)```", guess, re.S)[0])
    for name, kind in (("demos", "sft"), ("prompts", "rl")):
        rows = (json.dumps(row) for row in generate_rows(kind, 60, 0))
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    (folder / "bin").mkdir()
    python = shlex.quote(sys.executable)
    for name, what in (("python", python), ("refiner", f"{python} -m flows.cli.main")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {what} "$@"\n')
        (folder / "bin" / name).chmod(0o755)


@pytest.mark.parametrize("shown", COMMANDS, ids=lambda shown: shown.id)
def test_every_shown_command_runs(shown: Shown, place: Place) -> None:
    trial = trial_of(shown)
    if trial.by:
        assert (ROOT / "tests" / trial.by).is_file(), f"{trial.by} should run {shown.text}"
        return
    if trial.slurm:
        require("slurm", not missing(), f"no Slurm of our own: {missing()}")
    done = place.type(shown, trial)
    assert done.returncode in trial.codes, (
        f"{shown.text}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    )


def test_no_trial_is_left_from_a_command_that_is_gone() -> None:
    idle = [t.pattern for t in TRIALS if all(trial_of(shown) is not t for shown in COMMANDS)]
    assert not idle


def test_named_files_and_link_targets_exist() -> None:
    named = ((readme, name, name.replace("NAME.py", "")) for readme, name in paths_named())
    gone = [f"{readme}: {name}" for readme, name, place in named if not (ROOT / place).exists()]
    for readme, target in links():
        path, _, anchor = target.partition("#")
        file = ((ROOT / readme).parent / path).resolve() if path else ROOT / readme
        if not file.exists() or (anchor and anchor not in anchors(file)):
            gone.append(f"{readme}: {target}")
    assert not gone


def test_every_shipped_recipe_is_in_the_table() -> None:
    table = set(re.findall(r"^\| `([\w-]+)` \|", (ROOT / "README.md").read_text(), re.M))
    shipped = {p.stem for p in (ROOT / "flows" / "recipes").glob("[!_]*.yaml")}
    assert shipped == table
