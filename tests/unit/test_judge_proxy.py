"""A judge outside of the cluster is reached through its proxy; one inside is asked directly."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import JudgeOutage
from refiner_core.contract.types import Judgement, JudgeRequest
from refiner_core.http.fleet import BreakerSettings
from refiner_core.judges.openai import OpenAIJudge
from tests.support.judge_server import JudgeServer, score

REQUEST = JudgeRequest("rubric", "Which crop?", "The crop is wheat.", "Names the crop")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """First lines of what a proxy is asked; it lets nothing through."""
    asked: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    asked.append(connection.recv(65536).decode().split("\r\n")[0])
                    connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, address)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "inside.example")
    yield asked
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(10)


def ask(base_url: str) -> Judgement:
    config = JudgeConfig("openai", "m", base_url=base_url, outage_patience_s=0.1, timeout_s=5.0)
    breaker = BreakerSettings(threshold=1)
    with OpenAIJudge(config, first_backoff_s=0.01, breaker=breaker) as judge:
        return judge.judge([REQUEST])[0]


def test_an_https_address_goes_through_the_proxy(proxy: list[str]) -> None:
    with pytest.raises(JudgeOutage, match=r"outside\.example"):
        ask("https://outside.example/v1")
    assert set(proxy) == {"CONNECT outside.example:443 HTTP/1.1"}


def test_an_http_address_and_an_exception_are_asked_directly(proxy: list[str]) -> None:
    with JudgeServer(lambda body, call: score(2)) as server:
        assert ask(server.base_url) == Judgement("scored", 1.0)
    with pytest.raises(JudgeOutage):
        ask("https://inside.example/v1")
    assert proxy == []
