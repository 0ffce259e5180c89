"""Rollout servers on all nodes of a job, controlled by rank 0.

In: the recipe, the ranks, and on each node its servers
(:class:`~infra.rollouts.servers.LocalRolloutServers`). Out: on rank 0 a generator over the servers
of all nodes; in the first process of every other node a function that writes the weights into that
node's memory, as they are gathered.

Every node starts and ends its own servers, as children of its first rank. Those of the first node
listen on loopback. Those of the others listen on their node's address, since rank 0 sends prompts
and commands to them, and ask for their key on every route. Rank 0 controls a node over one
connection, which the node opens with a key; when rank 0 is gone, so is the connection, and with it
the node's servers. Keys are sent unencrypted, as those of the ranks: the network between the nodes
is trusted.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from infra.host.processes import node_address
from infra.ranks.bridge import accept_nodes, receive, send, shut
from infra.ranks.messages import decode, encode
from infra.rollouts.servers import (
    LOOPBACK,
    LocalRolloutServers,
    all_started,
    local_servers,
    vllm_generator,
)
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import Interrupted, KilledError
from refiner_core.contract.placement import placement_of
from refiner_core.contract.types import Endpoint
from refiner_core.generation.saving import SaveWeights, Weights
from refiner_core.generation.vllm.client import VllmGenerator
from refiner_core.generation.vllm.sync import weights_name, write_folder
from refiner_core.training.ranks import Ranks, on_all

log = logging.getLogger(__name__)
_POLL_S, _TELL_EVERY_S = 0.1, 1.0
#: Limit of waiting for the other nodes, seconds: their ranks are already running.
_COME_S = 300.0
_BACKLOG = 512


def _saved_in(folder: Path, tokenizer: Any) -> SaveWeights:
    """Save the weights of a further node for its servers, under the names that rank 0 gives them;
    the version before is removed."""
    numbers = count(1)

    def save(model: Any, weights: Weights) -> None:
        number = next(numbers)
        write_folder(model, tokenizer, folder / weights_name(number), weights)
        shutil.rmtree(folder / weights_name(number - 1), ignore_errors=True)

    return save


class _NodeServers:
    """Rank 0's end of the servers of another node, a
    :class:`~refiner_core.contract.types.RolloutServers`.

    Parameters
    ----------
    node
        Number of the node.
    connection
        Connection to its first rank.
    folder
        The node's folder in memory.
    should_stop, tell
        As of :class:`~infra.rollouts.servers.LocalRolloutServers`.
    """

    def __init__(
        self,
        node: int,
        connection: Connection,
        folder: str,
        should_stop: Callable[[], bool],
        tell: Callable[[float], None],
    ) -> None:
        self.node, self._connection, self._folder = node, connection, Path(folder)
        self._should_stop, self._tell = should_stop, tell
        self._lock, self._closing = threading.Lock(), threading.Event()

    def start(self, weights: Path) -> list[Endpoint]:
        """Start all of the node's servers."""
        found = self._call("start", weights=self.weights_of(0, weights))
        return [Endpoint(**one) for one in found]

    def replace(self, index: int, weights: Path, why: str) -> Endpoint:
        """End one at once and start another."""
        path = self.weights_of(index, weights)
        return Endpoint(**self._call("replace", index=index, weights=path, why=why))

    def weights_of(self, index: int, weights: Path) -> str:
        """The same weights in the node's own memory."""
        return str(self._folder / weights.name)

    def close(self) -> None:
        """Have the node end its servers."""
        self._closing.set()
        shut(self._connection)

    def _call(self, name: str, **values: Any) -> Any:
        with self._lock:
            try:
                send(self._connection, {"call": name, **values})
                self._wait()
                answer = receive(self._connection)
            except (EOFError, OSError) as error:
                raise KilledError(
                    f"Node {self.node} of the job, which has rollout servers, is gone",
                    fix="nothing: the next attempt resumes from the last checkpoint",
                ) from error
        if "error" in answer:
            raise decode(answer["error"], f"On node {self.node}")
        return answer["value"]

    def _wait(self) -> None:
        began = reported = time.monotonic()
        while not self._connection.poll(_POLL_S):
            if self._should_stop() or self._closing.is_set():
                self.close()  # ends the start that the node is waiting for
                raise Interrupted(
                    f"Rollout servers of node {self.node} were asked to end before they answered",
                    fix="run the same command again; what is saved is kept",
                )
            if (now := time.monotonic()) - reported >= _TELL_EVERY_S:
                reported = now
                self._tell(now - began)


