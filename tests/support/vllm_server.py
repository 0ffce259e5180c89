"""A server that speaks as vLLM does, with a small real model behind it, as a program of its own.

    vllm_server.py serve FOLDER --host H --port P --served-model-name N [options of `vllm serve`]

In: ``VLLM_API_KEY``, ``VLLM_SERVER_DEV_MODE``. It keeps vLLM's traps: unknown fields are ignored;
routes that change weights exist in dev mode alone and ask for no key unless a ``--middleware`` does
(a class of ASGI, on the import path); a pause gives up what is
under way unless told otherwise, and a paused server answers no request; a full queue is a 503;
log-probabilities are raw unless ``--logprobs-mode processed_logprobs``; a failed reload leaves
garbage and a healthy /health. The model is in :mod:`tests.support.vllm_engine`.

``POST /control`` is for tests: ``{"hang": true}`` answers no request any more, ``{"die_after": n}``
kills the process at the n-th completion from now, ``{"lose": n}`` drops as many connections,
``{"slow_s": x}`` waits for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import mmap
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.vllm_engine import Engine, Sampled, Sampling

_DEV = ("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache")


def parse(argv: list[str]) -> argparse.Namespace:
    """Options of ``vllm serve``; others are refused, as there."""
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--middleware", action="append", default=[])
    for name in (
        *("host", "served-model-name", "dtype", "worker-extension-cls"),
        *("generation-config", "logprobs-mode"),
    ):
        parser.add_argument(f"--{name}")
    for name in (
        *("port", "max-model-len", "max-num-seqs", "seed", "tensor-parallel-size"),
        *("max-num-queued-reqs", "max-num-batched-tokens", "shutdown-timeout"),
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in ("enforce-eager", "disable-uvicorn-access-log", "no-enable-chunked-prefill"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


class _App:
    """The application inside the middlewares."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer nothing."""


