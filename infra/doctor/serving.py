"""Area ``vllm``: the environments that serve models, which are not this one.

In: ``grpo.rollout_server`` and ``judge.serve``. Out: whether the interpreter is there, imports the
engine, and how its CUDA fits the driver; asked in the very shell text that a server is started by.
"""

from __future__ import annotations

import shlex
import shutil

from infra.doctor.check import Check, Finding, Look, absent, ask, doubtful, fine, found, last_json
from infra.services.process import ServerProgram, shell_text

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

_LIMIT_S = _IMPORT_S + 5


def _rollouts(look: Look) -> Finding | None:
    if look.rollout_servers:
        program = ServerProgram(look.config.grpo.rollout_server, "grpo.rollout_server", "vllm")
        return _environment(look, program, look.config.grpo.resources.gpus)
    if look.on_node:
        return None
    if path := shutil.which("vllm"):
        return fine(f"{path} is on PATH", name="vllm")
    mend = _make(look, "grpo.rollout_server", "vllm")
    why = "grpo.generation_backend=vllm, and judge.serve.engine=vllm"
    return found("missing", "no `vllm` on PATH", mend, why, name="vllm")


def _judge(look: Look) -> Finding | None:
    engine = look.judge_engine
    if engine not in ("vllm", "transformers"):
        return None
    program = ServerProgram(look.config.judge.serve, "judge.serve", engine)
    return _environment(look, program, look.config.judge.resources.gpus)


def _environment(look: Look, program: ServerProgram, gpus: int) -> Finding:
    name, engine, needed = program.field, program.engine, look.serves_here
    state, why = doubtful(needed), f"{name} serves models with {engine}"
    if program.lacking:
        elsewhere = "" if needed else " here; `refiner doctor --job` looks at a compute node"
        mend = _make(look, name, engine)
        return found(state, program.lacking + elsewhere, mend, why, name=name)
    answer = ask(["bash", "-c", _text(program)], _IMPORT_S)
    value = last_json(answer.out)
    if value is None:
        if program.config.python is None and answer.ok:
            return fine(f"{engine} {answer.out.split()[-1]} answers", name=name)
        mend = f"bash -c {shlex.quote(_text(program, short=True))}"
        return found(state, f"it cannot be started: {answer.last_line}", mend, why, name=name)
    python = shlex.quote(program.config.python or "python3")
    mend = f"{python} -m pip install --upgrade {_DISTRIBUTION[engine]}"
    if value.get("why"):
        what = f"Python {value['python']} cannot use {engine}: {value['why']}"
        return found(state, what, mend, why, name=name)
    build = f"torch {value['torch']}, CUDA {value['cuda'] or 'none'}"
    what = f"{engine} {value['engine']}, {build}, sees {value['gpus']} GPUs"
    asked = look.asked_gpus if look.on_node else gpus
    if asked and needed and not value["gpus"]:
        return found(absent(needed), what, mend, f"it needs {asked} GPUs", name=name)
    return fine(what, name=name)


def _make(look: Look, field: str, engine: str) -> str:
    """An environment of its own, and the same question with it."""
    folder, asked = f"$HOME/{engine}-env", _DISTRIBUTION[engine]
    again = look.again(f"{field}.python={folder}/bin/python")
    return f"python3 -m venv {folder} && {folder}/bin/pip install {asked} && {again}"


def _text(program: ServerProgram, *, short: bool = False) -> str:
    """As a server is started, with a question in its place."""
    if program.config.python is None:
        words = [program.engine, "--version" if program.engine == "vllm" else "version"]
    elif short:
        words = [program.config.python, "-c", f"import {program.engine}"]
    else:
        words = [program.config.python, "-c", _PROBE.replace("ENGINE", program.engine)]
    return shell_text(program.config, shlex.join(words))


CHECKS = (
    Check(
        "vllm",
        "rollout servers",
        _rollouts,
        _LIMIT_S,
        lambda x: x.rollout_servers and not x.on_slurm,
    ),
    Check("vllm", "judge's server", _judge, _LIMIT_S, lambda x: x.judge_engine and not x.on_slurm),
)
