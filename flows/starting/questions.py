"""Questions of `refiner init`, each with its flag, its default, and a line of explanation.

In: earlier answers and what the machine offers. Out: checked answers, as texts by question.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from refiner_core.contract.config import DataConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.data.rows import parse_row
from refiner_core.data.sources import SYNTHETIC, Source, Which, read_rows, resolve_source
from refiner_core.rubrics import load_rubric_set, shipped_rubric_sets

_TIMEOUT_S = 10
_GPU = re.compile(r"\bgpu:(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>\d+)")
_LIMIT = re.compile(r"(?:(?:(?P<days>\d+)-)?(?P<hours>\d+):)?(?P<minutes>\d+):\d\d")


@dataclass(frozen=True)
class Partition:
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

    @property
    def has_slurm(self) -> bool:
        """True if a Slurm answers."""
        return bool(self.partitions)

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
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # what is not there, or does not answer, offers nothing
    return done.stdout if done.returncode == 0 else ""


#: Rows that are read: a form that is wrong is wrong from the first row on.
_READ = 200
NONE = "none"


@dataclass(frozen=True)
class Rows:
    """Rows that were found.

    Attributes
    ----------
    path, revision
        As a recipe names them; a path is whole.
    said
        In a line.
    """

    path: str | None
    revision: str | None
    said: str

    @property
    def own(self) -> bool:
        """True if they are somebody's own, and not made up."""
        return self.path not in (None, SYNTHETIC)


def look_at_rows(answer: str, which: Which, *, of_refiner: bool = True) -> Rows:
    """Read the first rows that ``answer`` names.

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
    if answer == NONE:
        return Rows(None, None, "none")
    if answer == SYNTHETIC:
        return Rows(SYNTHETIC, None, "made up by refiner")
    source = _rows_source(answer, which)
    if source.kind == "hub":
        said = "on the Hub: read when the run fetches them"
        return Rows(source.path, source.revision, said)
    count, forms = 0, list[str]()
    for raw in itertools.islice(read_rows(source), _READ):
        count += 1
        forms.append("messages" if raw.row.get("conversations") is None else "conversations")
        if of_refiner:
            parse_row(raw, which)
    named = " and ".join(f"`{form}`" for form in dict.fromkeys(forms))
    said = f"{'the first ' * (count == _READ)}{count} rows can be read, of the form {named}"
    return Rows(str(Path(source.path).expanduser().resolve()), None, said)


def _rows_source(answer: str, which: Which) -> Source:
    """``OWNER/NAME@COMMIT`` is a data set on the Hub, at a commit."""
    local = Path(answer).expanduser()
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
    return resolve_source(replace(DataConfig(), **named), which, pinned=False)


TINY, DESK, TAU2 = "tiny", "desk", "tau2"
TAU2_ROWS = "Jarrodbarnes/tau2-sft-seed-v3@main"
COMMAND = "python train.py --model {model} --output_dir {output} --seed {seed} {resume}"
JUDGE_MODEL = "Qwen/Qwen3.5-35B-A3B"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?:@[\w./-]+)?")


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


Check = Callable[[str, Asked], str]


@dataclass(frozen=True)
class Question:
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
    check
        Returns the answer as it is kept; raises a RefinerError that says what would fit.
    said
        What is worth telling of an answer, in a line.
    choices
        What is offered.
    """

    name: str
    text: str
    why: str
    default: Callable[[Asked], str]
    applies: Callable[[Asked], bool] = lambda asked: True
    check: Check = lambda answer, asked: answer
    said: Callable[[str, Asked], str] = lambda answer, asked: ""
    choices: Callable[[Asked], tuple[str, ...]] = lambda asked: ()

    @property
    def flag(self) -> str:
        """As it is typed."""
        return f"--{self.name}"


def _one_of(*names: str) -> Check:
    def check(answer: str, asked: Asked) -> str:
        if answer not in names:
            raise _wrong(answer + suggest(answer, names), f"one of: {', '.join(names)}")
        return answer

    return check


def _wrong(answer: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"The answer was {answer or '(nothing)'}.", expected=expected, fix="answer again"
    )


def _base(answer: str, asked: Asked) -> str:
    path = Path(answer).expanduser()
    if answer == TINY or (not path.exists() and _HUB_ID.fullmatch(answer)):
        return answer
    if not (path / "config.json").is_file():
        raise _wrong(answer, "`tiny`, OWNER/NAME on the Hub, or a folder with a config.json")
    return str(path.resolve())


