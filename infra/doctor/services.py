"""Areas ``hub``, ``wandb``, ``prefect``, ``network``, ``slurm``: services reached over a network.

In: the environment, the recipe's sections, the profile. Out: findings that name the owner of a
token or key, never the secret; addresses are shown without names and passwords. Reasons for which
publishing would be refused come from :func:`infra.hub.target.check_hub`, as before a run. Nothing
depends on Prefect's server: work continues without it. Imports neither wandb nor Prefect.

Of Slurm: commands, controller, accounting, and sbatch's verdict on the stages. Nothing is submitted
(``sbatch --test-only``); `srun refiner doctor` checks a compute node.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from infra.doctor.check import (
    CheckResult,
    DoctorCheck,
    ProgramOutput,
    SystemInfo,
    absent,
    ask,
    doubtful,
    fine,
    found,
)
from infra.host.files import existing
from infra.host.secrets import masked
from infra.hub.target import check_hub, endpoint_now, open_hub
from infra.jobs.dispatcher import JobRequest
from infra.prefect_server import KeyRefused, ServerInfo, http_status, server_status
from infra.prefect_server import check_server as check_prefect
from infra.slurm.submission import Submission, Submitter
from infra.store.atomic import TEMPORARY
from infra.tracking import check_server, masked_address, server_address
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import HubOutage, HubRefused, RefinerError

_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_ANSWER_S = 8.0
_OF_TOKENS = "publishing to the Hub, and private or gated models"


def _hub_needed(info: SystemInfo) -> bool:
    return info.publishes or bool(info.needs_network)


def _switched_off() -> list[str]:
    return [n for n in _SWITCHES if os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE")]


def _endpoint(info: SystemInfo) -> CheckResult:
    address, needed = masked(endpoint_now()), _hub_needed(info)
    if off := _switched_off():
        stages = info.needs_network or (["publish"] if info.publishes else [])
        needing = f", and {', '.join(stages)} need the network" if stages else ""
        what, fix = f"{', '.join(off)} set{needing}", f"unset {' '.join(off)}"
        why = "where jobs run without network, refiner sets them itself"
        return found(doubtful(stages), what, fix, why, name="offline switches")
    if info.offline:
        return found("missing", f"{address} was not asked (offline)")
    status = http_status(endpoint_now(), _ANSWER_S)
    if isinstance(status, int):
        return fine(f"{address} answers (HTTP {status})")
    why = "models and data from the Hub, publishing; through a proxy: `export https_proxy=…`"
    fix = f"curl --head {address}" if needed else ""
    return found(absent(needed), f"{address}: {masked(status)}", fix, why)


def _token(info: SystemInfo) -> CheckResult:
    from huggingface_hub import get_token

    where = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "stored by `hf auth login`"
    if get_token() is None:
        return found(absent(info.publishes), "there is none", "hf auth login", _OF_TOKENS)
    if info.offline or _switched_off():
        return fine(f"there is one ({where}); it was not tried (offline)")
    try:
        with open_hub("me/any", info.config.publish, patience_s=_ANSWER_S / 2) as hub:
            return fine(f"{where}: {hub.whoami().get('name')}")
    except HubOutage:
        what = f"there is one ({where}); the Hub gives no answer about it"
        return found(absent(info.publishes), what, "hf auth whoami", _OF_TOKENS)
    except HubRefused as error:
        what = f"{where}: {error.what}"
        return found(doubtful(info.publishes), what, "hf auth login", _OF_TOKENS)


def _publishing(info: SystemInfo) -> list[CheckResult]:
    if not info.publishes or info.offline or _switched_off():
        return []
    name = f"publishing to {info.config.publish.repo_id}"
    try:
        warnings = check_hub(info.config)
    except RefinerError as error:
        about_token = "token" in error.what.lower() or "logged in" in error.what.lower()
        fix = f"{info.command('run')} publish.repo_id=OWNER/NAME"
        fix = "hf auth login" if about_token else fix
        return [found("broken", masked(error.what), fix, masked(error.fix), name=name)]
    said = [found("warning", warning, "hf auth whoami", name=name) for warning in warnings]
    return said or [fine("the token may write there", name=name)]


# ---------------------------------------------------------------- W&B

_OF_TRACKING = "tracking.wandb=online, and `refiner track sync`"
_LOGIN = f"{sys.executable} -m wandb login"


def _online(info: SystemInfo) -> bool:
    return info.config.tracking.wandb == "online"


def _wandb_key(info: SystemInfo) -> CheckResult | None:
    if info.config.tracking.wandb == "disabled":
        return None
    address, online = server_address(), _online(info)
    shown = masked_address(address)
    if not _has_key(address):
        return found(absent(online), f"there is none for {shown}", _LOGIN, _OF_TRACKING)
    if info.offline:
        return fine(f"there is one for {shown}; not tried (offline)")
    try:
        check_server(address)
    except RefinerError as error:
        fix = f"{info.command('run')} tracking.wandb=offline" if online else ""
        return found(absent(online), error.what, fix, _OF_TRACKING, name="server")
    return fine(f"there is one for {shown}, which answers (`wandb login --verify` tries the key)")


def _has_key(address: str) -> bool:
    """Tell whether wandb would find a key: in its variable, then in a netrc file."""
    if os.environ.get("WANDB_API_KEY", "").strip():
        return True
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(file).authenticators(urlsplit(address).hostname or "") is not None
    return False


# ---------------------------------------------------------------- Prefect

_OF_PREFECT = "flow runs; the work itself continues without them"


def _server(info: SystemInfo) -> CheckResult:
    status = server_status()
    if status.state == "yours" and status.info is not None:
        return _users(status.info)
    if status.state == "running" and status.info is not None:
        return fine(f"Prefect {status.info.version} answers at {status.info.url}")
    if status.state == "starting":
        what = f"it runs but does not answer (yet); its log: {status.log}"
        return found("warning", what, "refiner server stop", _OF_PREFECT)
    return fine("none runs; `refiner run` starts one")


def _users(info: ServerInfo) -> CheckResult:
    """The user's own server: PREFECT_API_URL."""
    try:
        check_prefect(info)
    except RefinerError as error:
        refused = isinstance(error, KeyRefused)
        fix = "export PREFECT_API_AUTH_STRING=USER:PASSWORD" if refused else "unset PREFECT_API_URL"
        return found("warning", error.what, fix, _OF_PREFECT)
    return fine(f"{masked(info.api_url)} (PREFECT_API_URL) answers")


