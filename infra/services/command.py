"""What is started to serve a judge: a shell text and an environment.

In: the judge's configuration, where to listen, where its weights lie. Out: the text for a shell and
the settings of its environment. A key is in the environment alone, because command lines can be
read by everybody on a node.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import infra
from infra.foreign.calling import OURS, fill
from infra.process.leftovers import MARK
from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.services import engine_of

#: Variables that carry the key to a server, by engine.
KEY_VARIABLES = {"vllm": "VLLM_API_KEY", "command": "REFINER_SERVER_KEY"}
#: A reply that is held to a schema may still begin with blanks without end, up to its limit.
_COMPACT_JSON = '{"backend": "xgrammar", "disable_any_whitespace": true}'
#: Opens routes of vLLM that change weights; a judge never has them.
_NEVER = ("VLLM_SERVER_DEV_MODE", *KEY_VARIABLES.values())


@dataclass(frozen=True)
class Listening:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The base of the API, without a slash at its end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"


def server_text(judge: JudgeConfig, at: Listening, weights: str | None = None) -> str:
    """The shell text that becomes the server (by ``exec``, so that signals reach it).

    Parameters
    ----------
    judge
        ``serve``, ``serve_command``, ``model`` and ``revision`` of it.
    at
        Where to listen.
    weights
        Folder or Hub id that ``judge.model`` stands for, where that is another name.

    Raises
    ------
    ConfigurationError
        The engine cannot be asked for that model under its name.
    """
    serve, source = judge.serve, weights or judge.model
    engine = engine_of(judge)
    if engine == "command":
        call = _filled(judge.serve_command or "", judge, at, source)
    elif engine == "vllm":
        call = shlex.join(_vllm(judge, at, source))
    else:
        call = shlex.join(_transformers(judge, at))
    words = [part for part in ((serve.container or "").strip(), call.strip()) if part]
    return "\n".join(["set -e", *serve.setup, f"exec {' '.join(words)}"])


def _vllm(judge: JudgeConfig, at: Listening, source: str) -> list[str]:
    python = judge.serve.python
    words = [python, "-m", "vllm.entrypoints.cli.main"] if python else ["vllm"]
    words += ["serve", source]
    words += ["--revision", judge.revision] if judge.revision else []
    words += ["--host", at.host, "--port", str(at.port), "--served-model-name", judge.model]
    # Else a model's own generation_config.json overrules what a request does not say.
    words += ["--generation-config", "vllm"]
    args = _split(judge.serve.args)
    if not any(arg.startswith("--structured-outputs-config") for arg in args):
        words += ["--structured-outputs-config", _COMPACT_JSON]
    return [*words, *args]


def _transformers(judge: JudgeConfig, at: Listening) -> list[str]:
    """It is asked by the very name that it was started with, so that is ``judge.model``."""
    if judge.revision not in (None, "main"):
        raise ConfigurationError(
            f"`transformers serve` knows no revision apart from the model ({judge.revision!r}).",
            expected="the revision in the model's name",
            fix=f"set judge.model={judge.model}@{judge.revision} and leave out judge.revision",
        )
    python = judge.serve.python
    words = [python, "-P", "-m", "transformers.cli.transformers"] if python else ["transformers"]
    words += ["serve", judge.model, "--host", at.host, "--port", str(at.port)]
    return [*words, *_split(judge.serve.args)]


def _split(args: tuple[str, ...]) -> list[str]:
    """Each entry may hold one word or several: `--tensor-parallel-size 2`."""
    return [word for arg in args for word in shlex.split(arg)]


def _filled(command: str, judge: JudgeConfig, at: Listening, source: str) -> str:
    values = {
        "model": source,
        "revision": judge.revision or "",
        "host": at.host,
        "port": str(at.port),
    }
    quoted = {name: shlex.quote(value) for name, value in values.items()}
    arguments = shlex.join(_split(judge.serve.args))
    return f"{fill(' '.join(command.split()), quoted)} {arguments}".strip()


def server_environment(
    engine: str, key: str, mark: str, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a server: the user's own, with the key where the engine looks for it.

    ``mark`` is inherited by all processes of the server, so that what is left of one can be found.
    """
    kept = {n: v for n, v in given.items() if n not in (*OURS, *_NEVER, "PYTHONPATH")}
    ours = str(Path(infra.__file__).resolve().parent.parent)
    paths = [p for p in given.get("PYTHONPATH", "").split(os.pathsep) if p and p != ours]
    if paths:
        kept["PYTHONPATH"] = os.pathsep.join(paths)
    kept |= {"PYTHONUNBUFFERED": "1", MARK: mark}
    if key and engine in KEY_VARIABLES:
        kept[KEY_VARIABLES[engine]] = key
    return kept
