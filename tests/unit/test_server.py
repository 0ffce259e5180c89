"""One server per user and node: found, started once, stopped by whoever started it. No Prefect."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import prefect_server as server
from infra import prefect_server as server_state
from infra.host.files import Mount
from infra.host.processes import ProcessId, host_name
from infra.prefect_server import (
    ServerError,
    ensure_server,
    passed_on,
    server_status,
    state_dir,
    stop_server,
)
from refiner_core.contract.errors import WorkspaceError

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


def test_the_first_call_starts_it_and_later_ones_find_it(env: dict[str, str]) -> None:
    assert server_status(env=env).state == "stopped"
    first = ensure_server(20, env=env)
    assert ensure_server(20, env=env) == first
    assert server_status(env=env).info == first


def test_callers_at_once_start_one(env: dict[str, str]) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_server(20, env=env).pid))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_dead_one_is_replaced_on_the_same_port(env: dict[str, str]) -> None:
    first = ensure_server(20, env=env)
    ProcessId.of(first.pid).kill_group()
    second = ensure_server(20, env=env)
    assert second.pid != first.pid
    assert second.port == first.port


def test_stopping_ends_that_process_and_nothing_else(env: dict[str, str]) -> None:
    process = ProcessId.of(ensure_server(20, env=env).pid)
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


def test_one_that_ends_at_once_is_given_up(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_key_stays_in_a_private_file(env: dict[str, str]) -> None:
    info = ensure_server(20, env=env)
    folder = state_dir(env)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "auth").stat().st_mode) == 0o600
    assert info.auth not in repr(info) + (folder / "server.json").read_text()
    assert info.client_env()["PREFECT_API_AUTH_STRING"] == info.auth


def test_our_tokens_are_not_passed_on() -> None:
    env = {"PATH": "/bin", "HF_TOKEN": "t", "WANDB_API_KEY": "k", "PREFECT_LOGGING_LEVEL": "DEBUG"}
    assert passed_on(env) == {"PATH": "/bin"}


def test_the_state_folder_moves_off_a_network_home(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Mount(Path("/home"), "nfs4", "server:/home")
    monkeypatch.setattr(server_state, "mount_of", lambda path: home)
    assert server_state._base_dir({}) == Path(f"/var/tmp/refiner-{os.getuid()}")
    assert server_state._base_dir({"REFINER_STATE_DIR": "/mine"}) == Path("/mine")


def test_a_state_folder_that_cannot_be_made_is_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError, match="REFINER_STATE_DIR"):
        state_dir({"REFINER_STATE_DIR": str(tmp_path / "file")})
