"""Areas ``gpu`` and ``vllm``: driver, torch, FlashAttention; the engines that serve models.

In: `nvidia-smi`, and torch in a process of its own; ``grpo.rollout_server`` and ``judge.serve``,
run with the very shell text that starts a server. Out: findings. A machine without GPUs is no
error unless a stage that requests some runs here. torch is only checked where there are GPUs, or
should be: importing it takes seconds.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator

from infra.doctor.check import (
    CheckResult,
    DoctorCheck,
    SystemInfo,
    absent,
    ask,
    doubtful,
    fine,
    found,
    last_json,
)
from infra.doctor.machine import install, installed, requested_resources
from infra.services.process import ServerProgram, shell_text

_SMI_S, _TORCH_S = 15.0, 100.0
_FIELDS = ("name", "driver_version", "memory.total")
_TORCH = """
import json, torch
value = {"version": torch.__version__, "cuda": torch.version.cuda, "why": ""}
try:
    torch.cuda.init()
    for i in range(torch.cuda.device_count()):
        x = torch.ones(64, 64, device=f"cuda:{i}")
        assert float((x @ x).sum()) == 64.0**3
except Exception as error:
    value["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
try:
    import flash_attn
    value["flash"] = ""
except Exception as error:
    value["flash"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(value))
"""


def _gpus(info: SystemInfo) -> Iterator[CheckResult]:
    if shutil.which("nvidia-smi") is None:
        yield _none(info)
        return
    query = f"--query-gpu={','.join(_FIELDS)}"
    answer = ask(["nvidia-smi", query, "--format=csv,noheader,nounits"], _SMI_S)
    rows = [line.split(", ") for line in answer.out.splitlines() if line.count(",") >= 2]
    if not answer.ok or not rows:
        what = f"`nvidia-smi` {'gave' if answer.hung else 'failed:'} {answer.last_line}"
        why = "GPUs are used through the driver; its last line names what it lacks"
        fix = "sudo dmesg | grep -iE 'NVRM|Xid'"
        yield found(doubtful(info.gpus), what, fix, why, name="driver")
        return
    names = ", ".join(sorted({row[0] for row in rows}))
    memory = min((float(row[2]) for row in rows if row[2].isdigit()), default=0.0) / 1024
    what = f"{len(rows)} x {names}, {memory:.0f} GiB each, driver {rows[0][1]}"
    if len(rows) >= info.gpus:
        yield fine(what)
    else:
        why, fix = "the plan shows which stage gets which GPU", f"{info.command('plan')} --json"
        yield found("broken", f"{what}; a stage requests {info.gpus}", fix, why)
    yield from _torch(info)


def _none(info: SystemInfo) -> CheckResult:
    what = "this machine has no `nvidia-smi`: no GPU, or no driver"
    if info.on_slurm and not info.on_node:
        what += "; stages with GPUs go to Slurm, `srun refiner doctor` checks there"
    if not info.gpus:
        return found("missing", what, why="large models")
    fix = f"{info.command('run')} dispatch.executor=slurm dispatch.profile=PROFILE"
    if info.on_node:  # the next thing to try there
        option = "--gres=gpu:1" if info.profile.gpu_option == "gres" else "--gpus-per-node=1"
        fix = f"srun {option} nvidia-smi --list-gpus"
    return found("broken", what, fix, f"a stage requests {info.gpus} GPUs here")


def _torch(info: SystemInfo) -> Iterator[CheckResult]:
    state, version = doubtful(info.gpus), installed("torch") or "none"
    fix, why = install("--force-reinstall", requested_resources("torch")), "training on these GPUs"
    if "+cpu" in version:
        what = f"torch {version} is built without CUDA"
        yield found(state, what, fix, why, name="torch")
        return
    answer = ask([sys.executable, "-P", "-c", _TORCH], _TORCH_S)
    value = last_json(answer.out)
    if value is None:
        what = f"torch cannot be imported: {answer.last_line}"
        yield found(state, what, fix, name="torch")
        return
    what = f"torch {value['version']}, CUDA {value['cuda']}"
    if value["why"]:
        why = "its CUDA must not be of a later major version than the driver's: see `nvidia-smi`"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            what += f", CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}"
        yield found(state, f"{what}: {value['why']}", fix, why, name="torch")
    else:
        yield fine(f"{what}; computes on them", name="torch")
    wanted = "flash_attention_2"
    if info.config.model.attn_implementation == wanted and value["flash"]:
        fix = install("--no-build-isolation", requested_resources("flash-attn"))
        what, why = f"cannot be imported: {value['flash']}", f"model.attn_implementation={wanted}"
        yield found(absent(info.gpus), what, fix, why, name="FlashAttention")


# ---------------------------------------------------------------- environments that serve models


#: Limit for importing vLLM and torch from a cold network file system, seconds.
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


def _rollouts(info: SystemInfo) -> CheckResult | None:
    if info.rollout_servers:
        program = ServerProgram(info.config.grpo.rollout_server, "grpo.rollout_server", "vllm")
        return _environment(info, program, info.rollout_gpus)
    if path := shutil.which("vllm"):
        return fine(f"{path} is on PATH", name="vllm")
    fix = _make(info, "grpo.rollout_server", "vllm")
    why = "grpo.generation_backend=vllm, and judge.serve.engine=vllm"
    return found("missing", "no `vllm` on PATH", fix, why, name="vllm")


def _judge(info: SystemInfo) -> CheckResult | None:
    engine = info.judge_engine
    if engine not in ("vllm", "transformers"):
        return None
    program = ServerProgram(info.config.judge.serve, "judge.serve", engine)
    return _environment(info, program, info.config.judge.resources.gpus)


def _environment(info: SystemInfo, program: ServerProgram, gpus: int) -> CheckResult:
    name, engine, needed = program.field, program.engine, info.serves_here
    state, why = doubtful(needed), f"{name} serves models with {engine}"
    if program.lacking:
        elsewhere = "" if needed else " here; `srun refiner doctor` checks a compute node"
        fix = _make(info, name, engine)
        return found(state, program.lacking + elsewhere, fix, why, name=name)
    python = shlex.quote(program.config.python or "python3")
    fix = f"{python} -m pip install --upgrade {_DISTRIBUTION[engine]}"
    answer = ask(["bash", "-c", _text(program)], _IMPORT_S)
    value = last_json(answer.out)
    if value is None:
        if program.config.python is None and answer.ok:
            return fine(f"{engine} {answer.out.split()[-1]} answers", name=name)
        return found(state, f"it cannot be started: {answer.last_line}", fix, why, name=name)
    if value.get("why"):
        what = f"Python {value['python']} cannot use {engine}: {value['why']}"
        return found(state, what, fix, why, name=name)
    build = f"torch {value['torch']}, CUDA {value['cuda'] or 'none'}"
    what = f"{engine} {value['engine']}, {build}, sees {value['gpus']} GPUs"
    if gpus and needed and not value["gpus"]:
        return found(absent(needed), what, fix, f"it needs {gpus} GPUs", name=name)
    return fine(what, name=name)


def _make(info: SystemInfo, field: str, engine: str) -> str:
    """The commands that make an environment of its own, and check it."""
    folder, asked = f"$HOME/{engine}-env", _DISTRIBUTION[engine]
    again = info.again(f"{field}.python={folder}/bin/python")
    return f"python3 -m venv {folder} && {folder}/bin/pip install {asked} && {again}"


def _text(program: ServerProgram) -> str:
    """The shell text of a server, with a test in its place."""
    if program.config.python is None:
        words = [program.engine, "--version" if program.engine == "vllm" else "version"]
    else:
        words = [program.config.python, "-c", _PROBE.replace("ENGINE", program.engine)]
    return shell_text(program.config, shlex.join(words))


CHECKS = (
    DoctorCheck("gpu", "GPUs", _gpus, 2 * _SMI_S + _TORCH_S, lambda info: info.gpus, "nvidia-smi"),
    DoctorCheck(
        "vllm", "servers", _rollouts, _LIMIT_S, lambda x: x.rollout_servers and not x.on_slurm
    ),
    DoctorCheck(
        "vllm", "judge's server", _judge, _LIMIT_S, lambda x: x.judge_engine and not x.on_slurm
    ),
)
