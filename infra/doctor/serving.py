"""Area ``vllm``: the environments that serve models, which are not this one.

In: ``grpo.rollout_server`` and ``judge.serve``. Out: whether the interpreter is there, imports the
engine, and how its CUDA fits the driver; asked in the very shell text that a server is started by.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator

from infra.doctor.check import Check, Finding, Look, absent, ask, doubtful, last_json
from infra.services.process import ServerProgram

_AREA = "vllm"
#: Importing vLLM and torch from a cold network file system.
_IMPORT_S = 120.0
_DISTRIBUTION = {"vllm": "vllm", "transformers": "'transformers[serving]'"}
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
    if not look.rollout_servers and look.on_node:
        return
    if not look.rollout_servers:
        if shutil.which("vllm"):
            yield Finding(_AREA, "vllm", "ok", f"{shutil.which('vllm')} is on PATH")
        else:
            yield Finding(
                *(_AREA, "vllm", "missing", "no `vllm` on PATH"),
                mend=_make(look, "grpo.rollout_server", "vllm"),
                why="grpo.generation_backend=vllm, and judge.serve.engine=vllm",
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
    mend = _make(look, name, engine)
    if program.lacking:
        elsewhere = "" if needed else " here; `refiner doctor --job` looks at a compute node"
        return Finding(
            *(_AREA, name, doubtful(needed), program.lacking + elsewhere), mend=mend, why=why
        )
    answer = ask(["bash", "-c", _text(program)], _IMPORT_S)
    value = last_json(answer.out)
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
        return Finding(_AREA, name, doubtful(needed), what, mend=_install(program), why=why)
    build = f"torch {value['torch']}, CUDA {value['cuda'] or 'none'}"
    what = f"{engine} {value['engine']}, {build}, sees {value['gpus']} GPUs"
    asked = look.asked_gpus if look.on_node else gpus
    if asked and needed and not value["gpus"]:
        return Finding(
            *(_AREA, name, absent(needed), what),
            mend=_install(program),
            why=f"it needs {asked} GPUs",
        )
    return Finding(_AREA, name, "ok", what)


def _install(program: ServerProgram) -> str:
    asked = _DISTRIBUTION[program.engine]
    return f"{shlex.quote(program.python or 'python3')} -m pip install --upgrade {asked}"


def _make(look: Look, field: str, engine: str) -> str:
    """An environment of its own, and the same question with it."""
    folder, asked = f"$HOME/{engine}-env", _DISTRIBUTION[engine]
    again = look.again(f"{field}.python={folder}/bin/python")
    return f"python3 -m venv {folder} && {folder}/bin/pip install {asked} && {again}"


def _text(program: ServerProgram, *, short: bool = False) -> str:
    """As a server is started (:mod:`infra.rollouts.servers`), with a question in its place."""
    if program.python is None:
        words = [program.engine, "--version" if program.engine == "vllm" else "version"]
    elif short:
        words = [program.python, "-c", f"import {program.engine}"]
    else:
        words = [program.python, "-c", _PROBE.replace("ENGINE", program.engine)]
    call = " ".join(filter(None, ((program.container or "").strip(), shlex.join(words))))
    return "\n".join(["set -e", *program.setup, f"exec {call}"])


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
