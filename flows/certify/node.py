"""A complete certification: the parts, one after another, and the certificate.

In: a recipe's configuration and a time limit. Out: a recorded
:class:`~refiner_core.contract.proofs.Certificate`. Each part is a process in a session of its own,
with a deadline; one that exceeds it, or dies, is a failed check with the last line of its output.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from flows.certify.work import SHAPES, WorkOrder, absent, check, sft_recipe, shape_of
from infra.doctor.check import ask, last_json
from infra.external.process import TrainerProcess
from infra.host.processes import environment
from infra.store import atomic
from infra.store.provenance import host, new_scratch, versions, write_certificate
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import RecipeConfig, RolloutServerConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError, StageFailed, no_such
from refiner_core.contract.loading import apply_overrides, load_recipe
from refiner_core.contract.placement import training_memory
from refiner_core.contract.proofs import Certificate, CertifiedCheck
from refiner_core.contract.records import to_json
from refiner_core.contract.services import asks_judge, serves
from refiner_core.contract.types import WITHOUT_REASONING

#: Part -> module and function of its checks; imported in its process, as torch takes seconds.
_MADE_BY = {
    "numerics": ("device", "numeric_checks"),
    "ranks": ("processes", "rank_checks"),
    "speed": ("device", "speed_checks"),
    "servers": ("processes", "server_checks"),
    "faults": ("processes", "fault_checks"),
}
#: The judge is asked by this process: it needs no torch.
_JUDGE = "judge"
PARTS = (*_MADE_BY, _JUDGE)
#: File of a part's order, and the prefix of its output lines with checks.
_ORDER, _MADE = "order.json", "certified-check "
#: Share of a GPU's memory that a forecast may fill.
_FILL = 0.9
_GIB = 2**30
_POLL_S = 0.2
_PROBE_S = 120.0
#: Queries torch in a process of its own: the parent stays light and off the GPUs.
_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
value = {"gpus": [torch.cuda.get_device_name(i) for i in range(count)], "versions": {}}
value["bytes"] = min([torch.cuda.mem_get_info(i)[0] for i in range(count)], default=0)
value["versions"]["torch"] = torch.__version__
if count:
    value["versions"]["cuda"] = str(torch.version.cuda)
    value["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print("\\n" + json.dumps(value))
"""


def probe() -> dict[str, Any]:
    """GPUs usable by torch (names, the smallest free memory in bytes), and versions.

    Raises
    ------
    StageFailed
        torch cannot be imported, or hangs.
    """
    answer = ask([sys.executable, "-P", "-c", _PROBE], _PROBE_S)
    value = last_json(answer.out)
    if value is None:
        raise StageFailed(
            f"torch cannot list its GPUs ({answer.last_line})",
            expected="torch as installed with refiner, and a working driver",
            fix="refiner doctor --only gpu",
        )
    value["versions"] |= {k: v for k, v in versions().items() if k in ("transformers", "deepspeed")}
    if value["gpus"] and (driver := _driver()):
        value["versions"]["driver"] = driver
    return dict(value)


def make_order(config: RecipeConfig, found: dict[str, Any], model: str | None) -> WorkOrder:
    """The order for a node: on all of its GPUs in bfloat16, or on its CPU in the recipe's type.

    ``model`` is a shape; by default the largest that fits on a GPU, or the tiny one on a CPU.

    Raises
    ------
    ConfigurationError
        There is no such shape.
    """
    gpus = len(found["gpus"])
    dtype = "bfloat16" if gpus else config.model.dtype
    if model is not None and model not in SHAPES:
        fix = "leave --model out: the largest that fits is used"
        raise no_such("There is no shape", model, SHAPES, fix)
    tried = [model] if model else (list(reversed(SHAPES)) if gpus else ["tiny"])
    worlds = tuple(sorted({1, 2, gpus} & set(range(1, gpus + 1)))) or (2,)
    last = WorkOrder(gpus, dtype, tried[-1], False, worlds, vllm=_vllm(config))
    orders = (replace(last, model=n, checkpointing=c) for n in tried for c in (False, True))
    return next((order for order in orders if not gpus or _fits(order, found)), last)


def certify_node(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    only: Sequence[str] = (),
    time_limit_s: float = 900.0,
    tell: Callable[[CertifiedCheck], None] = lambda check: None,
) -> Certificate:
    """Test on this node what training relies on, and record the results in the workspace.

    Parameters
    ----------
    recipe, overrides
        As for :func:`flows.api.run_recipe`; without a recipe, overrides of the defaults. Workspace,
        type of weights, ``grpo.rollout_server`` and ``judge`` are used.
    model
        Shape for the speed tests: ``tiny``, ``0.6B``, ``1.7B``, ``4B``; None is the largest that
        fits.
    only
        Parts to run; if some are left out, nothing is recorded.
    time_limit_s
        Time limit for all parts, seconds.
    tell
        Receives each check when it is finished.

    Returns
    -------
    Certificate
        Checks with verdicts and figures; ``passed`` is True if none failed.

    Raises
    ------
    ConfigurationError
        There is no such recipe, part or shape.
    StageFailed
        torch cannot be used.
    """
    config = (
        load_recipe(recipe, overrides) if recipe else apply_overrides(RecipeConfig(), overrides)
    )
    if unknown := [name for name in only if name not in PARTS]:
        raise no_such("There is no part", unknown[0], PARTS, "see `refiner certify --help`")
    began, checks = time.monotonic(), list[CertifiedCheck]()
    deadline = began + time_limit_s
    workspace = Workspace.open(config.workspace, config.data_root)
    found = probe()
    found["disk"] = shutil.disk_usage(workspace.root).free
    order = make_order(config, found, model)
    scratch = new_scratch(workspace, "certify")

    def made(one: CertifiedCheck) -> None:
        checks.append(one)
        tell(one)

    try:
        for name in (part for part in PARTS if part in (only or PARTS)):
            if name != _JUDGE:
                run_part(name, order, scratch / name, deadline, made)
            elif (one := judge_check(config, workspace)) is not None:
                made(one)
    finally:
        _kill_workers(scratch)
        atomic.remove_tree(scratch)
    certificate = Certificate(
        *(now_text(), host(), tuple(found["gpus"]), found["versions"], order.model, order.dtype),
        seconds=round(time.monotonic() - began, 1),
        checks=tuple(checks),
    )
    if not only:
        write_certificate(workspace, certificate)
    return certificate