class _ServersOfNodes:
    """The servers of all nodes as one :class:`~refiner_core.contract.types.RolloutServers`: first
    those of the first node, then those of the second, and so on.

    Parameters
    ----------
    nodes
        The servers of each node.
    each
        Number of servers of a node.
    """

    def __init__(self, nodes: Sequence[LocalRolloutServers | _NodeServers], each: int) -> None:
        self._nodes, self._each = nodes, each

    def start(self, weights: Path) -> list[Endpoint]:
        """Start all of them in parallel."""
        starts = [partial(node.start, weights) for node in self._nodes]
        return [one for found in all_started(starts, undo=self.close) for one in found]

    def replace(self, index: int, weights: Path, why: str) -> Endpoint:
        """End one at once and start another on the same node."""
        node, own = divmod(index, self._each)
        return self._nodes[node].replace(own, weights, why)

    def weights_of(self, index: int, weights: Path) -> str:
        """The same weights in the memory of a server's node."""
        node, own = divmod(index, self._each)
        return self._nodes[node].weights_of(own, weights)

    def close(self) -> None:
        """End all of them."""
        for node in reversed(self._nodes):  # other nodes end theirs while this one waits for its
            node.close()


@contextmanager
def open_on_nodes(
    config: RecipeConfig,
    tokenizer: Any,
    workdir: Path,
    ranks: Ranks,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[float], None] = lambda seconds: None,
) -> Iterator[VllmGenerator | SaveWeights | None]:
    """Rollouts from servers on all nodes; all ranks enter it together.

    Rank 0 gets the generator, the first rank of each other node saves the weights there, and all
    others get None. Parameters are those of :func:`~infra.rollouts.servers.open_vllm`;
    ``should_stop`` and ``tell`` are rank 0's.

    Raises
    ------
    ConfigurationError
        ``grpo.rollout_server.weights_dir`` is not usable on one of the nodes.
    LaunchError
        Not all nodes connected.
    """
    placed, first = placement_of(config, "grpo"), ranks.rank == 0
    node = ranks.rank // placed.nproc_per_node
    with ExitStack() as stack:

        def prepare() -> tuple[LocalRolloutServers | None, socket.socket | None]:
            local = local_servers(
                *(config, workdir, placed.server_gpus),
                should_stop=should_stop,
                tell=tell,
                host=LOOPBACK if first else node_address(),
                node=node,
            )
            at = socket.create_server((node_address(), 0), backlog=_BACKLOG) if first else None
            if at is not None:
                stack.callback(at.close)
            return stack.enter_context(local) if ranks.local_rank == 0 else None, at

        local, listener = on_all(ranks, prepare)
        key = secrets.token_bytes(32)
        at = None if listener is None else (*listener.getsockname()[:2], key.hex())
        host, port, given = ranks.broadcast(at)
        if local is None:
            yield None
        elif listener is None:
            connection = Client((host, port), "AF_INET", authkey=bytes.fromhex(given))
            stack.callback(shut, connection)
            send(connection, {"node": node, "folder": str(local.memory)})
            threading.Thread(target=_serve, args=(connection, local), daemon=True).start()
            yield _saved_in(local.memory, tokenizer)
        else:
            others = accept_nodes(listener, key, placed.nodes - 1, _COME_S)
            remote = [
                _NodeServers(node, connection, hello["folder"], should_stop, tell)
                for node, (connection, hello) in sorted(others.items())
            ]
            servers = _ServersOfNodes([local, *remote], len(placed.server_gpus))
            stack.callback(servers.close)
            yield vllm_generator(config, servers, local.memory, tokenizer)


def _serve(connection: Connection, local: LocalRolloutServers) -> None:
    """Carry out rank 0's commands, one at a time, until it is gone; then end the servers."""
    local.should_stop = connection.poll  # during a command rank 0 sends nothing, but may leave
    with contextlib.suppress(EOFError, OSError):
        while True:
            order = receive(connection)
            send(connection, _answer(local, order))
    local.close()


def _answer(local: LocalRolloutServers, order: Mapping[str, Any]) -> dict[str, Any]:
    weights = Path(order["weights"])
    try:
        if order["call"] == "start":
            return {"value": [asdict(endpoint) for endpoint in local.start(weights)]}
        return {"value": asdict(local.replace(order["index"], weights, order["why"]))}
    except Exception as error:
        return {"error": encode(error)}
