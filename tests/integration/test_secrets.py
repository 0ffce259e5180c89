"""Tokens and keys stay in the environment: no file, output or command line of a run has them,
whatever a Hub or a judge answers."""

import base64
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest

from infra.slurm.profiles import Profile
from tests.support.command import SMALL, Finished, Stage, refiner, start
from tests.support.git_hub import Fault, LoopbackHub, Request
from tests.support.judge_server import JudgeServer, Reply
from tests.support.prefect_server import private_server
from tests.support.slurm_campaign import Campaign
from tests.support.slurm_cluster import Cluster

TINY = (
    *(o for o in SMALL if not o.startswith(("tracking.", "sft.max_train"))),
    *("sft.max_train_steps=2", "log_level=debug", "dispatch.poll_s=0.1"),
)


@dataclass
class Canaries:
    """Values that must be found nowhere, and what was searched for them.

    ``seen`` are findings in command lines, which a thread watches.
    """

    values: dict[str, str]
    seen: set[str] = field(default_factory=set)
    looked_at: int = 0

    def needles(self) -> dict[bytes, str]:
        """Each value as it is, quoted for an address, and in base64 at any offset."""
        found: dict[bytes, str] = {}
        for name, value in self.values.items():
            found |= {value.encode(): name, quote(value).encode(): name}
            for before in range(3):
                text = base64.b64encode(b"\0" * before + value.encode())
                found[text[before + before // 2 + 1 : -4]] = f"{name} in base64"
        return found

    def in_bytes(self, data: bytes, where: object) -> list[str]:
        return [f"{name} in {where}" for needle, name in self.needles().items() if needle in data]

    def below(self, *folders: Path) -> list[str]:
        """Findings in files, links and names below folders."""
        found = []
        for path in (p for folder in folders for p in sorted(folder.rglob("*"))):
            self.looked_at += 1
            found += self.in_bytes(os.fsencode(path), f"the name {path}")
            if path.is_symlink():
                found += self.in_bytes(os.fsencode(path.readlink()), path)
            elif path.is_file():
                found += self.in_bytes(path.read_bytes(), path)
        return found

    def told(self, *calls: Finished) -> list[str]:
        """Findings in what calls have printed."""
        texts = [(call.stdout + call.stderr).encode() for call in calls]
        return [f for text in texts for f in self.in_bytes(text, "what was printed")]

    def watch(self, stop: threading.Event) -> None:
        """Look at the command lines of all processes."""
        while not stop.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen |= {*self.in_bytes(path.read_bytes(), "a command line")}
                except OSError:
                    continue  # it has ended


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canaries]:
    """In the environment of this module's calls, whose caches and temporary files lie apart."""
    values = {
        "HF_TOKEN": f"hf_{secrets.token_hex(17)}",
        "WANDB_API_KEY": secrets.token_hex(20),
        "REFINER_JUDGE_API_KEY": f"sk-{secrets.token_urlsafe(24)}",
    }
    found, stop = Canaries(values), threading.Event()
    thread = threading.Thread(target=found.watch, args=(stop,))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        for name in ("HF_HOME", "TMPDIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            folder = tmp_path_factory.getbasetemp() / "secrets-home" / name.lower()
            folder.mkdir(parents=True, exist_ok=True)
            patch.setenv(name, str(folder))
        thread.start()
        yield found
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the calls write is below it."""
    return tmp_path_factory.mktemp("everywhere")


@pytest.fixture(scope="module")
def hub(everywhere: Path, canaries: Canaries) -> Iterator[LoopbackHub]:
    with LoopbackHub(everywhere / "hub") as found, pytest.MonkeyPatch.context() as patch:
        found.account(canaries.values["HF_TOKEN"], "me")
        patch.setenv("HF_ENDPOINT", found.url)
        yield found


def arguments(everywhere: Path, *more: str) -> tuple[str, ...]:
    hub = ("publish.target=hub", "publish.repo_id=me/secret", "publish.patience_s=1")
    return (f"workspace={everywhere / 'runs'}", *TINY, *hub, *more)


@pytest.fixture(scope="module")
def refused(everywhere: Path, hub: LoopbackHub, canaries: Canaries) -> Finished:
    """A Hub and a judge that refuse, and say our own secrets to our face; with Prefect's server."""
    key = canaries.values["REFINER_JUDGE_API_KEY"]
    token = canaries.values["HF_TOKEN"]
    # An answer that repeats the token, as those of proxies and of other services do.
    says = f"the token {token} is not good for this"
    refuses = Fault("answer", status=401, says=says, headers={"X-Was": token}, times=99)
    refuses.where = lambda request: request.path == "/api/repos/create"
    hub.faults.append(refuses)
    echo = Reply(status=401, body=f'{{"error": "Incorrect API key provided: {key}"}}')
    with JudgeServer(lambda *_: echo) as judge, private_server(everywhere / "prefect"):
        judged = ("judge.kind=openai", "judge.model=x", f"judge.base_url={judge.base_url}")
        return refiner(
            *("run", "tiny", "stages=[data,sft,evaluate,publish]", "evaluate.models=[sft]"),
            *arguments(everywhere, *judged, "judge.max_retries=0"),
            *("dispatch.retries.judge_outage=0", "tracking.wandb=offline"),
        )


def test_a_refused_run_is_clean(refused: Finished, canaries: Canaries, everywhere: Path) -> None:
    assert refused.code in (2, 9), refused.stderr
    assert "hf auth login" in refused.stderr, "the fix"
    assert "judge.api_key_env names the variable" in refused.stderr, "so it does of the judge's key"
    assert canaries.told(refused) == []
    home = Path(os.environ["HF_HOME"]).parent
    assert canaries.below(everywhere, home) == []
    assert list((everywhere / "prefect").rglob("*.db")), "Prefect's database was looked at, too"
    assert list(everywhere.rglob("*.wandb")), "so was what the tracker has written"
    assert canaries.looked_at > 100


def test_a_published_run_leaves_no_secret_anywhere_not_even_when_it_is_killed(
    refused: Finished, hub: LoopbackHub, canaries: Canaries, everywhere: Path
) -> None:
    hub.faults.clear()
    more = ("stages=[data,sft,publish]", "tracking.wandb=disabled", "--no-server")
    call = ("run", "tiny", *arguments(everywhere, *more))
    publish = Stage(everywhere / "runs", "publish")

    def kill(_: Request) -> None:
        publish.kill()

    hub.faults += [
        Fault("answer", status=503, says=canaries.values["HF_TOKEN"]),
        Fault("call", where=lambda r: r.method == "PUT", does=kill),
    ]
    process = start(*call)
    said = process.communicate(timeout=400)
    assert len(publish.attempts) > 1, "it was killed in the middle of the upload"
    done = Finished(process.returncode, *said)
    assert done.code == 0, done.stderr
    assert "model.safetensors" in hub.contents("me/secret")
    where = f"workspace={everywhere / 'runs'}"
    shown = [
        refiner(*words, where)
        for words in (
            ("status", "--json"),
            ("status", "--incidents"),
            ("logs", "publish"),
            ("disk", "--json"),
            ("plan", "tiny", *arguments(everywhere, *more[:2])[1:], "--json"),
        )
    ]
    assert [call.code for call in shown] == [0] * len(shown), [c.stderr for c in shown]
    assert canaries.told(done, *shown) == []
    sent = b"".join([*hub.contents("me/secret").values(), *messages(hub)])
    assert canaries.in_bytes(sent, "what was published") == []
    assert canaries.below(everywhere, Path(os.environ["HF_HOME"]).parent) == []
    assert canaries.seen == set(), "command lines are for everybody to read"


def messages(hub: LoopbackHub) -> list[bytes]:
    """What commits say; git keeps them compressed."""
    git = hub.git("me/secret")
    return [git.read(commit) for commit, _ in git.history(git.refs("heads")["main"])]


@pytest.mark.slurm
def test_a_slurm_job_hides_the_token(slurm: Cluster, canaries: Canaries, tmp_path: Path) -> None:
    profile = Profile(name="test", cpu_stages="slurm", env={"OMP_NUM_THREADS": "1"})
    campaign = Campaign(tmp_path / "w", profile)
    try:
        campaign.behave({"work_s": 0.5})
        request = campaign.claim()
        campaign.submit(request)
        campaign.wait_begun(request)
        attempt = campaign.workspace.layout.attempt(*request.ref)
        job = str((campaign.workspace.read_control(attempt.job) or {})["job_id"])
        shown = slurm.run("scontrol", "show", "job", "-d", job)
        shown += slurm.run("scontrol", "write", "batch_script", job, "-")
        campaign.wait_dead(request)
    finally:
        campaign.end()
    assert canaries.in_bytes(shown.encode(), "what Slurm shows of the job") == []
    # This worker tells its environment on purpose: the token is there, and nowhere else.
    assert canaries.below(tmp_path) == [f"HF_TOKEN in {attempt.control / 'said.txt'}"]
    assert canaries.seen == set()


def test_the_scan_finds_what_it_looks_for(canaries: Canaries, tmp_path: Path) -> None:
    token = canaries.values["HF_TOKEN"]
    for number in range(3):
        text = base64.b64encode(b"user:pass"[:number] + token.encode() + b"tail")
        (tmp_path / str(number)).write_bytes(b"x" + text)
    (tmp_path / "plain").write_text(f"Bearer {token}.")
    assert len(canaries.below(tmp_path)) == 4
