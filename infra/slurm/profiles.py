"""Profiles: the features of a cluster, so that recipes need not know them.

In: a shipped name (``infra/profiles/*.yaml``) or the path of a YAML file. Out: a frozen
:class:`Profile`. Stages declare resources (GPUs, cores, memory, time); the profile says how they
are requested on this cluster, the setup of a job, and which stages stay on the machine where
`refiner` runs. The GPUs of its nodes are those that `sinfo` lists: nothing is known without it, or
if it does not answer soon, because plans are made on other machines, too.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from infra.host.processes import run_program
from refiner_core.contract.checks.secrets import assigned_secrets, is_secret_name
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import ConfigurationError, UnsupportedError
from refiner_core.contract.fields import suggest
from refiner_core.contract.files import find_file, shipped_files, yaml_fields
from refiner_core.contract.planned import PlannedStage

PROFILE_PACKAGE = "infra.profiles"
_SINFO_S = 5.0
_GPUS = re.compile(r"\bgpu:(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>\d+)")
#: The profile of recipes that name none.
DEFAULT_PROFILE = "default"

SbatchOptions = Mapping[str, str | int | bool | None]
#: How pydantic reads these from a file: no other keys, and `account: 12345` is a name.
_READING = {"extra": "forbid", "coerce_numbers_to_str": True}

#: Options that this package sets itself; in a profile they would break finding jobs again.
_OURS = {
    **dict.fromkeys(("job-name", "comment"), "jobs are found again by it"),
    **dict.fromkeys(("array", "wait", "parsable", "wrap", "test-only"), "arrays are made here"),
    **dict.fromkeys(("output", "error", "open-mode", "chdir"), "logs are read there"),
    **{k: f"set `{k}`" for k in ("partition", "account", "qos", "constraint", "exclude")},
    **{"nodelist": "set `nodelist`", "signal": "set `signal_lead_s`"},
    **dict.fromkeys(("requeue", "no-requeue"), "set `requeue`"),
    "time": "stages set it: `resources.time_limit_min`",
}


@dataclass(frozen=True)
class JobPlacement:
    """Place of jobs in the cluster; Slurm chooses what is not set.

    Attributes
    ----------
    partition, account, qos, constraint, reservation, nodelist
        Options of sbatch.
    exclude
        Nodes that no job may use, in addition to those that failed a stage.
    max_time_min
        The longest accepted time limit, minutes.
    sbatch
        Other options of sbatch, without the leading dashes: ``{mail-type: FAIL}``; `true` is
        an option without a value, `null` removes an option (``{mem: null}``).
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _READING

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: tuple[str, ...] = ()
    max_time_min: int | None = None
    sbatch: SbatchOptions = field(default_factory=dict)


