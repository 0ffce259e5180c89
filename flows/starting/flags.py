"""Flags of `refiner init`: their meaning, valid values, and defaults on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from infra.doctor.check import ask
from infra.slurm.profiles import count_gpus
from refiner_core.contract.config import DataConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.data.rows import check_first_rows
from refiner_core.data.sources import SYNTHETIC, Which, resolve_source

_TIMEOUT_S = 10
NONE = "none"
TINY, DESK, TAU2 = "tiny", "desk", "tau2"
TAU2_ROWS = "Jarrodbarnes/tau2-sft-seed-v3@main"
TASKS = ("refiner", "agent", "command", "evaluate")
#: Tasks whose answers are judged with rubrics.
OF_REFINER = ("refiner", "evaluate")


class _Flag(NamedTuple):
    """A flag.

    Attributes
    ----------
    about
        Help text.
    words
        Offered values; without ``form`` the only valid ones.
    form, expected
        Regular expression of other valid values, and its description.
    tasks
        Tasks that have this flag.
    """

    about: str
    words: tuple[str, ...] = ()
    form: str = ""
    expected: str = ""
    tasks: tuple[str, ...] = TASKS


FLAGS: Mapping[str, _Flag] = {
    "task": _Flag(
        "refiner (default): cited answers from evidence; agent: tools over several turns; "
        "command: a training script of your own; evaluate: measure a model, train nothing",
        TASKS,
    ),
    "base": _Flag(
        "Model to start from. tiny (default): made on the spot, for trials on two CPU "
        "cores; else OWNER/NAME[@COMMIT] on the Hub, or a local folder",
        (TINY,),
        r"[A-Za-z0-9][\w.-]*/[\w.-]+(?:@[\w./-]+)?",
        "`tiny`, OWNER/NAME on the Hub, or a folder with a config.json",
    ),
    "environment": _Flag(
        "Environment of an agent. desk (default): shipped, runs anywhere; tau2: tau2-bench, if "
        "installed; FILE.py:NAME: your own",
        (DESK, TAU2),
        r".+\.py:\w+",
        "one of: desk, FILE.py:NAME of an existing file, and with a base model tau2",
        ("agent",),
    ),
    "sft": _Flag(
        "Demonstrations for SFT: FILE.jsonl, FILE.parquet, a `datasets` folder, OWNER/NAME@COMMIT "
        f"on the Hub; {SYNTHETIC}: made up (of an agent: by the environment's expert); none: no "
        "SFT",
        (SYNTHETIC, NONE),
        ".+",
        tasks=("refiner", "agent"),
    ),
    "rl": _Flag(
        f"Prompts to train and evaluate on: rows with rubrics, in the same forms; {SYNTHETIC} "
        "(default): made up",
        (SYNTHETIC,),
        "(?!none$).+",
        "prompts; without them there is nothing to train or evaluate on",
        OF_REFINER,
    ),
    "run": _Flag(
        "Command that trains; {model}, {output}, {seed} and {resume} are substituted: see `refiner "
        "show command`",
        tasks=("command",),
    ),
    "rubrics": _Flag(
        "instance (default): the rubrics of each row; a set's name or file: in addition",
        ("instance",),
        ".+",
        tasks=OF_REFINER,
    ),
    "judge": _Flag(
        "lexical (default): word overlap, no server; http://…: any OpenAI-compatible server; "
        "vllm: a server that refiner starts and stops",
        ("lexical", "vllm"),
        "https?://[^/].*",
        "`lexical`, `vllm`, or an address such as http://127.0.0.1:8000/v1",
        OF_REFINER,
    ),
    "judge-model": _Flag(
        "Model that judges, its name on the server; for vllm its name on the Hub", tasks=OF_REFINER
    ),
    "where": _Flag(
        "local: on this machine; slurm: as jobs of a cluster (default if Slurm answers)",
        ("local", "slurm"),
    ),
    "partition": _Flag("Partition for jobs with GPUs (default: the cluster's, or one with GPUs)"),
    "account": _Flag("Account of the cluster for the jobs (default: your first)"),
    "gpus": _Flag(
        "GPUs per node for a stage (default: all); 0 trains on the CPU",
        form=r"\d|[1-5]\d|6[0-4]",
        expected="a number of GPUs from 0 to 64",
    ),
    "workspace": _Flag(
        "Folder for records, checkpoints, logs (default: DIR/runs); on a cluster seen by all nodes"
    ),
    "publish": _Flag(
        "folder (default): the trained model goes into the workspace; OWNER/NAME: to a private "
        "repository on the Hub",
        ("folder",),
        r"[\w.-]+/[\w.{}-]+",
        "`folder`, or OWNER/NAME of a repository on the Hub",
        ("refiner", "agent", "command"),
    ),
}


def all_answers(given: Mapping[str, str], folder: Path) -> tuple[dict[str, str], dict[str, int]]:
    """A value for every flag, empty if it has no effect; and the cluster's partitions.

    Raises
    ------
    ConfigurationError
        A value is invalid, or a flag has no effect.
    """
    partitions, accounts = survey()
    made = {
        **{"task": TASKS[0], "base": TINY, "environment": DESK, "rl": SYNTHETIC},
        "run": "python train.py --model {model} --output_dir {output} --seed {seed} {resume}",
        **{"rubrics": "instance", "judge": "lexical", "judge-model": "Qwen/Qwen3.5-35B-A3B"},
        **{"where": "slurm" if partitions else "local", "partition": next(iter(partitions), "")},
        **{"account": next(iter(accounts), ""), "workspace": str(folder / "runs")},
        **{"publish": "folder", **given},
    }
    task, tiny, on_slurm = made["task"], made["base"] == TINY, made["where"] == "slurm"
    of_agent = {DESK: SYNTHETIC, TAU2: TAU2_ROWS}.get(made["environment"], NONE)
    gpus = partitions.get(made["partition"]) or 8
    gpus = gpus if on_slurm else _said("nvidia-smi", "-L").count("GPU ")
    made = {"sft": of_agent if task == "agent" else SYNTHETIC, "gpus": str(gpus), **made}

    worlds = (DESK,) if tiny else (DESK, TAU2)
    words = {"partition": tuple(partitions), "environment": worlds}
    for name, value in given.items():
        if name in FLAGS:
            _check(name, value, words.get(name, FLAGS[name].words))
    idle = {name for name, flag in FLAGS.items() if task not in flag.tasks}
    idle |= {"judge-model"} if made["judge"] == "lexical" else set()
    idle |= set() if on_slurm else {"partition", "account"}
    idle |= {"gpus"} if tiny and task != "command" else set()
    # A flag without effect is a mistake.
    if useless := [f"--{name}" for name in given if name in idle or name not in FLAGS]:
        raise ConfigurationError(
            f"{', '.join(useless)} would change nothing here.",
            expected="flags that go with "
            + ", ".join(f"--{n} {made[n]}" for n in ("task", "base", "judge", "where")),
            fix="leave it out, or change the others",
        )
    return {name: "" if name in idle else made[name] for name in FLAGS}, partitions


def _check(name: str, value: str, words: tuple[str, ...]) -> None:
    flag = FLAGS[name]
    if value in words or (re.fullmatch(flag.form, value) if flag.form else not words):
        return
    if name == "base" and (Path(value).expanduser() / "config.json").is_file():
        return
    raise ConfigurationError(
        f"--{name} is {value or '(nothing)'}.{suggest(value, words)}",
        expected=flag.expected or f"one of: {', '.join(words)}",
        fix=f"correct --{name}",
    )


def survey() -> tuple[dict[str, int], list[str]]:
    """Partitions of the cluster with the GPUs of their largest node, the best one for training
    first; and the user's accounts. Empty if no Slurm answers."""
    found: dict[str, int] = {}
    default = ""
    for line in _said("sinfo", "-h", "-o", "%P|%G").split():
        name, _, offered = line.partition("|")
        default = name.removesuffix("*") if name.endswith("*") else default
        name = name.removesuffix("*")
        found[name] = max(found.get(name, 0), count_gpus(offered))
    best = sorted(found, key=lambda name: (not found[name], name != default))
    user = os.environ.get("USER", "")
    command = ("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account")
    return {name: found[name] for name in best}, _said(*command).split() if found else []


