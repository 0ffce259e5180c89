"""The middleware of rollout servers, in an application like vLLM's: FastAPI, mounts, sockets."""

import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from refiner_core.generation.vllm.extension.refiner_vllm_extension import KeyOnEveryRoute

KEY = {"Authorization": "Bearer the-key"}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """An application to which vLLM's ``--middleware`` would add the class."""
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    app, metrics = FastAPI(), FastAPI()

    @app.post("/collective_rpc")
    def collective_rpc() -> str:
        return "done"

    @metrics.get("/")
    def numbers() -> str:
        return "some"

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")

    app.mount("/metrics", metrics)
    app.add_middleware(KeyOnEveryRoute)
    return TestClient(app)


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer the-key2", "the-key"])
def test_a_wrong_key_is_refused(client: TestClient, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    assert client.post("/collective_rpc", headers=headers).status_code == 401
    assert client.options("/collective_rpc", headers=headers).status_code == 401
    for route in ("/metrics/", "/docs", "/openapi.json", "/nowhere"):
        assert client.get(route, headers=headers).status_code == 401
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/v1/realtime", headers=headers),
    ):
        pass


def test_the_key_opens_all_routes(client: TestClient) -> None:
    assert client.post("/collective_rpc", headers=KEY).json() == "done"
    assert client.get("/metrics/", headers=KEY).json() == "some"
    assert client.get("/nowhere", headers=KEY).status_code == 404
    with client.websocket_connect("/v1/realtime", headers=KEY) as socket:
        assert socket.receive_text() == "hello"


def test_two_headers_are_refused(client: TestClient) -> None:
    """One of them might be for a proxy."""
    headers = [("Authorization", "Bearer the-key"), ("Authorization", "Bearer other")]
    assert client.post("/collective_rpc", headers=headers).status_code == 401