@dataclass(frozen=True)
class Container:
    """Container of jobs: ``command`` precedes the interpreter, ``{image}`` is replaced."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _READING

    image: str = ""
    command: str = "apptainer exec --nv {image}"

    @property
    def prefix(self) -> str:
        """The shell words before the interpreter; empty without an image."""
        return self.command.format(image=self.image) if self.image else ""


@dataclass(frozen=True)
class Profile(JobPlacement):
    """One cluster.

    Attributes
    ----------
    gpu_option
        Option that requests GPUs: ``--gpus-per-node=N`` or ``--gres=gpu:N``.
    gpu_type
        Type within the option: ``--gres=gpu:a100:N``.
    max_gpus
        GPUs of one node; a stage that needs more is refused before it is submitted.
    cpu_stages
        Stages without GPUs run on this machine (``local``) or as jobs (``slurm``).
    cpu
        Place of such jobs; its missing fields are those of the other jobs.
    network
        Whether compute nodes reach the internet. If not, stages that need it run on this machine,
        and jobs have the offline switches set.
    setup, modules
        Shell lines of the batch script, then modules to load.
    python
        Interpreter in jobs; by default the one that runs `refiner`.
    env
        Settings for workers. No secrets: export these before you call `refiner`, jobs inherit them.
    array_min, array_limit, array_size
        The number of jobs of one shape from which an array is used, its tasks that run at a time,
        and its most tasks (Slurm's MaxArraySize less one).
    requeue
        Slurm may restart preempted jobs, and those of failed nodes, under the same id.
    signal_lead_s
        Least warning time before the time limit; longer where saving takes long.
    """

    name: str = ""
    description: str = ""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    gpu_type: str | None = None
    max_gpus: int | None = None
    cpu_stages: Literal["local", "slurm"] = "local"
    cpu: JobPlacement = JobPlacement()
    network: bool = False
    setup: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    container: Container = Container()
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    array_min: Annotated[int, Field(ge=2)] = 4
    array_limit: Annotated[int, Field(ge=1)] = 64
    array_size: Annotated[int, Field(ge=2)] = 1000
    requeue: bool = True
    signal_lead_s: int = 120

    def executor_for(self, stage: PlannedStage) -> Literal["local", "slurm"]:
        """Executor of a stage's job: this machine, or Slurm."""
        if stage.needs_network and not self.network:
            return "local"
        if stage.resources.gpus == 0 and stage.resources.nodes == 1:
            return self.cpu_stages
        return "slurm"

    def place_for(self, resources: Resources) -> JobPlacement:
        """Place of a job with these resources."""
        base = {f.name: getattr(self, f.name) for f in dataclasses.fields(JobPlacement)}
        if resources.gpus == 0:
            given = {f.name: getattr(self.cpu, f.name) for f in dataclasses.fields(JobPlacement)}
            more = {**self.sbatch, **self.cpu.sbatch}
            base |= {k: v for k, v in given.items() if v not in (None, (), {})} | {"sbatch": more}
        return JobPlacement(**base)

    def check(self, resources: Resources, title: str, *, needs_network: bool = False) -> None:
        """Refuse resources that this cluster can never provide.

        Raises
        ------
        ConfigurationError
            The time limit or the number of GPUs exceeds the profile.
        UnsupportedError
            The job needs the internet, which compute nodes do not have.
        """
        longest = self.place_for(resources).max_time_min
        for field_name, most in (("time_limit_min", longest), ("gpus", self.max_gpus)):
            asked = getattr(resources, field_name)
            if most is not None and asked > most:
                raise ConfigurationError(
                    f"{title} requests resources.{field_name}={asked}",
                    expected=f"at most {most}, the limit of profile {self.name!r}",
                    fix=f"set its `resources.{field_name}={most}`: a stage cut off by a time limit "
                    "continues in another attempt, and `resources.nodes` gives more GPUs",
                )
        if needs_network and not self.network:
            raise UnsupportedError(
                f"{title} needs the internet, which compute nodes of profile {self.name!r} do "
                "not reach",
                expected="a stage that runs where `refiner` does, or nodes with internet",
                fix="set `network: true` in the profile if its nodes have internet",
            )

    def lead_s(self, resources: Resources, save_s: float) -> int:
        """Seconds before the time limit at which the job is warned.

        Twice the longest save so far plus half a minute, at least ``signal_lead_s``, and at most
        half of the time limit: an earlier signal would leave less time for work than for saving.
        """
        wanted = max(self.signal_lead_s, round(2 * save_s + 30))
        return max(1, min(wanted, resources.time_limit_min * 60 // 2))


# ---------------------------------------------------------------- reading


def list_profiles() -> dict[str, str]:
    """Every shipped Slurm profile by name, with its description.

    Raises
    ------
    ConfigurationError
        A profile, and so the installation, is damaged.
    """
    return {name: load_profile(name).description for name in shipped_files(PROFILE_PACKAGE)}


def load_profile(name: str | None = None) -> Profile:
    """The profile of a shipped name or a YAML file.

    Raises
    ------
    ConfigurationError
        There is no such profile, a key is unknown, a value has the wrong type, or a setting looks
        like a secret; the message names what would fit.
    """
    path = find_file(name or DEFAULT_PROFILE, "Slurm profile", shipped_files(PROFILE_PACKAGE))
    values = yaml_fields(path, f"Profile {path}", "partition: gpu", may_be_empty=True)
    profile = _built({"name": path.stem, **values}, path)
    _check_values(profile, path)
    return profile


def _built(values: Mapping[str, Any], path: Path) -> Profile:
    try:
        return TypeAdapter(Profile).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        *parents, name = map(str, first["loc"])
        key, expected = ".".join((*parents, name)), first["msg"].replace("tuple", "list")
        expected = expected.removeprefix("Input should be ")
        if first["type"] == "unexpected_keyword_argument":
            known = [f.name for kind in (Profile, Container) for f in dataclasses.fields(kind)]
            expected = f"a field of profiles.{suggest(name, known)} Other options of sbatch go "
            expected += "below `sbatch:`"
        raise _wrong(key, first["input"], expected, path) from error


def _wrong(key: str, value: Any, expected: str, path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"`{key}` is {value!r} in profile {path}", expected=expected, fix=f"correct `{key}` there"
    )


def _check_values(profile: Profile, path: Path) -> None:
    for place, prefix in ((profile, ""), (profile.cpu, "cpu.")):
        for option in place.sbatch:
            name = option.lstrip("-").replace("_", "-")
            if name in _OURS:
                raise ConfigurationError(
                    f"`{prefix}sbatch.{option}` is set in profile {path}",
                    expected="options of sbatch that refiner does not set itself",
                    fix=f"leave it out ({_OURS[name]})",
                )
    options = map(str, (*profile.sbatch.values(), *profile.cpu.sbatch.values()))
    secrets = [name for name in profile.env if is_secret_name(name)]
    for line in (*profile.setup, profile.container.command, *options):
        secrets += [found.name for found in assigned_secrets(line) if found.is_set]
    for secret in secrets:
        raise ConfigurationError(
            f"Profile {path} sets {secret}, which looks like a secret",
            expected="no secrets in files: others read a profile, and records contain it",
            fix=f"export {secret} before you call `refiner`; jobs inherit it",
        )
    if profile.container.image and "{image}" not in profile.container.command:
        raise _wrong("container.command", profile.container.command, "text with {image}", path)


# ---------------------------------------------------------------- its nodes


def gpus_of_nodes(profile: Profile) -> tuple[int, ...] | None:
    """GPUs of each node for the profile's jobs with GPUs; None if Slurm does not tell."""
    place = profile.place_for(Resources(gpus=1))
    options = [f"--partition={place.partition}"] if place.partition else []
    options += [f"--nodes={place.nodelist}"] if place.nodelist else []
    try:
        done = run_program(["sinfo", "-h", "-N", *options, "-o", "%P|%n|%G"], _SINFO_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if line.count("|") == 2]
    if not place.partition:
        rows = [row for row in rows if row[0].endswith("*")] or rows
    nodes = {node: offered for _, node, offered in rows if node not in place.exclude}
    found = (count_gpus(offered, profile.gpu_type) for offered in nodes.values())
    return tuple(count for count in found if count)


def count_gpus(offered: str, kind: str | None = None) -> int:
    """GPUs of a node, all or of one type, from the words of `sinfo`: ``gpu:h100:8(S:0-1)``."""
    parts = _GPUS.finditer(offered)
    return sum(int(p["count"]) for p in parts if kind is None or p["type"] == kind)
