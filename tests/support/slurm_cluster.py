"""A real Slurm of one's own on loopback: several virtual nodes, fake GPUs, gone without a trace.

    python -m tests.support.slurm_cluster up DIR
    export SLURM_CONF=DIR/slurm.conf            # then sbatch, squeue, scontrol work as usual
    python -m tests.support.slurm_cluster down DIR

In tests: ``with running_cluster(ClusterSpec()) as cluster``. It is up in about three seconds, needs
root and the packages that :data:`PACKAGES` names, and no service of the machine: munged, slurmctld
and one slurmd per node are started with keys, sockets and ports of their own, so that several
clusters live side by side. Partitions: ``low`` (preempted by the others, with ``grace_s`` of
warning), ``rough`` (preempted without), ``main`` (default) and ``high``.

Everything listens on 127.0.0.1. slurmdbd knows no such setting, so a cluster with accounting lives
in a network namespace of its own; commands reach it inside ``with cluster.joined():``.

What is started is noted with its start time in ``DIR/processes.json``; `down` ends these, and what
carries this cluster's SLURM_CONF in its environment (jobs), and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from infra.host.processes import ProcessId
from tests.support.slurm_conf import (
    ACCOUNTING_CONF,
    CGROUP_CONF,
    FIRST_SQL,
    SLURM_CONF,
    SLURMDBD_CONF,
)

#: Debian and Ubuntu; the second line is for accounting only.
PACKAGES = (
    "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge",
    "slurmdbd slurm-wlm-mysql-plugin mariadb-server iproute2 util-linux",
)
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
_ACCOUNTING_PROGRAMS = (
    "slurmdbd",
    "sacct",
    "sacctmgr",
    "mariadbd",
    "mariadb-install-db",
    "nsenter",
)
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class ClusterSpec:
    """What the cluster is like.

    ``grace_s`` is the warning that preempted jobs of partition `low` get; ``memory`` enforces
    ``--mem`` by cgroups; ``cred_s`` is how long a requeued job waits at least.
    """

    nodes: int = 3
    gpus: int = 2
    cpus: int = 8
    accounting: bool = False
    memory: bool = False
    grace_s: int = 20
    kill_wait_s: int = 2
    cred_s: int = 5


def missing(spec: ClusterSpec | None = None) -> str:
    """Why no such cluster can run here; empty if it can."""
    needed = _PROGRAMS + (_ACCOUNTING_PROGRAMS if spec and spec.accounting else ())
    absent = [p for p in needed if shutil.which(p, path=_search_path()) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (packages: {' '.join(PACKAGES)})"
    return "" if os.geteuid() == 0 else "needs root"


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass
class Cluster:
    """A cluster in a folder, running or not."""

    folder: Path
    spec: ClusterSpec
    port: int
    processes: dict[str, str] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        """What SLURM_CONF must name."""
        return self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """This process's environment, pointing at the cluster."""
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": _search_path()}

    def run(self, *command: str, check: bool = True) -> str:
        """What a Slurm command prints."""
        done = subprocess.run(
            [*self._inside(), *command],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Commands that this thread starts reach the cluster, also one in its own namespace."""
        with contextlib.ExitStack() as stack:
            before = os.environ.get("SLURM_CONF")
            stack.callback(_set_env, "SLURM_CONF", before)
            os.environ["SLURM_CONF"] = str(self.conf)
            if holder := self._holder():
                home = stack.enter_context(open("/proc/self/ns/net"))  # noqa: PTH123
                there = stack.enter_context(open(f"/proc/{holder}/ns/net"))  # noqa: PTH123
                stack.callback(_enter, home.fileno())
                _enter(there.fileno())
            yield

    # ------------------------------------------------------------ faults

    def kill_node(self, node: str) -> None:
        """The node is gone: its slurmd and all that it runs, at once."""
        self._end([f"slurmd-{node}"], signal.SIGKILL, 5)
        # All at once: a supervisor that saw its task die would tell the controller.
        doomed = [p for p, where in self._of_jobs().items() if where == node]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in doomed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def start_node(self, node: str) -> None:
        """The node is there (again)."""
        (self.folder / "spool" / node).mkdir(parents=True, exist_ok=True)
        self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node)
        self._wait(30, f"node {node}", lambda: self._is_up(node))

    def stop_controller(self) -> None:
        """The controller does not answer any more; jobs go on."""
        self._end(["slurmctld"], signal.SIGTERM, 10)

    def start_controller(self) -> None:
        """The controller answers (again)."""
        self._start("slurmctld", "slurmctld", "-D")
        self._wait(30, "slurmctld", lambda: "UP" in self.run("scontrol", "ping", check=False))

    def _is_up(self, node: str) -> bool:
        states = ("down", "unk", "drain", "boot")
        told = self.run("sinfo", "-h", "-n", node, "-o", "%t", check=False).split()
        if told and any(t.startswith("down") for t in told):
            self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        return bool(told) and not any(t.startswith(states) or t.endswith("*") for t in told)

    # ------------------------------------------------------------ up and down

    def up(self) -> None:
        """Start every daemon and wait until all nodes are idle."""
        for name in ("munge", "ctld", "log", "run", "spool", "gpu"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.folder / "munge"):
            folder.chmod(0o755)
        self._make_gpus()
        if self.spec.accounting:
            self._start("network", "unshare", "--net", "sh", "-c", _HOLD_NETWORK, inside=False)
            self._wait(10, "the network namespace", self._has_loopback)
        self._start_munge()
        (self.folder / "slurm.conf").write_text(self._slurm_conf())
        (self.folder / "gres.conf").write_text(self._gres_conf())
        (self.folder / "cgroup.conf").write_text(CGROUP_CONF if self.spec.memory else "")
        if self.spec.accounting:
            self._start_accounting()
        self.start_controller()
        for number in range(1, self.spec.nodes + 1):
            name = f"n{number}"
            (self.folder / "spool" / name).mkdir(exist_ok=True)
            self._start(f"slurmd-{name}", "slurmd", "-D", "-N", name)
        for number in range(1, self.spec.nodes + 1):
            self._wait(60, f"node n{number}", lambda n=f"n{number}": self._is_up(n))

    def down(self) -> None:
        """End jobs and daemons."""
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            if self._alive("slurmctld"):
                self.run("scancel", "--full", f"--user={os.getuid()}", check=False)
                deadline = time.monotonic() + self.spec.kill_wait_s
                while self._of_jobs() and time.monotonic() < deadline:
                    time.sleep(0.05)
        # slurmd waits for its steps, so these go first.
        for process in self._of_jobs():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        daemons = [n for n in self.processes if n.startswith("slurmd-")]
        self._end([*daemons, "slurmctld"], signal.SIGTERM, 5)
        for name in ("slurmdbd", "mariadbd", "munged", "network"):
            self._end([name], signal.SIGTERM, 20)
        if self.spec.memory:
            _remove_empty_cgroups(self.spec.nodes)

    # ------------------------------------------------------------ parts

    def _start_munge(self) -> None:
        key = self.folder / "munge" / "key"
        if not key.exists():
            key.write_bytes(secrets.token_bytes(128))
            key.chmod(0o400)
        run = self.folder / "run"
        self._start(
            "munged",
            *("munged", "--foreground", "--force", "--num-threads=2"),
            *(f"--key-file={key}", f"--socket={self.folder}/munge/sock"),
            *(f"--pid-file={run}/munged.pid", f"--log-file={self.folder}/log/munged.log"),
            f"--seed-file={self.folder}/munge/seed",
        )
        self._wait(10, "munged", (self.folder / "munge" / "sock").exists)

    def _start_accounting(self) -> None:
        data = self.folder / "db"
        if not (data / "mysql").exists():
            data.mkdir(exist_ok=True)
            shutil.chown(data, "mysql")
            subprocess.run(
                [
                    *("mariadb-install-db", "--no-defaults", "--user=mysql", "--skip-test-db"),
                    *(f"--datadir={data}", "--auth-root-authentication-method=normal"),
                ],
                check=True,
                capture_output=True,
            )
        first = self.folder / "first.sql"
        first.write_text(FIRST_SQL)
        first.chmod(0o644)
        self._start(
            "mariadbd",
            *("mariadbd", "--no-defaults", "--user=mysql", f"--datadir={data}"),
            *("--bind-address=127.0.0.1", f"--port={self.port + 2}", f"--socket={data}/sock"),
            *(f"--pid-file={data}/pid", "--skip-name-resolve", "--skip-log-bin"),
            *(f"--init-file={first}", "--innodb-buffer-pool-size=64M"),
            *("--innodb-log-file-size=32M", "--innodb-flush-log-at-trx-commit=0"),
            "--innodb-lock-wait-timeout=900",
        )
        self._wait(60, "mariadbd", lambda: self._listens(self.port + 2))
        conf = self.folder / "slurmdbd.conf"
        ports = {"dbd": self.port + 1, "sql": self.port + 2}
        conf.write_text(SLURMDBD_CONF.format(s=self.folder, host=_host(), **ports))
        conf.chmod(0o600)
        self._start("slurmdbd", "slurmdbd", "-D")
        self._wait(30, "slurmdbd", lambda: self._listens(self.port + 1))
        with contextlib.suppress(RuntimeError):  # it may have registered by itself
            self.run("sacctmgr", "--immediate", "add", "cluster", "lab")

    def _slurm_conf(self) -> str:
        spec, processes = self.spec, "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none"
        if spec.memory:
            processes = "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/cgroup"
        accounting = "AccountingStorageType=accounting_storage/none"
        if spec.accounting:
            accounting = ACCOUNTING_CONF.format(s=self.folder, dbd=self.port + 1)
        first = self.port + 10
        return SLURM_CONF.format(
            s=self.folder,
            host=_host(),
            ctld=self.port,
            slurmd=f"{first}-{first + spec.nodes - 1}" if spec.nodes > 1 else first,
            gres=f"Gres=gpu:{spec.gpus}" if spec.gpus else "",
            processes=processes,
            accounting=accounting,
            names=f"n[1-{spec.nodes}]" if spec.nodes > 1 else "n1",
            **{k: getattr(spec, k) for k in ("cpus", "grace_s", "kill_wait_s", "cred_s")},
        )

    def _make_gpus(self) -> None:
        """slurmd asks for a character device per GPU: copies of /dev/null."""
        for number in range(self.spec.gpus):
            device = self.folder / "gpu" / str(number)
            if not device.exists():
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))

    def _gres_conf(self) -> str:
        if not self.spec.gpus:
            return ""
        last = self.spec.gpus - 1
        files = f"{self.folder}/gpu/[0-{last}]" if last else f"{self.folder}/gpu/0"
        names = f"n[1-{self.spec.nodes}]" if self.spec.nodes > 1 else "n1"
        return f"NodeName={names} Name=gpu File={files}\n"

    def _start(self, name: str, *command: str, inside: bool = True) -> None:
        if self._alive(name):
            return
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                [*(self._inside() if inside else ()), *command],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes[name] = str(ProcessId.of(process.pid))
        self.save()

    def _end(self, names: Sequence[str], number: int, timeout_s: float) -> None:
        ours = [ProcessId.parse(self.processes[n]) for n in names if n in self.processes]
        for process in (p for p in ours if p.alive):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        for process in ours:
            if not process.wait_ended(timeout_s):
                os.kill(process.pid, signal.SIGKILL)
                process.wait_ended(5)
        for name in names:
            self.processes.pop(name, None)
        self.save()

    def _alive(self, name: str) -> bool:
        return name in self.processes and ProcessId.parse(self.processes[name]).alive

    def _of_jobs(self) -> dict[psutil.Process, str]:
        """Processes of jobs, by the SLURM_CONF that they carry, with their supervisors; and the
        node of each."""
        found: dict[psutil.Process, str] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                settings = process.environ()
                if settings.get("SLURM_CONF") != str(self.conf) or "SLURM_JOB_ID" not in settings:
                    continue
                found[process] = settings.get("SLURMD_NODENAME", "")
                parent = process.parent()
                if parent is not None and parent.name() == "slurmstepd":  # has no environment
                    found[parent] = found[process]
        return found

    def _holder(self) -> int | None:
        name = self.processes.get("network")
        return None if name is None else ProcessId.parse(name).pid

    def _inside(self) -> tuple[str, ...]:
        holder = self._holder()
        return () if holder is None else ("nsenter", f"--net=/proc/{holder}/ns/net")

    def _has_loopback(self) -> bool:
        return "192.0.2.1" in self.run("ip", "address", "show", "lo", check=False)

    def _listens(self, port: int) -> bool:
        """By the kernel's table, so that it works in a namespace too."""
        wanted = f":{port:04X} "
        table = self.run("cat", "/proc/net/tcp", check=False).splitlines()
        return any(wanted in row and " 0A " in row for row in table)

    def _wait(self, timeout_s: float, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not there():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come up; see {self.folder / 'log'}")
            time.sleep(0.05)

    def save(self) -> None:
        """Note what was started, for `down` from another process."""
        state = {"spec": asdict(self.spec), "port": self.port, "processes": self.processes}
        (self.folder / "processes.json").write_text(json.dumps(state, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Cluster:
        """The cluster that was started in ``folder``."""
        state = json.loads((folder / "processes.json").read_text())
        return cls(folder, ClusterSpec(**state["spec"]), state["port"], state["processes"])


@contextlib.contextmanager
def running_cluster(spec: ClusterSpec | None = None) -> Iterator[Cluster]:
    """A cluster in a temporary folder (sockets need short paths), gone afterwards."""
    spec = spec or ClusterSpec()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(folder, spec, free_ports(10 + spec.nodes))
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive free ports, below those that the kernel assigns.

    Chosen at random, so that test processes that start at once do not choose the same.
    """
    while True:
        first = 12_000 + secrets.randbelow(20_000 // count) * count
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _set_env(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _remove_empty_cgroups(nodes: int) -> None:
    for number in range(1, nodes + 1):
        for top in Path("/sys/fs/cgroup").glob(f"*/slurm_n{number}"):
            for folder in sorted(top.rglob("*"), reverse=True):
                if folder.is_dir():
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            with contextlib.suppress(OSError):
                top.rmdir()


#: slurmdbd wants an address that does not begin with 127; this one is for documentation only.
_HOLD_NETWORK = "ip link set lo up && ip addr add 192.0.2.1/32 dev lo && exec sleep infinity"


def main(argv: Sequence[str] | None = None) -> int:
    """Start or stop a cluster from the shell."""
    parser = argparse.ArgumentParser(prog="tests.support.slurm_cluster", description=__doc__)
    parser.add_argument("command", choices=("up", "down"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    folder = args.folder.absolute()
    if args.command == "down":
        Cluster.load(folder).down()
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(folder, ClusterSpec(), free_ports(10 + ClusterSpec.nodes))
    try:
        cluster.up()
    except BaseException:
        cluster.down()
        raise
    profile = folder / "profile.yaml"
    profile.write_text("description: every stage is a job on loopback\ncpu_stages: slurm\n")
    print(f"export SLURM_CONF={cluster.conf}")
    print(f"refiner run tiny dispatch.executor=slurm dispatch.profile={profile}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
