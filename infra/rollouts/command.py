"""What is started to sample rollouts: a shell text and an environment.

In: the recipe, a folder with weights, where to listen. Out: ``vllm serve`` with everything that
decides a sample said, and the settings of its environment. The key is in the environment alone,
because command lines can be read by everybody on a node.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.ranks.gpus import JOB_GPUS, VISIBLE
from infra.services.command import Listening, server_environment
from refiner_core.contract.config import RecipeConfig
from refiner_core.generation.vllm.wire import MODEL

#: Class that completes a reload; its module is on the server's import path and needs vLLM alone.
EXTENSION = "refiner_vllm_extension.CompleteReload"
#: Class beside it that asks for the key on the routes on which vLLM does not.
MIDDLEWARE = "refiner_vllm_extension.KeyOnEveryRoute"
#: How long a server that is asked to end goes on with what it has, seconds.
SHUTDOWN_S = 5
#: Tokens that a server without GPUs takes in one pass.
_CPU_BATCHED_TOKENS = 4096
#: Settings of the launcher of our training processes, which are no business of a server's.
_RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR", JOB_GPUS),
)
_RANKS_PREFIX = "TORCHELASTIC_"


@dataclass(frozen=True)
class Place:
    """What one server has for itself.

    Attributes
    ----------
    gpus
        Its GPUs, as ``CUDA_VISIBLE_DEVICES`` takes them; empty without.
    extension
        Folder of the worker extension.
    mark
        Marks its processes, so that what is left of one can be found.
    transfer
        Backend of vLLM that weights come by; none where they come by folders.
    """

    gpus: str
    extension: Path
    mark: Path
    transfer: str | None = None
    key: str = field(default="", repr=False)


def rollout_server_text(
    config: RecipeConfig, at: Listening, weights: Path, transfer: str | None = None
) -> str:
    """The shell text that becomes the server (by ``exec``, so that signals reach it).

    What the user gives in ``args`` comes last, and so counts.
    """
    grpo, server = config.grpo, config.grpo.rollout_server
    words = [server.python, "-m", "vllm.entrypoints.cli.main"] if server.python else ["vllm"]
    words += ["serve", str(weights), "--host", at.host, "--port", str(at.port)]
    words += ["--served-model-name", MODEL]
    # Else a model's own generation_config.json overrules what a request does not say.
    words += ["--generation-config", "vllm"]
    # Else log-probabilities are those before temperature and truncation.
    words += ["--logprobs-mode", "processed_logprobs"]
    words += ["--dtype", config.model.dtype, "--max-model-len", str(grpo.max_token_length)]
    words += ["--max-num-seqs", str(grpo.generation_batch_size), "--seed", str(config.seed)]
    if not grpo.resources.gpus:
        # A prompt that is read in pieces makes vLLM take back a seeded draw, which its generators
        # on the CPU cannot (0.32: "CPU Generator does not use offset"), and the engine dies.
        tokens = max(_CPU_BATCHED_TOKENS, grpo.max_token_length)
        words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]
    if grpo.vllm_tensor_parallel_size > 1:
        words += ["--tensor-parallel-size", str(grpo.vllm_tensor_parallel_size)]
    words += ["--worker-extension-cls", EXTENSION, "--middleware", MIDDLEWARE]
    if transfer is not None:
        words += ["--weight-transfer-config", f'{{"backend": "{transfer}"}}']
    words += ["--shutdown-timeout", str(SHUTDOWN_S), "--disable-uvicorn-access-log"]
    words += [word for arg in server.args for word in shlex.split(arg)]
    call = " ".join(part for part in ((server.container or "").strip(), shlex.join(words)) if part)
    return "\n".join(["set -e", *server.setup, f"exec {call}"])


def rollout_environment(place: Place, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a server: the user's own, without what is about our own processes."""
    made = server_environment("vllm", place.key, str(place.mark), given)
    kept = {n: v for n, v in made.items() if n not in _RANKS and not n.startswith(_RANKS_PREFIX)}
    paths = [str(place.extension), *kept.get("PYTHONPATH", "").split(os.pathsep)]
    kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    kept |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if place.transfer == "ipc":  # handles of GPU memory have no other form
        kept["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if place.gpus:
        kept[VISIBLE] = place.gpus
    return kept
