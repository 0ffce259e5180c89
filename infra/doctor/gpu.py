"""Area ``gpu``: what the driver shows, whether torch can use it, FlashAttention, NCCL, hardware.

In: `nvidia-smi`, and torch in a process of its own. Out: findings. A machine without GPUs is no
fault unless a stage that asks for some runs here. torch is asked only where there are GPUs, or
should be: importing it takes seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.doctor.check import Check, Finding, Look, absent, ask, doubtful, last_json
from infra.doctor.packages import asked_for, install, installed

_AREA = "gpu"
_SMI_S, _TORCH_S = 15.0, 100.0
_CUDA = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)")
_FIELDS = (
    *("index", "name", "driver_version", "memory.total", "memory.used", "compute_cap"),
    *("mig.mode.current", "ecc.errors.uncorrected.volatile.total", "compute_mode"),
)
_TORCH = """
import json, torch
value = {"version": torch.__version__, "cuda": torch.version.cuda, "count": 0, "why": ""}
try:
    torch.cuda.init()
    value["count"] = torch.cuda.device_count()
    value["capabilities"] = [torch.cuda.get_device_capability(i) for i in range(value["count"])]
    value["arches"] = torch.cuda.get_arch_list()
    value["free"] = [torch.cuda.mem_get_info(i)[0] for i in range(value["count"])]
    x = torch.ones(64, 64, device="cuda")
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
    needed = look.gpus
    if shutil.which("nvidia-smi") is None:
        yield _none(look, "this machine has no `nvidia-smi`: no GPU, or no driver")
        return
    query = f"--query-gpu={','.join(_FIELDS)}"
    answer = ask(["nvidia-smi", query, "--format=csv,noheader,nounits"], _SMI_S)
    if answer.hung:
        yield Finding(
            *(_AREA, "driver", doubtful(needed), f"`nvidia-smi` gave {answer.last_line}"),
            mend="sudo dmesg | grep -iE 'NVRM|Xid'",
            why="a GPU that has fallen off the bus hangs whoever asks for it, a reset too: the "
            "driver's last words say which; its node has to be drained and started again",
        )
        return
    rows = [_row(line) for line in answer.out.splitlines() if line.count(",") >= 2]
    if not answer.ok or not rows:
        yield Finding(
            *(_AREA, "driver", doubtful(needed), f"`nvidia-smi` failed: {answer.last_line}"),
            mend="sudo modprobe nvidia",
            why="GPUs are used through the driver",
        )
        return
    yield from _listed(look, rows)
    for row in rows:
        yield from _trouble(row)
    yield from _torch(look, rows)


def _none(look: Look, what: str) -> Finding:
    elsewhere = look.on_slurm and not look.on_node
    hint = "; stages with GPUs go to Slurm, `--job` looks there" if elsewhere else ""
    torch = f"; torch {installed('torch')}"
    return Finding(
        *(_AREA, "GPUs", absent(look.gpus), f"{what}{hint}{torch}"),
        mend=f"{look.command('run')} dispatch.executor=slurm dispatch.profile=PROFILE"
        if look.gpus and not look.on_node
        else _on_node(look),
        why=f"a stage asks for {look.gpus} GPUs here" if look.gpus else "large models",
    )


def _on_node(look: Look) -> str:
    """What a person would try next on a compute node without its GPU."""
    option = "--gres=gpu:1" if look.profile.gpu_option == "gres" else "--gpus-per-node=1"
    return f"srun {option} nvidia-smi --list-gpus" if look.gpus else ""


def _row(line: str) -> dict[str, str]:
    return dict(zip(_FIELDS, (cell.strip() for cell in line.split(",")), strict=False))


