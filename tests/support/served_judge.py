"""A small judge's server as a program that asks for a key and answers chat requests.

    served_judge.py --host H --port P --model M [--log FILE] [--startup S] [--mode MODE]
                    [--die-after N]

In: ``REFINER_SERVER_KEY``. Out: ``{"score": n}`` by a digest of the question, so that the same
question has the same answer in every process. It writes a line into FILE when it starts (its
process number) and one for each judgement. Modes: ``ok``; ``traceback`` dies at once; ``sick``
lists its model and fails every question; ``open`` asks for no key; ``memory`` runs out of it;
``stubborn`` does not end on SIGTERM; ``reasons`` ends its replies by length unless it is asked not
to reason. With ``--die-after``, the first one that is asked so often kills itself with the question
in its hands; those that come after it live.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser()
    for name in ("host", "port", "model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("--startup", type=float, default=0.0)
    parser.add_argument("--mode", default="ok")
    parser.add_argument("--die-after", type=int, default=0)
    args = parser.parse_args()
    note(args.log, {"pid": os.getpid(), "argv": " ".join(sys.argv)})
    print("the key is", os.environ.get("REFINER_SERVER_KEY"), flush=True)
    if args.mode == "traceback":
        raise RuntimeError("the weights are not what they should be")
    if args.mode == "memory":
        raise MemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if args.mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(args.startup)
    Handler.args = args
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer((args.host, int(args.port)), Handler).serve_forever()


class Handler(BaseHTTPRequestHandler):
    """The two routes that a judge needs."""

    args: argparse.Namespace
    asked = 0
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The list of models."""
        if self._may_ask():
            self._answer(200, {"object": "list", "data": [{"id": self.args.model}]})

    def do_POST(self) -> None:
        """A judgement."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may_ask():
            return
        if self.args.mode == "sick":
            self._answer(500, {"error": "the engine is dead"})
            return
        if body["model"] != self.args.model:
            self._answer(404, {"error": f"the model {body['model']} does not exist"})
            return
        text = json.dumps(body["messages"])
        note(self.args.log, {"asked": text})
        type(self).asked += 1
        if 0 < self.args.die_after <= self.asked and first_to_die(self.args.log):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.args.mode == "reasons" and "chat_template_kwargs" not in body:
            message = {"role": "assistant", "content": "Let me see: the answer names"}
            self._answer(200, {"choices": [{"message": message, "finish_reason": "length"}]})
            return
        score = hashlib.sha256(text.encode()).digest()[0] % 2 * 2
        message = {"role": "assistant", "content": json.dumps({"score": score})}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5}
        self._answer(200, {"choices": [choice], "usage": usage})

    def _may_ask(self) -> bool:
        key = os.environ.get("REFINER_SERVER_KEY")
        given = self.headers.get("Authorization")
        if self.args.mode == "open" or (key and given == f"Bearer {key}"):
            return True
        self._answer(401, {"error": "no such key"})
        return False

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def first_to_die(path: str) -> bool:
    """True once for each log."""
    try:
        os.close(os.open(f"{path}.died", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note(path: str, value: dict[str, Any]) -> None:
    """A line in the log; short ones are appended whole."""
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - runs on its own
        file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main()