# ---------------------------------------------------------------- network


def _compute_nodes(info: SystemInfo) -> CheckResult | None:
    """The profile's network setting; on the node: whether the Hub is reached all the same."""
    if not info.on_slurm:
        return None
    says, shown = info.profile.network, masked(endpoint_now())
    if not info.on_node:
        local = ", ".join(info.needs_network) or "none of this recipe"
        here = "" if says else f"; stages that need it run on this machine ({local})"
        return fine(f"`network: {str(says).lower()}` in the profile{here}")
    status = http_status(endpoint_now(), _ANSWER_S)
    if isinstance(status, int):
        return fine(f"{shown} is reached", name="internet")
    what, why = f"{shown} is not reached ({masked(status)})", "a line of the profile"
    fix = "network: false" if says else ""
    return found("broken" if says else "missing", what, fix, why, name="internet")


# ---------------------------------------------------------------- Slurm

#: Limit for a command of Slurm, seconds. `scontrol` itself retries for much longer.
SLURM_S = 8.0
_LINE = re.compile(r"^\s*(?P<name>[A-Za-z]\w*)\s*=\s*(?P<value>.*?)\s*$")
_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_AGAIN, _ACCOUNTS_AGAIN = "sudo systemctl restart slurmctld", "sudo systemctl restart slurmdbd"


def _asked() -> tuple[dict[str, str], ProgramOutput]:
    """The controller's present settings by name, and its answer."""
    answer = ask(["scontrol", "show", "config"], SLURM_S)
    lines = (_LINE.match(line) for line in answer.out.splitlines())
    found = {m["name"]: m["value"] for m in lines if m}
    return {name: value for name, value in found.items() if value not in ("(null)", "N/A")}, answer


def _there() -> bool:
    return all(shutil.which(c) for c in _COMMANDS)


def _commands(info: SystemInfo) -> CheckResult:
    if lacking := [c for c in _COMMANDS if shutil.which(c) is None]:
        fix = f"{info.command('run')} dispatch.executor=local" if info.on_slurm else ""
        what = f"no {', '.join(lacking)} on PATH"
        return found(absent(info.on_slurm), what, fix, "dispatch.executor=slurm")
    version = ask(["sbatch", "--version"], SLURM_S)
    less = [c for c in ("sacct", "sinfo") if shutil.which(c) is None]
    without = f"; without {', '.join(less)}" if less else ""
    return fine(f"{version.out.strip() or 'they are on PATH'}{without}")