class State:
    """The server between its requests."""

    def __init__(self, args: argparse.Namespace, *, dev: bool, key: str) -> None:
        self.args, self.dev, self.key = args, dev, key
        self.engine = Engine(Path(args.model), args.worker_extension_cls)
        self.version = "default"
        self.changed = threading.Condition()
        self.paused, self.pauses, self.unfinished = False, 0, 0
        self.over = False
        self.control: dict[str, Any] = {}
        self.log: list[tuple[str, Any]] = []
        self.middleware: Any = _App()
        for where in args.middleware:
            module, _, name = where.rpartition(".")
            self.middleware = getattr(importlib.import_module(module), name)(self.middleware)

    def refusal(self, headers: Any) -> int:
        """The status that a middleware answers with; 0 where the request comes through."""
        said: list[int] = []

        async def send(message: dict[str, Any]) -> None:
            said.append(message.get("status", 0))

        given = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        asyncio.run(self.middleware({"type": "http", "headers": given}, None, send))
        return max(said, default=0)

    def counted(self, name: str) -> bool:
        """Whether a control that counts down is due."""
        with self.changed:
            left = self.control.get(name, 0)
            self.control[name] = max(0, left - 1)
            return bool(left == 1 if name == "die_after" else left)

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The answer to a request with one prompt and one choice."""
        prompt, limit = body["prompt"], self.args.max_num_queued_reqs
        assert body["n"] == 1
        if len(prompt) + body["max_tokens"] > self.args.max_model_len:
            return 400, {"error": {"message": "longer than max_model_len"}}
        with self.changed:
            if limit is not None and self.unfinished >= limit:
                return 503, {"error": {"message": "The engine is currently busy"}}
            self.unfinished += 1
        try:
            choice = self._choice(body, self._wanted(body, prompt))
        finally:
            with self.changed:
                self.unfinished -= 1
                self.changed.notify_all()
        return 200, {"model": body["model"], "choices": [choice]}

    def _wanted(self, body: dict[str, Any], prompt: list[int]) -> Sampling:
        eos = self.engine.tokenizer.eos_token_id
        return Sampling(
            prompt=prompt,
            temperature=float(body.get("temperature", 1.0)),
            top_p=float(body.get("top_p", 1.0)),
            top_k=int(body.get("top_k", 0)),
            max_tokens=int(body["max_tokens"]),
            seed=body.get("seed"),
            stop_ids=frozenset({eos, *(body.get("stop_token_ids") or [])}),
            stop=list(body.get("stop") or []),
            skip_special=bool(body.get("skip_special_tokens", True)),
            salt=body.get("cache_salt") or "",
            raw=self.args.logprobs_mode != "processed_logprobs",
            prompt_logprobs=body.get("prompt_logprobs") is not None,
        )

    def _sample(self, wanted: Sampling) -> Sampled:
        with self.changed:
            self.changed.wait_for(lambda: not self.paused)
            begun = self.pauses
        done = Sampled()
        for done in self.engine.steps(wanted):
            time.sleep(self.control.get("slow_s", 0.0))
            with self.changed:
                given_up = self.over or self.pauses != begun
                if given_up and done.finish is None:
                    done.finish = "abort"
                    break
                self.changed.wait_for(lambda: not self.paused)
        return done

    def _choice(self, body: dict[str, Any], wanted: Sampling) -> dict[str, Any]:
        done, tokenizer = self._sample(wanted), self.engine.tokenizer
        ids = body.get("return_token_ids")
        logprobs = {"token_logprobs": done.logprobs} if body.get("logprobs") is not None else None
        known = zip(wanted.prompt[1:], done.scores, strict=wanted.prompt_logprobs)
        scores = [{str(token): {"logprob": score}} for token, score in known]
        return {
            "index": 0,
            "text": tokenizer.decode(done.tokens, skip_special_tokens=wanted.skip_special),
            "logprobs": logprobs,
            "finish_reason": done.finish,
            "stop_reason": done.stop_reason,
            "token_ids": done.tokens if ids else None,
            "prompt_token_ids": wanted.prompt if ids else None,
            "prompt_logprobs": [None, *scores] if wanted.prompt_logprobs else None,
        }

    def manage(self, route: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        """The routes of dev mode."""
        if route == "/pause":
            with self.changed:
                self.paused = True
                mode = query.get("mode", ["abort"])[0]
                self.pauses += mode == "abort"
                if mode == "wait":
                    self.changed.wait_for(lambda: not self.unfinished)
        elif route == "/resume":
            with self.changed:
                self.paused = False
                self.changed.notify_all()
        elif route == "/reset_prefix_cache":
            self.engine.forget()
            return 200, {"success": True}
        elif route == "/update_weight_version":
            self.version = body["new_version"]
        elif route == "/collective_rpc":
            try:
                result = self.engine.call(body["method"], body.get("kwargs", {}))
            except Exception as error:
                return 500, {"error": {"message": f"Call to collective_rpc failed: {error}"}}
            return 200, {"results": [result if isinstance(result, dict) else None]}
        return 200, {"status": "done"}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: State

    def do_GET(self) -> None:
        route = urlsplit(self.path).path
        self._hang()
        if status := self.state.refusal(self.headers):
            self._answer(status, {"error": "Unauthorized"})
        elif route == "/health":
            self._answer(200, {})
        elif route == "/is_paused" and self.state.dev:
            self._answer(200, {"is_paused": self.state.paused})
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        parts, state = urlsplit(self.path), self.state
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else None
        self._hang()
        if parts.path == "/control":
            state.control |= body
            self._answer(200, {})
            return
        if status := state.refusal(self.headers):
            self._answer(status, {"error": "Unauthorized"})
            return
        state.log.append((parts.path, body))
        if parts.path == "/v1/completions":
            self._complete(body)
        elif parts.path in _DEV and state.dev:
            self._answer(*state.manage(parts.path, parse_qs(parts.query), body))
        else:
            self._answer(404, {"detail": "Not Found"})

    def _complete(self, body: dict[str, Any]) -> None:
        state = self.state
        if state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
            self._answer(401, {"error": "Unauthorized"})
        elif state.counted("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif state.counted("lose"):
            self.close_connection = True
            self.connection.shutdown(2)
        elif body["model"] != state.args.served_model_name:
            self._answer(404, {"error": {"message": f"The model {body['model']} does not exist"}})
        else:
            self._answer(*state.complete(body))

    def _hang(self) -> None:
        while self.state.control.get("hang") and urlsplit(self.path).path != "/control":
            time.sleep(0.05)

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # the client is gone

    def log_message(self, *_: Any) -> None:
        """Log no request."""


def make_server(state: State, host: str, port: int) -> ThreadingHTTPServer:
    """A server that is to be run."""
    handler = type("Bound", (Handler,), {"state": state})
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 256
    return ThreadingHTTPServer((host, port), handler)


@contextmanager
def served(folder: Path, *options: str, key: str = "") -> Iterator[Served]:
    """A server in threads of this process, started as rollout servers are."""
    usual = ("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs")
    argv = ["serve", str(folder), "--served-model-name", "policy", "--max-model-len", "128"]
    state = State(parse([*argv, *(options or usual)]), dev=True, key=key)
    server = make_server(state, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield Served(state, server)
    finally:
        state.control["hang"] = False
        server.shutdown()
        with state.changed:  # no thread is left inside torch when the process ends
            state.over, state.paused = True, False
            state.changed.notify_all()
            assert state.changed.wait_for(lambda: not state.unfinished, 60)
        server.server_close()


class Served:
    """A server in threads of this process."""

    def __init__(self, state: State, server: ThreadingHTTPServer) -> None:
        self.state = state
        self.url = f"http://127.0.0.1:{server.server_address[1]}/v1"

    @property
    def routes(self) -> list[str]:
        """What was posted, in order."""
        return [route for route, _ in self.state.log]

    def bodies(self) -> list[dict[str, Any]]:
        """Completion requests in order."""
        return [body for route, body in self.state.log if route == "/v1/completions"]


def shim(folder: Path) -> Path:
    """A folder for PATH in which `vllm` is this server."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "vllm"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    script.chmod(0o755)
    assert shutil.which("vllm", path=str(folder))
    return folder


def shared_memory() -> mmap.mmap:
    """What the engine and its workers talk over; a kill -9 leaves it, as vLLM's."""
    with Path(f"/dev/shm/psm_refiner_{os.getpid()}").open("wb+") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


def main() -> None:
    """Serve until SIGTERM."""
    args = parse(sys.argv[1:])
    dev = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    state = State(args, dev=dev, key=os.environ.get("VLLM_API_KEY", ""))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    held = shared_memory()
    print("Application startup complete.", flush=True)
    make_server(state, args.host, args.port).serve_forever()
    held.close()


if __name__ == "__main__":
    main()
