"""The Prefect server: one per user and node, started once; one that cannot be used is refused."""

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, temporary_settings

from infra import prefect_server as server
from infra.host.files import Mount
from infra.host.processes import ProcessId, host_name
from infra.prefect_server import (
    KeyRefused,
    ServerError,
    ServerInfo,
    check_server,
    ensure_server,
    passed_on,
    server_status,
    state_dir,
    stop_server,
    usable_server,
)
from refiner_core.contract.errors import (
    ConfigurationError,
    RefinerError,
    UnsupportedError,
    WorkspaceError,
)

#: Answers every request on the port given, as a server does that is up.
STAND_IN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A state folder of its own, and a small server in Prefect's place."""
    monkeypatch.setattr(
        server, "_command", lambda port: [sys.executable, "-c", STAND_IN, str(port)]
    )
    env = {"REFINER_STATE_DIR": str(tmp_path / "state"), "PATH": os.environ["PATH"]}
    yield env
    stop_server(env=env)


def test_the_life_of_a_server(env: dict[str, str]) -> None:
    assert server_status(env=env).state == "stopped"
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: ensure_server(20, env=env), range(4))]
    first = found[0]
    assert found == [first] * 4, "calls at the same time start one"
    assert server_status(env=env).info == first
    folder = state_dir(env)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "auth").stat().st_mode) == 0o600
    assert first.auth not in repr(first) + (folder / "server.json").read_text()
    assert first.client_env()["PREFECT_API_AUTH_STRING"] == first.auth
    ProcessId.of(first.pid).kill_group()
    second = ensure_server(20, env=env)
    assert second.pid != first.pid
    assert second.port == first.port, "a dead one is replaced on its port"
    process = ProcessId.of(second.pid)
    assert stop_server(env=env)
    assert not process.alive
    assert not stop_server(env=env)


def test_a_process_that_took_over_the_number_is_left_alone(env: dict[str, str]) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        folder = state_dir(env)
        later = f"{host_name()}:{stranger.pid}:12345.00"
        (folder / "server.json").write_text(json.dumps({"process": later, "port": 1}))
        assert server_status(env=env).state == "stopped"
        assert not stop_server(env=env)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_server_may_not_start(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_command", lambda port: [sys.executable, "-c", "0"])
    with pytest.raises(ServerError, match=r"see .*server\.log"):
        ensure_server(20, env=env)


def test_a_server_that_the_user_names_is_used_and_not_managed(env: dict[str, str]) -> None:
    env = {**env, "PREFECT_API_URL": "https://prefect.example/api/", "PREFECT_API_KEY": "k"}
    info = ensure_server(1, env=env)
    assert info.api_url == "https://prefect.example/api"
    assert info.url == "https://prefect.example"
    assert info.client_env() == {}
    assert server_status(env=env).state == "yours"
    assert passed_on(env)["PREFECT_API_KEY"] == "k"


def test_tokens_are_not_passed_on() -> None:
    env = {"PATH": "/bin", "HF_TOKEN": "t", "WANDB_API_KEY": "k", "PREFECT_LOGGING_LEVEL": "DEBUG"}
    assert passed_on(env) == {"PATH": "/bin"}


def test_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not on a network home, and it is refused where it cannot be made."""
    home = Mount(Path("/home"), "nfs4", "server:/home")
    monkeypatch.setattr(server, "mount_of", lambda path: home)
    assert server._base_dir({}) == Path(f"/var/tmp/refiner-{os.getuid()}")
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError, match="REFINER_STATE_DIR"):
        state_dir({"REFINER_STATE_DIR": str(tmp_path / "file")})


# ---------------------------------------------------------------- servers of others

HERE = version("prefect")
#: Status and body for an Authorization header.
Answer = Callable[[str | None], tuple[int, str]]
Serve = Callable[[Answer], ServerInfo]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A small server on loopback with given answers."""
    servers: list[ThreadingHTTPServer] = []

    def started(answer: Answer) -> ServerInfo:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = answer(self.headers.get("Authorization"))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body.encode())

        one = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(one)
        threading.Thread(target=one.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{one.server_port}"
        return ServerInfo(url, f"{url}/api", ours=False)

    yield started
    for one in servers:
        one.shutdown()
        one.server_close()


def keyed(key: str | None) -> tuple[int, str]:
    """A server that takes Basic a:b and Bearer k."""
    return (200, json.dumps(HERE)) if key in ("Basic YTpi", "Bearer k") else (401, "{}")


@pytest.mark.parametrize(
    ("answer", "kind", "what"),
    [
        (lambda key: (401, "{}"), KeyRefused, "answers 401: it wants"),
        (lambda key: (200, json.dumps("1.4.2")), UnsupportedError, "has version 1.4.2"),
        (lambda key: (200, "<html>the UI</html>"), ConfigurationError, "is not a Prefect server"),
        (lambda key: (200, "[]"), ConfigurationError, "is not a Prefect server"),
        (lambda key: (503, ""), ServerError, "answers 503"),
    ],
)
@pytest.mark.slow
def test_unusable_servers(
    serve: Serve, answer: Answer, kind: type[RefinerError], what: str
) -> None:
    info = serve(answer)
    with pytest.raises(kind) as refused:
        check_server(info)
    assert what in refused.value.what
    assert info.api_url in refused.value.what
    assert refused.value.expected
    assert refused.value.fix


def test_a_server_that_is_down_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:9/api")
    with pytest.raises(ServerError, match="does not answer") as refused:
        usable_server(1)
    assert "secret" not in str(refused.value)
    assert "correct PREFECT_API_URL, or unset it" in refused.value.fix


def test_keys_are_those_that_prefect_would_send(serve: Serve) -> None:
    info = serve(keyed)
    with temporary_settings({PREFECT_API_AUTH_STRING: "a:b"}):
        check_server(info)
    with temporary_settings({PREFECT_API_KEY: "k"}):
        check_server(info)
    with temporary_settings({PREFECT_API_KEY: "other"}), pytest.raises(KeyRefused):
        check_server(info)
    check_server(replace(info, ours=True, auth="a:b"))


def test_ours_of_another_version_is_stopped_first(serve: Serve) -> None:
    theirs = serve(lambda key: (200, json.dumps("2.20.1")))
    with pytest.raises(UnsupportedError, match="refiner server stop"):
        check_server(ServerInfo(theirs.url, theirs.api_url, ours=True, auth="a:b"))
