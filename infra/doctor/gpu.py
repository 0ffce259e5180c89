"""Areas ``gpu`` and ``vllm``: driver, torch, FlashAttention, NCCL; the engines that serve models.

In: `nvidia-smi`, and torch in a process of its own; ``grpo.rollout_server`` and ``judge.serve``,
asked in the very shell text that a server is started by. Out: findings. A machine without GPUs is
no fault unless a stage that asks for some runs here. torch is asked only where there are GPUs, or
should be: importing it takes seconds.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.doctor.check import Check, Finding, Look, absent, ask, doubtful, fine, found, last_json
from infra.doctor.machine import asked_for, install, installed
from infra.services.process import ServerProgram, shell_text

_SMI_S, _TORCH_S = 15.0, 100.0
_CUDA = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)")
_FIELDS = (
    *("index", "name", "driver_version", "memory.total", "memory.used", "compute_cap"),
    *("mig.mode.current", "ecc.errors.uncorrected.volatile.total"),
)
_TORCH = """
import json, torch
value = {"version": torch.__version__, "cuda": torch.version.cuda, "count": 0, "why": ""}
try:
    torch.cuda.init()
    value["count"] = torch.cuda.device_count()
    value["free"] = [torch.cuda.mem_get_info(i)[0] for i in range(value["count"])]
    for i in range(value["count"]):
        x = torch.ones(64, 64, device=f"cuda:{i}")
        assert float((x @ x).sum()) == 64.0**3