def _environment(answer: str, asked: Asked) -> str:
    file, _, name = answer.rpartition(":")
    if file.endswith(".py"):
        path = Path(file).expanduser()
        if not path.is_file() or not name:
            raise _wrong(answer, "FILE.py:NAME of a file that is there")
        return f"{path.resolve()}:{name}"
    known = (DESK,) if asked.tiny else (DESK, TAU2)
    return _one_of(*known, "FILE.py:NAME")(answer, asked)


def _rows(which: Which) -> Check:
    def check(answer: str, asked: Asked) -> str:
        if answer == NONE and which == "rl":
            raise _wrong(answer, "prompts: there is nothing to train or evaluate on without")
        look_at_rows(answer, which, of_refiner=asked.of_refiner)
        return answer

    return check


def _rows_said(which: Which) -> Callable[[str, Asked], str]:
    return lambda answer, asked: look_at_rows(answer, which, of_refiner=asked.of_refiner).said


def _rubrics(answer: str, asked: Asked) -> str:
    if answer == "instance":
        return answer
    load_rubric_set(answer)  # refuses what is none, and says why
    return answer if answer in shipped_rubric_sets() else str(Path(answer).expanduser().resolve())


def _judge(answer: str, asked: Asked) -> str:
    parts = urlsplit(answer)
    if answer in ("lexical", "vllm") or (parts.scheme in ("http", "https") and parts.netloc):
        return answer.rstrip("/")
    raise _wrong(answer, "`lexical`, `vllm`, or an address such as http://127.0.0.1:8000/v1")


def _partition(answer: str, asked: Asked) -> str:
    known = [p.name for p in asked.around.partitions]
    if known and answer not in known:
        raise _wrong(answer + suggest(answer, known), f"one of: {', '.join(known)}")
    return answer


def _number(answer: str, asked: Asked) -> str:
    if not answer.isdigit() or int(answer) > 64:
        raise _wrong(answer, "a number of GPUs from 0 to 64")
    return str(int(answer))


def _gpus(asked: Asked) -> str:
    if asked["where"] != "slurm":
        return str(asked.around.gpus)
    partition = asked.around.partition(asked["partition"])
    return str(partition.gpus if partition and partition.gpus else 8)


def _publish(answer: str, asked: Asked) -> str:
    if answer != "folder" and not re.fullmatch(r"[\w.-]+/[\w.{}-]+", answer):
        raise _wrong(answer, "`folder`, or OWNER/NAME of a repository on the Hub")
    return answer


def _demonstrations(asked: Asked) -> str:
    if asked["task"] == "refiner" or asked["environment"] == DESK:
        return SYNTHETIC
    return TAU2_ROWS if asked["environment"] == TAU2 else NONE


def _yes_or_no(answer: str, asked: Asked) -> str:
    known = {"y": "yes", "yes": "yes", "n": "no", "no": "no"}
    return _one_of("yes", "no")(known.get(answer.lower(), answer), asked)


def _is(name: str, *values: str) -> Callable[[Asked], bool]:
    return lambda asked: asked[name] in values


