"""Code for a rollout server: a worker extension of vLLM (``--worker-extension-cls``) that loads new
weights completely, and a middleware (``--middleware``) that requires a key on every route.

In: a complete model folder, by ``POST /collective_rpc {"method": "refiner_load_weights"}``. Out:
the number of repacked heads.

On a CPU vLLM packs the output head into the layout of its matrix kernels when it loads a model. A
reload writes the embedding, to which the head is tied, but does not pack the head again: the server
answers 200 and continues with the old one. This module packs it again. It needs only vLLM itself.

vLLM requires its key (``VLLM_API_KEY``) under ``/v1`` and similar, but not on the routes of its
development mode, nor on ``/metrics``; the middleware covers all of them.
"""

from __future__ import annotations

import hmac
import os
from typing import Any


class CompleteReload:
    """Methods that vLLM mixes into its worker class."""

    def refiner_load_weights(self: Any, weights_path: str) -> dict[str, int]:
        """Load a checkpoint folder in place, the packed heads included."""
        self.reload_weights(weights_path=weights_path)
        return {"packed_heads": _pack_heads(self.model_runner.get_model())}


class KeyOnEveryRoute:
    """ASGI middleware that rejects requests without the server's key."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] == "lifespan" or self._has_key(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _has_key(self, headers: Any) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def _pack_heads(model: Any) -> int:
    """Repack every embedding or head that has a packed copy of its weight."""
    packed = 0
    for layer in model.modules():
        names = {kind.__name__ for kind in type(layer).__mro__}
        if "VocabParallelEmbedding" in names and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
            packed += 1
    return packed
