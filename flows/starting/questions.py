"""Questions of `refiner init`, each with its flag, its default, and a line of explanation.

In: earlier answers and what the machine offers. Out: checked answers, as texts by question.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from infra.doctor.check import ask
from refiner_core.contract.config import DataConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.data.rows import parse_row
from refiner_core.data.sources import SYNTHETIC, Which, read_rows, resolve_source
from refiner_core.rubrics import rubric_set_path, shipped_rubric_sets

_TIMEOUT_S = 10
_GPU = re.compile(r"\bgpu:(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>\d+)")
_LIMIT = re.compile(r"(?:(?:(?P<days>\d+)-)?(?P<hours>\d+):)?(?P<minutes>\d+):\d\d")


class Partition(NamedTuple):
    """One partition; ``gpus`` of its largest node, ``max_time_min`` where it has a limit."""

    name: str
    is_default: bool
    gpus: int
    gpu_type: str = ""
    max_time_min: int | None = None


@dataclass(frozen=True)
class Surroundings:
    """Offers of the machine. ``partitions`` are empty where no Slurm answers."""

    partitions: tuple[Partition, ...] = ()
    accounts: tuple[str, ...] = ()
    gpus: int = 0

    def partition(self, name: str) -> Partition | None:
        """The partition of that name."""
        return next((p for p in self.partitions if p.name == name), None)

    def best_partition(self) -> str:
        """The cluster's default where it has GPUs, else the first that has, else the default."""
        ordered = sorted(self.partitions, key=lambda p: (p.gpus == 0, not p.is_default))
        return ordered[0].name if ordered else ""


def look_around() -> Surroundings:
    """Ask what is installed; a command that is not there, or does not answer, says nothing."""
    partitions = read_partitions(_said("sinfo", "-h", "-o", "%P|%G|%l"))
    accounts: tuple[str, ...] = ()
    if partitions:
        user = os.environ.get("USER", "")
        told = _said("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account")
        accounts = tuple(dict.fromkeys(line.strip() for line in told.splitlines() if line.strip()))
    return Surroundings(partitions, accounts, _said("nvidia-smi", "-L").count("GPU "))