_TASKS = ("refiner", "agent", "command", "evaluate")
QUESTIONS: tuple[Question, ...] = (
    Question(
        "task",
        "What is it about?",
        "refiner: cited answers from evidence; agent: tools over several turns; command: a "
        "training script of your own; evaluate: measure a model, train nothing",
        default=lambda asked: "refiner",
        check=_one_of(*_TASKS),
        choices=lambda asked: _TASKS,
    ),
    Question(
        "base",
        "Which model does it start from?",
        "tiny: made on the spot, to try things out on two CPU cores; else OWNER/NAME[@COMMIT] on "
        "the Hub, or a local folder",
        default=lambda asked: TINY,
        check=_base,
        choices=lambda asked: (TINY, "OWNER/NAME", "FOLDER"),
    ),
    Question(
        "environment",
        "What does the agent work in?",
        "desk: shipped, runs anywhere; tau2: tau2-bench, where it is installed; FILE.py:NAME: "
        "your own",
        default=lambda asked: DESK,
        applies=_is("task", "agent"),
        check=_environment,
        choices=lambda asked: (DESK, *[TAU2] * (not asked.tiny), "FILE.py:NAME"),
    ),
    Question(
        "sft",
        "Which demonstrations is it fine-tuned on first?",
        "FILE.jsonl, FILE.parquet, a `datasets` folder, OWNER/NAME@COMMIT on the Hub; "
        f"{SYNTHETIC}: made up (of an agent: by the environment's expert); none: no SFT",
        default=_demonstrations,
        applies=_is("task", "refiner", "agent"),
        check=_rows("sft"),
        said=_rows_said("sft"),
        choices=lambda asked: (SYNTHETIC, "FILE", "OWNER/NAME@COMMIT", NONE),
    ),
    Question(
        "rl",
        "Which prompts is it trained and evaluated on?",
        f"rows with rubrics, in the same forms; {SYNTHETIC}: made up",
        default=lambda asked: SYNTHETIC,
        applies=lambda asked: asked.of_refiner,
        check=_rows("rl"),
        said=_rows_said("rl"),
        choices=lambda asked: (SYNTHETIC, "FILE", "OWNER/NAME@COMMIT"),
    ),
    Question(
        "run",
        "Which command trains?",
        "{model}, {output}, {seed} and {resume} are filled in; see `refiner show command`",
        default=lambda asked: COMMAND,
        applies=_is("task", "command"),
    ),
    Question(
        "rubrics",
        "What are answers judged by?",
        "instance: the rubrics of each row; a set's name or file: these, too",
        default=lambda asked: "instance",
        applies=lambda asked: asked.of_refiner,
        check=_rubrics,
        choices=lambda asked: ("instance", *shipped_rubric_sets(), "FILE.yaml"),
    ),
    Question(
        "judge",
        "Who judges?",
        "lexical: word overlap, needs nothing; http://…: any OpenAI-compatible server; vllm: one "
        "that refiner starts and ends",
        default=lambda asked: "lexical",
        applies=lambda asked: asked.of_refiner,
        check=_judge,
        choices=lambda asked: ("lexical", "http://HOST:PORT/v1", "vllm"),
    ),
    Question(
        "judge-model",
        "Which model judges?",
        "as the server calls it; for vllm its name on the Hub",
        default=lambda asked: JUDGE_MODEL,
        applies=lambda asked: asked.of_refiner and asked["judge"] != "lexical",
    ),
    Question(
        "where",
        "Where does it run?",
        "local: on this machine; slurm: as jobs of a cluster",
        default=lambda asked: "slurm" if asked.around.has_slurm else "local",
        check=_one_of("local", "slurm"),
        choices=lambda asked: ("local", "slurm"),
    ),
    Question(
        "partition",
        "Which partition?",
        "of the cluster, for jobs with GPUs; nothing leaves it to Slurm",
        default=lambda asked: asked.around.best_partition(),
        applies=_is("where", "slurm"),
        check=_partition,
        choices=lambda asked: tuple(p.name for p in asked.around.partitions),
    ),
    Question(
        "account",
        "Which account pays?",
        "of the cluster; nothing leaves it to Slurm",
        default=lambda asked: asked.around.accounts[0] if asked.around.accounts else "",
        applies=_is("where", "slurm"),
        choices=lambda asked: asked.around.accounts,
    ),
    Question(
        "gpus",
        "How many GPUs of one node may a stage take?",
        "0 trains on the CPU; half of several sample rollouts while the others train",
        default=_gpus,
        applies=lambda asked: not asked.tiny or asked["task"] == "command",
        check=_number,
    ),
    Question(
        "workspace",
        "Where do runs lie?",
        "folder for records, checkpoints, logs; on a cluster one that all nodes see",
        default=lambda asked: str(asked.folder / "runs"),
        check=lambda answer, asked: str(Path(answer).expanduser().absolute()),
    ),
    Question(
        "publish",
        "Where does the trained model go?",
        "folder: below the workspace; OWNER/NAME: a private repository on the Hub",
        default=lambda asked: "folder",
        applies=_is("task", "refiner", "agent", "command"),
        check=_publish,
        choices=lambda asked: ("folder", "OWNER/NAME"),
    ),
    Question(
        "sweep",
        "A sweep to go with it?",
        "yes: also sweep.yaml, an ablation over this recipe to change as you like",
        default=lambda asked: "no",
        applies=_is("task", "refiner", "agent"),
        check=_yes_or_no,
        choices=lambda asked: ("yes", "no"),
    ),
)
