"""Area ``vllm``: the environments that serve models, which are not this one.

In: ``grpo.rollout_server`` and ``judge.serve``. Out: whether the interpreter is there, imports the
engine, and how its CUDA fits the driver; asked in the very shell text that a server is started by.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from typing import Any

from infra.doctor.finding import Finding
from infra.doctor.look import Check, Look, absent, ask, doubtful
from infra.services.program import ServerProgram

_AREA = "vllm"
#: Importing vLLM and torch from a cold network file system.
_IMPORT_S = 120.0
_PROBE = """
import json, sys
from importlib import metadata
value = {"python": sys.version.split()[0]}
try:
    value["engine"] = metadata.version("ENGINE")
    import torch
    value["torch"], value["cuda"] = torch.__version__, torch.version.cuda
    value["gpus"] = torch.cuda.device_count()
    import ENGINE
except Exception as error:
    value["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(value))
"""


def _rollouts(look: Look) -> Iterator[Finding]:
    if not look.rollout_servers:
        if shutil.which("vllm"):
            yield Finding(_AREA, "vllm", "ok", f"{shutil.which('vllm')} is on PATH")
        else:
            yield Finding(
                *(_AREA, "vllm", "missing", "no `vllm` on PATH"),
                mend="python3 -m venv ~/vllm && ~/vllm/bin/pip install vllm",
                why="grpo.generation_backend=vllm and judge.serve.engine=vllm, by "
                "grpo.rollout_server.python=~/vllm/bin/python with the whole path",
            )
        return
    program = ServerProgram.of(look.config.grpo.rollout_server, "grpo.rollout_server", "vllm")
    yield _environment(look, program, look.config.grpo.resources.gpus)


def _judge(look: Look) -> Iterator[Finding]:
    engine = look.judge_engine
    if engine not in ("vllm", "transformers"):
        return
    program = ServerProgram.of(look.config.judge.serve, "judge.serve", engine)
    yield _environment(look, program, look.config.judge.resources.gpus)


def _environment(look: Look, program: ServerProgram, gpus: int) -> Finding:
    name, engine, needed = program.field, program.engine, look.serves_here
    why = f"{name} serves models with {engine}"
    mend = f"python3 -m venv ~/{engine} && ~/{engine}/bin/pip install {engine}"
    if program.lacking:
        elsewhere = "" if needed else " here; `refiner doctor --job` looks at a compute node"
        return Finding(
            *(_AREA, name, doubtful(needed), program.lacking + elsewhere), mend=mend, why=why
        )
    answer = ask(["bash", "-c", _text(program)], _IMPORT_S)
    value = _last_json(answer.out)
    if value is None:
        if program.python is None and answer.ok:
            return Finding(_AREA, name, "ok", f"{engine} {answer.out.split()[-1]} answers")
        return Finding(
            *(_AREA, name, doubtful(needed), f"it cannot be started: {answer.last_line}"),
            mend=f"bash -c {shlex.quote(_text(program, short=True))}",
            why=why,
        )
    if value.get("why"):
        what = f"Python {value['python']} cannot use {engine}: {value['why']}"
        install = shlex.join([program.python or "python3", "-m", "pip", "install", engine])
        return Finding(_AREA, name, doubtful(needed), what, mend=install, why=why)
    build = f"torch {value['torch']}, CUDA {value['cuda'] or 'none'}"
    what = f"{engine} {value['engine']}, {build}, sees {value['gpus']} GPUs"
    asked = look.asked_gpus if look.on_node else gpus
    if asked and needed and not value["gpus"]:
        install = shlex.join([program.python or "python3", "-m", "pip", "install", engine])
        return Finding(
            _AREA, name, absent(needed), what, mend=install, why=f"it needs {asked} GPUs"
        )
    return Finding(_AREA, name, "ok", what)


def _text(program: ServerProgram, *, short: bool = False) -> str:
    """As a server is started (:mod:`infra.rollouts.command`), with a question in its place."""
    if program.python is None:
        words = [program.engine, "--version" if program.engine == "vllm" else "version"]
    elif short:
        words = [program.python, "-c", f"import {program.engine}"]
    else:
        words = [program.python, "-c", _PROBE.replace("ENGINE", program.engine)]
    call = " ".join(filter(None, ((program.container or "").strip(), shlex.join(words))))
    return "\n".join(["set -e", *program.setup, f"exec {call}"])


def _last_json(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            value: dict[str, Any] = json.loads(line)
            return value
    return None


CHECKS = (
    Check(
        *(_AREA, "rollout servers", _rollouts),
        limit_s=_IMPORT_S + 5,
        needed=lambda x: x.rollout_servers and not x.on_slurm,
    ),
    Check(
        *(_AREA, "judge's server", _judge),
        limit_s=_IMPORT_S + 5,
        needed=lambda x: x.judge_engine and not x.on_slurm,
    ),
)