def certificate_json(certificate: Certificate) -> dict[str, Any]:
    """A certificate as JSON.

    Parameters
    ----------
    certificate
        From :func:`flows.api.certify_node`.

    Returns
    -------
    dict
        The content of ``refiner certify --json``: ``checks`` with ``name``, ``verdict`` (``pass``,
        ``fail``, ``absent``), ``why`` and ``figures``; ``passed``; GPUs and versions.
        Raises nothing.
    """
    return {**to_json(certificate), "passed": certificate.passed}


def judge_check(config: RecipeConfig, workspace: Workspace) -> CertifiedCheck | None:
    """A question of each kind to the recipe's judge; None without a judge that has a server."""
    from flows.judges import ask_each, examples

    judge = config.judge
    if judge.kind != "openai" or not asks_judge(config):
        return None
    name = f"judge {judge.model}"
    try:
        asked = ask_each(workspace, judge, examples())
    except ConfigurationError as error:  # refiner starts its server with a run
        return absent(name, error.what) if serves(judge) else check(name, False, str(error))
    except RefinerError as error:
        return check(name, False, str(error))
    if asked.reasoning:
        return check(name, False, f"{asked.reasoning}; {WITHOUT_REASONING}")
    why = f"{asked.request.kind}: {asked.judgement.detail}"
    if asked.judgement.status == "scored":
        why = f"a score of each kind of question, the first in {asked.seconds:.2g} s"
    return check(name, asked.judgement.status == "scored", why, seconds=asked.seconds)


def run_part(
    name: str,
    order: WorkOrder,
    folder: Path,
    deadline: float,
    tell: Callable[[CertifiedCheck], None],
) -> None:
    """Run one part in its own process until ``deadline`` (of ``time.monotonic``)."""
    if time.monotonic() >= deadline:
        tell(absent(name, "no time left (--time-limit)"))
        return
    folder.mkdir(parents=True)
    order.write(folder / _ORDER)
    command = f'exec "{sys.executable}" -P -m flows.certify.node {name} "{folder}"'
    last, settings = "", environment()
    settings.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads of ranks slow each other
    settings["HF_HUB_OFFLINE"] = "1"
    with TrainerProcess(command, settings, Path.cwd()) as process:
        code = None
        while code is None and time.monotonic() < deadline:
            code = process.code
            for line in process.lines(_POLL_S) if code is None else process.last_lines():
                if line.text.startswith(_MADE):
                    tell(CertifiedCheck(**json.loads(line.text.removeprefix(_MADE))))
                else:
                    last = line.text.strip() or last
    if code is None:
        tell(check(name, False, f"it did not end in time; its last line: {last[:200]}"))
    elif code:
        tell(check(name, False, f"it ended with exit code {code}; its last line: {last[:200]}"))


def _make_checks(name: str, folder: Path) -> None:
    """Run the checks of one part in its process, and print each when it is finished."""
    module, function = _MADE_BY[name]
    checks = getattr(importlib.import_module(f"flows.certify.{module}"), function)
    for found in checks(WorkOrder.read(folder / _ORDER), folder):
        sys.stdout.write(f"\n{_MADE}{json.dumps(asdict(found))}\n")
        sys.stdout.flush()


def _kill_workers(scratch: Path) -> None:
    """Kill the workers of a killed orchestrator; these have nothing to resume."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(scratch) in word for word in process.cmdline()):
                process.kill()


def _fits(order: WorkOrder, found: Mapping[str, Any]) -> bool:
    """True if a shape fits on a GPU, and twice its weights fit on the disk."""
    need = training_memory(sft_recipe(order), "sft", shape_of(order.model))
    on_disk = 4 * shape_of(order.model).parameters
    return bool(need.gpu_bytes <= _FILL * found["bytes"] and on_disk <= found["disk"])


def _vllm(config: RecipeConfig) -> dict[str, Any]:
    """Path of vLLM, if the recipe names it; a plain `vllm` on PATH counts too."""
    server, plain = config.grpo.rollout_server, RolloutServerConfig()
    names = ("python", "setup", "container", "args", "weights_dir")
    said = {name: getattr(server, name) for name in names}
    given = any(said[name] != getattr(plain, name) for name in ("python", "setup", "container"))
    return said if given or shutil.which("vllm") else {}


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    _make_checks(sys.argv[1], Path(sys.argv[2]))