def _said(*command: str) -> str:
    answer = ask(command, _TIMEOUT_S)
    return answer.out if answer.ok else ""  # missing or silent commands offer nothing


def inspect_rows(value: str, which: Which, *, parse: bool) -> tuple[str | None, str | None]:
    """Path and revision, in the form of a recipe, of a set of rows whose first rows can be read.

    Parameters
    ----------
    parse
        Whether rows must have a form of the refiner task; an agent's demonstrations have others.

    Raises
    ------
    DataError, ConfigurationError
        There are no rows, they cannot be read, or a row has no known form.
    """
    if value in ("", NONE, SYNTHETIC):
        return value if value == SYNTHETIC else None, None
    local = Path(value).expanduser()
    # ``OWNER/NAME@COMMIT`` is a data set on the Hub, at a commit.
    path, _, revision = value.rpartition("@") if not local.exists() else ("", "", "")
    if not path and "/" in value and not local.exists() and not local.parent.is_dir():
        raise ConfigurationError(
            f"There is no file or folder {value}; taken as a data set on the Hub, it has no "
            "commit.",
            expected="a file, or OWNER/NAME@COMMIT of a data set on the Hub",
            fix=f"correct the path, or write {value}@COMMIT",
        )
    named: dict[str, Any] = {
        f"{which}_path": path or value,
        f"{which}_revision": revision if path else None,
    }
    source = resolve_source(replace(DataConfig(), **named), which, pinned=False)
    if source.kind == "hub":
        return source.path, source.revision
    check_first_rows(source, parse=parse)
    return str(Path(source.path).expanduser().resolve()), None