def _listed(look: Look, rows: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    names = sorted({r["name"] for r in rows})
    memory = min((float(r["memory.total"]) for r in rows if _number(r["memory.total"])), default=0)
    what = (
        f"{len(rows)} x {', '.join(names)}, {memory / 1024:.0f} GiB each, driver "
        f"{rows[0]['driver_version']}"
    )
    if len(rows) < look.gpus:
        yield Finding(
            *(_AREA, "GPUs", "broken", f"{what}; a stage asks for {look.gpus}"),
            mend=f"{look.command('plan')} --json",
            why="who gets which GPU stands in the plan",
        )
    else:
        yield Finding(_AREA, "GPUs", "ok", what)


def _number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _trouble(row: Mapping[str, str]) -> Iterator[Finding]:
    """What the hardware or its settings would surprise with."""
    name = f"GPU {row.get('index', '?')}"
    cells = " ".join(row.values())
    if "requires reset" in cells.lower() or "ERR!" in cells or "lost" in cells.lower():
        yield Finding(
            *(_AREA, name, "broken", f"it is in error ({cells})"),
            mend=f"sudo nvidia-smi --gpu-reset --id={row.get('index', '0')}",
        )
    errors = row.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdigit() and int(errors):
        yield Finding(
            *(_AREA, name, "warning", f"{errors} uncorrected memory errors since the driver began"),
            mend=f"nvidia-smi --query --display=ECC,ROW_REMAPPER --id={row.get('index', '0')}",
            why="such a GPU ends jobs; the scheduler should drain its node",
        )
    if row.get("mig.mode.current") == "Enabled":
        yield Finding(
            *(_AREA, name, "warning", "MIG is on: a process sees one slice of it, never two"),
            mend="nvidia-smi -L",
            why="training on several GPUs, and NCCL between them, needs whole ones",
        )
    mode = row.get("compute_mode", "")
    if mode in ("Exclusive_Process", "Prohibited"):
        yield Finding(
            *(_AREA, name, "warning", f"compute mode {mode}"),
            mend=f"sudo nvidia-smi --compute-mode=DEFAULT --id={row.get('index', '0')}",
            why="grpo.rollout_server.colocate lets two processes share a GPU",
        )


def _torch(look: Look, rows: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    needed, version = look.gpus, installed("torch") or "none"
    if "+cpu" in version:
        yield Finding(
            *(_AREA, "torch", doubtful(needed), f"torch {version} is built without CUDA"),
            mend=_reinstall(),
            why="training on these GPUs",
        )
        return
    answer = ask([sys.executable, "-P", "-c", _TORCH], _TORCH_S)
    value = last_json(answer.out)
    if value is None:
        yield Finding(
            *(_AREA, "torch", doubtful(needed), f"torch cannot be imported: {answer.last_line}"),
            mend=_reinstall(),
        )
        return
    yield _usable(look, value)
    for row, capability in zip(rows, value.get("capabilities", ()), strict=False):
        arch = f"sm_{capability[0]}{capability[1]}"
        built = ", ".join(value["arches"])
        if built and not _runs(arch, value["arches"]):
            yield Finding(
                *(_AREA, f"GPU {row['index']}", doubtful(needed)),
                f"{row['name']} is {arch}, and this torch is built for {built}",
                mend=_reinstall(),
            )
    yield from _kernels(look, value)


def _usable(look: Look, value: Mapping[str, Any]) -> Finding:
    driver = _CUDA.search(ask(["nvidia-smi"], _SMI_S).out)
    supports = f", the driver supports CUDA {driver[1]}.{driver[2]}" if driver else ""
    what = f"torch {value['version']}, CUDA {value['cuda']}{supports}"
    if not value["why"]:
        free = ", ".join(f"{size / 2**30:.0f}" for size in value["free"])
        return Finding(_AREA, "torch", "ok", f"{what}; computes on them ({free} GiB free)")
    mend, why = _reinstall(), "training on these GPUs"
    if driver and value["cuda"] and int(driver[1]) < int(value["cuda"].partition(".")[0]):
        wheels = f"WHEELS_OF_TORCH/cu{driver[1]}{driver[2]}"
        mend = install("--force-reinstall", asked_for("torch"), "--index-url", wheels)
        why = "torch's CUDA must not be of a later major version than the driver's"
    elif "CUDA_VISIBLE_DEVICES" in os.environ and "No CUDA GPUs" in value["why"]:
        what += f", CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides them"
        mend = "unset CUDA_VISIBLE_DEVICES"
    elif "unknown error" in value["why"]:
        mend = "sudo modprobe nvidia_uvm"
    what = f"{what}: {value['why']}"
    return Finding(_AREA, "torch", doubtful(look.gpus), what, mend=mend, why=why)


def _reinstall() -> str:
    return install("--force-reinstall", asked_for("torch"))


def _runs(arch: str, built: Sequence[str]) -> bool:
    """Whether code for ``built`` runs there: the same major version and no later minor one."""
    number = arch.removeprefix("sm_")
    for one in built:
        kind, _, its = one.partition("_")
        its = its.rstrip("af")
        if its[:-1] == number[:-1] and its <= number:
            return True
        if kind == "compute" and int(its) <= int(number):
            return True
    return False


def _kernels(look: Look, value: Mapping[str, Any]) -> Iterator[Finding]:
    wanted = look.config.model.attn_implementation == "flash_attention_2" and look.gpus
    if value["flash"]:
        yield Finding(_AREA, "FlashAttention", "ok", f"flash-attn {value['flash']}")
    else:
        why_not = value["flash_why"]
        there = "cannot be imported: " + why_not if installed("flash-attn") else "is not installed"
        yield Finding(
            *(_AREA, "FlashAttention", absent(wanted), f"flash-attn {there}"),
            mend=install("--no-build-isolation", asked_for("flash-attn")),
            why="model.attn_implementation=flash_attention_2",
        )
    if value["nccl"]:
        yield Finding(_AREA, "NCCL", "ok", f"NCCL {value['nccl']} comes with torch")
    elif look.gpus > 1:
        yield Finding(
            *(_AREA, "NCCL", "broken", "this torch has no NCCL"),
            mend=_reinstall(),
            why="training on several GPUs",
        )


CHECKS = (
    Check(
        *(_AREA, "GPUs", _gpus),
        limit_s=2 * _SMI_S + _TORCH_S,
        needed=lambda look: look.gpus,
        hung="nvidia-smi",
    ),
)