except Exception as error:
    value["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
try:
    value["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    value["nccl"] = ""
try:
    import flash_attn
    value["flash"], value["flash_why"] = flash_attn.__version__, ""
except Exception as error:
    value["flash"], value["flash_why"] = "", f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(value))
"""


def _gpus(look: Look) -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        yield _none(look)
        return
    query = f"--query-gpu={','.join(_FIELDS)}"
    answer = ask(["nvidia-smi", query, "--format=csv,noheader,nounits"], _SMI_S)
    lines = [line for line in answer.out.splitlines() if line.count(",") >= 2]
    if answer.hung:
        yield found(
            *(doubtful(look.gpus), f"`nvidia-smi` gave {answer.last_line}"),
            "sudo dmesg | grep -iE 'NVRM|Xid'",
            "a GPU that has fallen off the bus hangs whoever asks for it, a reset too: the "
            "driver's last words say which; its node has to be drained and started again",
            name="driver",
        )
    elif not answer.ok or not lines:
        what, why = f"`nvidia-smi` failed: {answer.last_line}", "GPUs are used through the driver"
        yield found(doubtful(look.gpus), what, "sudo modprobe nvidia", why, name="driver")
    else:
        cells = ((cell.strip() for cell in line.split(",")) for line in lines)
        rows = [dict(zip(_FIELDS, row, strict=False)) for row in cells]
        yield _listed(look, rows)
        for row in rows:
            yield from _trouble(row)
        yield from _torch(look)


def _none(look: Look) -> Finding:
    what = "this machine has no `nvidia-smi`: no GPU, or no driver"
    if look.on_slurm and not look.on_node:
        what += "; stages with GPUs go to Slurm, `--job` looks there"
    what += f"; torch {installed('torch')}"
    if not look.gpus:
        return found("missing", what, why="large models")
    mend = f"{look.command('run')} dispatch.executor=slurm dispatch.profile=PROFILE"
    if look.on_node:  # what a person would try next there
        option = "--gres=gpu:1" if look.profile.gpu_option == "gres" else "--gpus-per-node=1"
        mend = f"srun {option} nvidia-smi --list-gpus"
    return found("broken", what, mend, f"a stage asks for {look.gpus} GPUs here")


def _listed(look: Look, rows: Sequence[Mapping[str, str]]) -> Finding:
    names = sorted({r["name"] for r in rows})
    sizes = [r["memory.total"] for r in rows if r["memory.total"].replace(".", "", 1).isdigit()]
    memory = min(map(float, sizes), default=0) / 1024
    driver = rows[0]["driver_version"]
    what = f"{len(rows)} x {', '.join(names)}, {memory:.0f} GiB each, driver {driver}"
    if len(rows) >= look.gpus:
        return fine(what)
    what, why = f"{what}; a stage asks for {look.gpus}", "who gets which GPU stands in the plan"
    return found("broken", what, f"{look.command('plan')} --json", why)


def _trouble(row: Mapping[str, str]) -> Iterator[Finding]:
    """Surprises that the hardware or its settings hold."""
    name, index = f"GPU {row.get('index', '?')}", row.get("index", "0")
    cells = " ".join(row.values())
    if "requires reset" in cells.lower() or "ERR!" in cells or "lost" in cells.lower():
        mend = f"sudo nvidia-smi --gpu-reset --id={index}"
        yield found("broken", f"it is in error ({cells})", mend, name=name)
    errors = row.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdigit() and int(errors):
        yield found(
            *("warning", f"{errors} uncorrected memory errors since the driver began"),
            f"nvidia-smi --query --display=ECC,ROW_REMAPPER --id={index}",
            "such a GPU ends jobs; the scheduler should drain its node",
            name=name,
        )
    if row.get("mig.mode.current") == "Enabled":
        what = "MIG is on: a process sees one slice of it, never two"
        why = "training on several GPUs, and NCCL between them, needs whole ones"
        yield found("warning", what, "nvidia-smi -L", why, name=name)


def _torch(look: Look) -> Iterator[Finding]:
    state, version = doubtful(look.gpus), installed("torch") or "none"
    if "+cpu" in version:
        what = f"torch {version} is built without CUDA"
        yield found(state, what, _reinstall(), "training on these GPUs", name="torch")
        return
    answer = ask([sys.executable, "-P", "-c", _TORCH], _TORCH_S)
    value = last_json(answer.out)
    if value is None:
        what = f"torch cannot be imported: {answer.last_line}"
        yield found(state, what, _reinstall(), name="torch")
        return
    yield _usable(look, value)
    yield from _kernels(look, value)


def _usable(look: Look, value: Mapping[str, Any]) -> Finding:
    driver = _CUDA.search(ask(["nvidia-smi"], _SMI_S).out)
    supports = f", the driver supports CUDA {driver[1]}.{driver[2]}" if driver else ""
    what = f"torch {value['version']}, CUDA {value['cuda']}{supports}"
    if not value["why"]:
        free = ", ".join(f"{size / 2**30:.0f}" for size in value["free"])
        return fine(f"{what}; computes on them ({free} GiB free)", name="torch")
    mend, why = _reinstall(), "training on these GPUs"
    if driver and value["cuda"] and int(driver[1]) < int(value["cuda"].partition(".")[0]):
        mend = _reinstall("--index-url", f"WHEELS_OF_TORCH/cu{driver[1]}{driver[2]}")
        why = "torch's CUDA must not be of a later major version than the driver's"
    elif "CUDA_VISIBLE_DEVICES" in os.environ and "No CUDA GPUs" in value["why"]:
        what += f", CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides them"
        mend = "unset CUDA_VISIBLE_DEVICES"
    elif "unknown error" in value["why"]:
        mend = "sudo modprobe nvidia_uvm"
    return found(doubtful(look.gpus), f"{what}: {value['why']}", mend, why, name="torch")


def _reinstall(*more: str) -> str:
    return install("--force-reinstall", asked_for("torch"), *more)


def _kernels(look: Look, value: Mapping[str, Any]) -> Iterator[Finding]:
    if value["flash"]:
        yield fine(f"flash-attn {value['flash']}", name="FlashAttention")
    else:
        wanted = look.config.model.attn_implementation == "flash_attention_2" and look.gpus
        why_not = f"cannot be imported: {value['flash_why']}"
        yield found(
            *(
                absent(wanted),
                f"flash-attn {why_not if installed('flash-attn') else 'is not installed'}",
            ),
            install("--no-build-isolation", asked_for("flash-attn")),
            "model.attn_implementation=flash_attention_2",
            name="FlashAttention",
        )
    if value["nccl"]:
        yield fine(f"NCCL {value['nccl']} comes with torch", name="NCCL")
    elif look.gpus > 1:
        what, why = "this torch has no NCCL", "training on several GPUs"
        yield found("broken", what, _reinstall(), why, name="NCCL")


# ---------------------------------------------------------------- environments that serve models


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


SERVING = (
    Check(
        "vllm",
        "rollout servers",
        _rollouts,
        _LIMIT_S,
        lambda x: x.rollout_servers and not x.on_slurm,
    ),
    Check("vllm", "judge's server", _judge, _LIMIT_S, lambda x: x.judge_engine and not x.on_slurm),
)
GPUS = (
    Check(
        *("gpu", "GPUs", _gpus),
        limit_s=2 * _SMI_S + _TORCH_S,
        needed=lambda look: look.gpus,
        hung="nvidia-smi",
    ),
)
CHECKS = (*GPUS, *SERVING)
