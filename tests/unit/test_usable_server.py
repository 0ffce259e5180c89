"""A Prefect server that cannot be used is refused in one paragraph, before anything is begun."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, temporary_settings

from infra.prefect_server import KeyRefused, ServerError, ServerInfo, check_server, usable_server
from refiner_core.contract.errors import ConfigurationError, RefinerError, UnsupportedError

HERE = version("prefect")
#: Status and body for an Authorization header.
Answer = Callable[[str | None], tuple[int, str]]
Serve = Callable[[Answer], ServerInfo]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A small server on loopback that answers every request as it is told."""
    servers: list[ThreadingHTTPServer] = []

    def started(answer: Answer) -> ServerInfo:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = answer(self.headers.get("Authorization"))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body.encode())

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        return ServerInfo(url, f"{url}/api", ours=False)

    yield started
    for server in servers:
        server.shutdown()
        server.server_close()


def keyed(key: str | None) -> tuple[int, str]:
    """A server that takes Basic a:b and Bearer k."""
    return (200, json.dumps(HERE)) if key in ("Basic YTpi", "Bearer k") else (401, "{}")


@pytest.mark.parametrize(
    ("answer", "kind", "what"),
    [
        (lambda key: (401, "{}"), KeyRefused, "answers 401: it wants"),
        (lambda key: (403, "{}"), KeyRefused, "answers 403: it wants"),
        (lambda key: (200, json.dumps("1.4.2")), UnsupportedError, "has version 1.4.2"),
        (lambda key: (200, "<html>the UI</html>"), ConfigurationError, "is not a Prefect server"),
        (lambda key: (404, "{}"), ConfigurationError, "is not a Prefect server"),
        (lambda key: (200, "[]"), ConfigurationError, "is not a Prefect server"),
        (lambda key: (503, ""), ServerError, "answers 503"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_cause(
    serve: Serve, answer: Answer, kind: type[RefinerError], what: str
) -> None:
    info = serve(answer)
    with pytest.raises(kind) as refused:
        check_server(info)
    assert what in refused.value.what
    assert info.api_url in refused.value.what
    assert refused.value.expected
    assert refused.value.fix


def test_a_server_that_is_down_is_refused_and_its_password_is_not_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