def read_partitions(text: str) -> tuple[Partition, ...]:
    """The partitions that ``sinfo -h -o '%P|%G|%l'`` lists, in its order."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, gres, limit = (*line.strip().split("|"), "", "")[:3]
        if not name:
            continue
        match = _GPU.search(gres)
        gpus = int(match["count"]) if match else 0
        plain = name.removesuffix("*")
        known = found.get(plain)
        if known is None or gpus > known.gpus:
            kind = (match["type"] or "") if match else ""
            found[plain] = Partition(plain, name.endswith("*"), gpus, kind, _minutes(limit))
    return tuple(found.values())


def _minutes(limit: str) -> int | None:
    match = _LIMIT.fullmatch(limit)
    if match is None:  # `infinite`, or nothing
        return None
    return (int(match["days"] or 0) * 24 + int(match["hours"] or 0)) * 60 + int(match["minutes"])


def _said(*command: str) -> str:
    answer = ask(command, _TIMEOUT_S)
    return answer.out if answer.ok else ""  # what is not there, or does not answer, offers nothing


#: Rows that are read: a form that is wrong is wrong from the first row on.
_READ = 200
NONE = "none"


def look_at_rows(
    answer: str, which: Which, *, of_refiner: bool = True
) -> tuple[str | None, str | None]:
    """Path and revision, as a recipe has them, of rows whose first ones can be read.

    Parameters
    ----------
    of_refiner
        Whether they have to have a form of the refiner's rows; an agent's demonstrations have
        others.

    Raises
    ------
    DataError, ConfigurationError
        There are none, they cannot be read, or one has no known form.
    """
    if answer in (NONE, SYNTHETIC):
        return None if answer == NONE else answer, None
    local = Path(answer).expanduser()
    # ``OWNER/NAME@COMMIT`` is a data set on the Hub, at a commit.
    path, _, revision = answer.rpartition("@") if not local.exists() else ("", "", "")
    if not path and "/" in answer and not local.exists() and not local.parent.is_dir():
        raise ConfigurationError(
            f"There is no file or folder {answer}; taken as a data set on the Hub, it has no "
            "commit.",
            expected="a file, or OWNER/NAME@COMMIT of a data set on the Hub",
            fix=f"correct the path, or write {answer}@COMMIT",
        )
    named: dict[str, Any] = {
        f"{which}_path": path or answer,
        f"{which}_revision": revision if path else None,
    }
    source = resolve_source(replace(DataConfig(), **named), which, pinned=False)
    if source.kind == "hub":
        return source.path, source.revision
    for raw in itertools.islice(read_rows(source), _READ):
        if of_refiner:
            parse_row(raw, which)
    return str(Path(source.path).expanduser().resolve()), None


TINY, DESK, TAU2 = "tiny", "desk", "tau2"
TAU2_ROWS = "Jarrodbarnes/tau2-sft-seed-v3@main"
COMMAND = "python train.py --model {model} --output_dir {output} --seed {seed} {resume}"
JUDGE_MODEL = "Qwen/Qwen3.5-35B-A3B"


@dataclass(frozen=True)
class Asked:
    """All that a question may go by.

    Attributes
    ----------
    answers
        Those that were given already, by name of the question.
    folder
        The folder that is going to be made.
    """

    answers: Mapping[str, str]
    around: Surroundings
    folder: Path

    def __getitem__(self, name: str) -> str:
        return self.answers.get(name, "")

    @property
    def tiny(self) -> bool:
        """True if it is the model that is made on the spot."""
        return self["base"] == TINY

    @property
    def of_refiner(self) -> bool:
        """True if answers are written, that rubrics and judges look at."""
        return self["task"] in ("refiner", "evaluate")


Of = Callable[[Asked], Sequence[str]]


class Question(NamedTuple):
    """One question.

    Attributes
    ----------
    name
        Of the answer; its flag is ``--name``.
    text, why
        The question, and the line of explanation, which is the flag's help, too.
    default
        What is taken where nothing is answered.
    applies
        Whether it is asked, by earlier answers.
    offered
        Words to answer with; where nothing else is ``expected``, the only ones.
    fits, expected
        A form, or whether an answer fits; and what would, in words.
    """

    name: str
    text: str
    why: str
    default: str | Callable[[Asked], str]
    applies: Callable[[Asked], bool] = lambda asked: True
    offered: Sequence[str] | Of = ()
    fits: str | Callable[[str, Asked], object] = ""
    expected: str = ""

    def proposal(self, asked: Asked) -> str:
        """The default, by earlier answers."""
        return self.default if isinstance(self.default, str) else self.default(asked)

    def words(self, asked: Asked) -> Sequence[str]:
        """What is offered, by earlier answers."""
        return self.offered(asked) if callable(self.offered) else self.offered

    def check(self, answer: str, asked: Asked) -> str:
        """The answer.

        Raises
        ------
        RefinerError
            It does not fit; says what would.
        """
        words = self.words(asked)
        if callable(self.fits):
            good = bool(self.fits(answer, asked))
        elif self.fits:
            good = re.fullmatch(self.fits, answer) is not None
        else:
            good = answer in words or not words
        if not good:
            raise ConfigurationError(
                f"--{self.name} was answered by {answer or '(nothing)'}.{suggest(answer, words)}",
                expected=self.expected or f"one of: {', '.join(words)}",
                fix=f"correct --{self.name}",
            )
        return answer


def _base(answer: str, asked: Asked) -> bool:
    path = Path(answer).expanduser()
    named = re.fullmatch(r"tiny|[A-Za-z0-9][\w.-]*/[\w.-]+(?:@[\w./-]+)?", answer)
    return (path / "config.json").is_file() or bool(named and not path.exists())


def _environment(answer: str, asked: Asked) -> bool:
    file, _, name = answer.rpartition(":")
    own = file.endswith(".py") and bool(name) and Path(file).expanduser().is_file()
    return own or answer in (DESK, *[TAU2] * (not asked.tiny))


def _rows(which: Which) -> Callable[[str, Asked], bool]:
    def read(answer: str, asked: Asked) -> bool:
        look_at_rows(answer, which, of_refiner=asked.of_refiner)
        return answer != NONE or which == "sft"

    return read


def _gpus(asked: Asked) -> str:
    if asked["where"] != "slurm":
        return str(asked.around.gpus)
    partition = asked.around.partition(asked["partition"])
    return str(partition.gpus if partition and partition.gpus else 8)


def _demonstrations(asked: Asked) -> str:
    if asked["task"] == "refiner" or asked["environment"] == DESK:
        return SYNTHETIC
    return TAU2_ROWS if asked["environment"] == TAU2 else NONE


def _is(name: str, *values: str) -> Callable[[Asked], bool]:
    return lambda asked: asked[name] in values


def _is_of_refiner(asked: Asked) -> bool:
    return asked.of_refiner


QUESTIONS: tuple[Question, ...] = (
    Question(
        "task",
        "What is it about?",
        "refiner: cited answers from evidence; agent: tools over several turns; command: a "
        "training script of your own; evaluate: measure a model, train nothing",
        default="refiner",
        offered=("refiner", "agent", "command", "evaluate"),
    ),
    Question(
        "base",
        "Which model does it start from?",
        "tiny: made on the spot, to try things out on two CPU cores; else OWNER/NAME[@COMMIT] on "
        "the Hub, or a local folder",
        default=TINY,
        offered=(TINY,),
        fits=_base,
        expected="`tiny`, OWNER/NAME on the Hub, or a folder with a config.json",
    ),
    Question(
        "environment",
        "What does the agent work in?",
        "desk: shipped, runs anywhere; tau2: tau2-bench, where it is installed; FILE.py:NAME: "
        "your own",
        default=DESK,
        applies=_is("task", "agent"),
        offered=(DESK, TAU2),
        fits=_environment,
        expected="one of: desk, FILE.py:NAME of a file that is there, and with a base model tau2",
    ),
    Question(
        "sft",
        "Which demonstrations is it fine-tuned on first?",
        "FILE.jsonl, FILE.parquet, a `datasets` folder, OWNER/NAME@COMMIT on the Hub; "
        f"{SYNTHETIC}: made up (of an agent: by the environment's expert); none: no SFT",
        default=_demonstrations,
        applies=_is("task", "refiner", "agent"),
        offered=(SYNTHETIC, NONE),
        fits=_rows("sft"),
    ),
    Question(
        "rl",
        "Which prompts is it trained and evaluated on?",
        f"rows with rubrics, in the same forms; {SYNTHETIC}: made up",
        default=SYNTHETIC,
        applies=_is_of_refiner,
        offered=(SYNTHETIC,),
        fits=_rows("rl"),
        expected="prompts: there is nothing to train or evaluate on without",
    ),
    Question(
        "run",
        "Which command trains?",
        "{model}, {output}, {seed} and {resume} are filled in; see `refiner show command`",
        default=COMMAND,
        applies=_is("task", "command"),
    ),
    Question(
        "rubrics",
        "What are answers judged by?",
        "instance: the rubrics of each row; a set's name or file: these, too",
        default="instance",
        applies=_is_of_refiner,
        offered=lambda asked: ("instance", *shipped_rubric_sets()),
        fits=lambda answer, asked: answer == "instance" or rubric_set_path(answer),
    ),
    Question(
        "judge",
        "Who judges?",
        "lexical: word overlap, needs nothing; http://…: any OpenAI-compatible server; vllm: one "
        "that refiner starts and ends",
        default="lexical",
        applies=_is_of_refiner,
        offered=("lexical", "vllm"),
        fits=r"lexical|vllm|https?://[^/].*",
        expected="`lexical`, `vllm`, or an address such as http://127.0.0.1:8000/v1",
    ),
    Question(
        "judge-model",
        "Which model judges?",
        "as the server calls it; for vllm its name on the Hub",
        default=JUDGE_MODEL,
        applies=lambda asked: asked.of_refiner and asked["judge"] != "lexical",
    ),
    Question(
        "where",
        "Where does it run?",
        "local: on this machine; slurm: as jobs of a cluster",
        default=lambda asked: "slurm" if asked.around.partitions else "local",
        offered=("local", "slurm"),
    ),
    Question(
        "partition",
        "Which partition?",
        "of the cluster, for jobs with GPUs; nothing leaves it to Slurm",
        default=lambda asked: asked.around.best_partition(),
        applies=_is("where", "slurm"),
        offered=lambda asked: [p.name for p in asked.around.partitions],
    ),
    Question(
        "account",
        "Which account pays?",
        "of the cluster; nothing leaves it to Slurm",
        default=lambda asked: asked.around.accounts[0] if asked.around.accounts else "",
        applies=_is("where", "slurm"),
        offered=lambda asked: asked.around.accounts,
        fits=".*",
    ),
    Question(
        "gpus",
        "How many GPUs of one node may a stage take?",
        "0 trains on the CPU; half of several sample rollouts while the others train",
        default=_gpus,
        applies=lambda asked: not asked.tiny or asked["task"] == "command",
        fits=r"\d|[1-5]\d|6[0-4]",
        expected="a number of GPUs from 0 to 64",
    ),
    Question(
        "workspace",
        "Where do runs lie?",
        "folder for records, checkpoints, logs; on a cluster one that all nodes see",
        default=lambda asked: str(asked.folder / "runs"),
    ),
    Question(
        "publish",
        "Where does the trained model go?",
        "folder: below the workspace; OWNER/NAME: a private repository on the Hub",
        default="folder",
        applies=_is("task", "refiner", "agent", "command"),
        offered=("folder",),
        fits=r"folder|[\w.-]+/[\w.{}-]+",
        expected="`folder`, or OWNER/NAME of a repository on the Hub",
    ),
    Question(
        "sweep",
        "A sweep to go with it?",
        "yes: also sweep.yaml, an ablation over this recipe to change as you like",
        default="no",
        applies=_is("task", "refiner", "agent"),
        offered=("yes", "no"),
        fits="yes|y|no|n",
    ),
)