def _controller(info: SystemInfo) -> CheckResult | None:
    if not _there():
        return None
    settings, answer = _asked()
    if settings:
        cluster, version = settings.get("ClusterName"), settings.get("SLURM_VERSION")
        return fine(f"cluster {cluster} answers, Slurm {version}")
    said = answer.last_line
    fix = "export SLURM_CONF=/PATH/TO/slurm.conf" if "configuration source" in said else _AGAIN
    why = "starting jobs; running ones continue meanwhile"
    return found(absent(info.on_slurm), f"it gives no answer ({said})", fix, why)


def _accounting(info: SystemInfo) -> CheckResult | None:
    if not _there() or not (settings := _asked()[0]):
        return None
    kind, age = settings.get("AccountingStorageType"), settings.get("MinJobAge")
    if not kind or kind.endswith("/none"):
        return found(
            "missing",
            f"it is off: the ends of jobs come from the controller, which forgets after {age}",
            "AccountingStorageType=accounting_storage/slurmdbd",
            "without it, a job that ended unobserved counts as killed",
        )
    answer = ask(["sacct", "--noheader", "--allocations", "--starttime=now-1hour"], SLURM_S)
    if answer.ok:
        return fine(f"{kind} answers")
    what, why = f"{kind} gives no answer: {answer.last_line}", "the controller's memory"
    return found("warning", what, _ACCOUNTS_AGAIN, f"runs continue with {why}")


# ---------------------------------------------------------------- sbatch's verdict


def _test_only(info: SystemInfo) -> Iterator[CheckResult]:
    if not info.on_slurm or not _there() or not _asked()[0]:
        return
    shapes: dict[Resources, list[str]] = {}
    for stage in info.stages:
        if info.profile.executor_for(stage) == "slurm":
            shapes.setdefault(stage.resources, []).append(stage.name)
    if not shapes:
        shapes[Resources(time_limit_min=1, memory_gb=1)] = ["a tiny job"]
    for resources, names in shapes.items():
        yield _one_shape(info, resources, names)


def _one_shape(info: SystemInfo, resources: Resources, names: Sequence[str]) -> CheckResult:
    name, profile = f"job of {', '.join(names)}", info.profile
    kind = next((s.kind for s in info.stages if s.name == names[0]), "")
    request = JobRequest(names[0], 1, "doctor", resources, kind=kind)
    try:
        profile.check(resources, names[0])
        with TemporaryDirectory(
            prefix=f"{TEMPORARY}doctor-", dir=existing(info.workspace), ignore_cleanup_errors=True
        ) as folder:
            work = Submission("refiner-doctor", Path(folder), (request,), (["true"],))
            said = Submitter(profile, "python3").test_only(work, SLURM_S)
    except RefinerError as error:
        nodes = 'sinfo --format="%P %a %l %D nodes, %c cores, %m MB, %G, %f"'
        fix = error.fix if error.fix.startswith("scontrol") else nodes
        why = f"requested by profile {profile.name!r}; `refiner plan` shows the resources"
        return found("broken", error.what, fix, why, name=name)
    return fine(f"sbatch would accept it: {said}", name=name)


_STOP, _WHO = "refiner server stop", "hf auth whoami"
CHECKS = (
    DoctorCheck("prefect", "server", _server, limit_s=15, hung=_STOP),
    DoctorCheck("hub", "address", _endpoint, limit_s=12, needed=_hub_needed),
    DoctorCheck("hub", "token", _token, limit_s=25, needed=lambda x: x.publishes, hung=_WHO),
    DoctorCheck("hub", "publishing", _publishing, limit_s=30, needed=lambda x: x.publishes),
    DoctorCheck("wandb", "key", _wandb_key, limit_s=25, needed=_online),
    DoctorCheck("network", "compute nodes", _compute_nodes, limit_s=10),
    DoctorCheck("slurm", "commands", _commands, needed=lambda x: x.on_slurm, hung=_AGAIN),
    DoctorCheck("slurm", "controller", _controller, needed=lambda x: x.on_slurm, hung=_AGAIN),
    DoctorCheck("slurm", "accounting", _accounting, hung=_ACCOUNTS_AGAIN),
    DoctorCheck("slurm", "jobs of the recipe", _test_only, 60, lambda x: x.on_slurm, _AGAIN),
)
