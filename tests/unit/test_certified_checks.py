"""Checks of `refiner certify` on wrong kernels, ranks and servers; certificates and their use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.certify.device import EXACT, kernel_check, own_samples, score_rows
from flows.certify.device import _load as load
from flows.certify.node import judge_check, make_order, run_part
from flows.certify.processes import engine_checks, server_checks
from flows.certify.work import WorkOrder
from flows.doctor import examine
from infra.store.provenance import read_certificates, write_certificate
from infra.store.workspace import Workspace
from refiner_core.cards.build import build_card
from refiner_core.cards.public import public_certificate
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.proofs import Certificate, CertifiedCheck
from tests.support.card_facts import full_facts
from tests.support.judge_server import JudgeServer, reasoning
from tests.support.vllm_server import shim

CPU = WorkOrder(0, "float32", "tiny", False, (2,))
_SDPA = torch.nn.functional.scaled_dot_product_attention


# ---------------------------------------------------------------- a wrong kernel


@pytest.fixture(scope="module")
def kernel_of() -> Callable[[str], CertifiedCheck]:
    samples, _ = own_samples(CPU)
    exact = score_rows(load(CPU, "eager", "float32"), samples)
    return lambda kernel: kernel_check(CPU, kernel, "float32", samples, exact, EXACT)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 1.05 * grad


@pytest.mark.slow
def test_a_kernel_that_is_wrong_forward_or_backward_fails(
    kernel_of: Callable[[str], CertifiedCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def wrong(*args: Any, **named: Any) -> torch.Tensor:
            return compute(_SDPA(*args, **named))

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)

    assert kernel_of("sdpa").verdict == "pass"
    kernel(lambda x: 1.01 * x)
    found = kernel_of("sdpa")
    assert found.verdict == "fail"
    assert found.figures["gap_max"] > EXACT["gap_max"]
    assert kernel_of("eager").verdict == "pass", "which does not use it"
    kernel(_WrongBackward.apply)
    found = kernel_of("sdpa")
    assert found.verdict == "fail"
    assert found.figures["gap_max"] < EXACT["gap_max"]
    assert found.figures["gradient_gap"] > EXACT["gradient_gap"]


# ---------------------------------------------------------------- ranks and servers


def test_a_wrong_engine_fails() -> None:
    expected = {"loss": [2.0, 1.5], "norm": [1.0, 0.9]}
    wrong = {"loss": [2.0, 1.6], "norm": [1.0, 0.9]}
    fewer = {"loss": [2.0], "norm": [1.0]}
    nan = {"loss": [2.0, float("nan")], "norm": [1.0, 0.9]}
    found = {"engines": {"0": expected, "1": wrong, "2": fewer}, "missing": {"3": "no DeepSpeed"}}
    verdicts = [c.verdict for c in engine_checks(CPU, 2, found, expected)]
    assert verdicts == ["pass", "fail", "fail", "absent"]
    found["engines"]["0"] = nan
    assert next(iter(engine_checks(CPU, 2, found, expected))).verdict == "fail"


@pytest.fixture
def with_vllm(tmp_path: Path) -> WorkOrder:
    """The tests' server, which speaks as vLLM does."""
    setup = [f"export PATH={shim(tmp_path / 'bin')}:$PATH"]
    return replace(CPU, vllm={"setup": setup, "weights_dir": str(tmp_path)})


@pytest.mark.slow
def test_new_weights_reach_a_server_that_asks_for_the_key(
    with_vllm: WorkOrder, tmp_path: Path
) -> None:
    found = {c.name: c for c in server_checks(with_vllm, tmp_path / "work")}
    assert [c.verdict for c in found.values()] == ["pass", "pass"]
    assert found["vLLM, weights by reload"].figures["gap"] < 1e-3
    assert "HTTP 401" in found["vLLM, key of its control routes (reload)"].why


@pytest.mark.slow
def test_altered_weights_are_found(
    with_vllm: WorkOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refiner_core.generation.vllm.sync import write_folder

    def perturbed(model: Any, tokenizer: Any, folder: Path, weights: Any) -> None:
        if folder.name.endswith("-2"):  # the second transfer
            weight = model.model.layers[1].mlp.down_proj.weight
            with torch.no_grad():
                kept = weight.clone()
                weight.mul_(1.1)
            write_folder(model, tokenizer, folder, weights)
            weight.data.copy_(kept)
        else:
            write_folder(model, tokenizer, folder, weights)

    monkeypatch.setattr("refiner_core.generation.vllm.sync.write_folder", perturbed)
    first = next(iter(server_checks(with_vllm, tmp_path / "work")))
    assert first.verdict == "fail"


# ---------------------------------------------------------------- the parts, and what they try


def test_the_largest_shape_that_fits_is_measured_on_a_gpu() -> None:
    def order(gib: int, gpus: int = 1, model: str | None = None, disk: int = 99) -> WorkOrder:
        probed = {"gpus": ["NVIDIA H100"] * gpus, "bytes": gib << 30, "disk": disk << 30}
        return make_order(RecipeConfig(), probed, model)

    assert [order(gib).model for gib in (139, 79, 46, 22)] == ["4B", "1.7B", "1.7B", "0.6B"]
    assert order(139).dtype == "bfloat16"
    assert order(139, disk=10).model == "1.7B", "whose weights the disk takes"
    assert order(139, gpus=8).worlds == (1, 2, 8)
    assert make_order(RecipeConfig(), {"gpus": [], "bytes": 0}, None).worlds == (2,)
    with pytest.raises(ConfigurationError, match=r"one of: tiny, 0\.6B"):
        order(79, model="7B")


def part(order: WorkOrder, folder: Path, seconds: float) -> list[CertifiedCheck]:
    found: list[CertifiedCheck] = []
    deadline = time.monotonic() + seconds
    run_part("servers", order, folder, deadline, found.append)
    return found


@pytest.mark.slow
def test_a_part_that_hangs_or_dies_is_a_failed_check(tmp_path: Path) -> None:
    assert [c.verdict for c in part(CPU, tmp_path / "a", -1)] == ["absent"]
    [slow] = part(CPU, tmp_path / "b", 0.3)
    assert slow.verdict == "fail"
    dead = part(replace(CPU, dtype="float7", vllm={"python": "x"}), tmp_path / "c", 120)
    assert dead[-1].verdict == "fail"


# ---------------------------------------------------------------- certificates, and who uses them


def certificate(**changes: Any) -> Certificate:
    given: dict[str, Any] = {
        "made_at": "2026-11-23T10:00:00+00:00",
        "host": {"name": "node17", "cpu": "EPYC", "gpus": ["H100"]},
        "gpus": ("NVIDIA H100",),
        "versions": {"torch": "2.13.0"},
        "model": "4B",
        "dtype": "bfloat16",
        "seconds": 600.0,
        "checks": (
            CertifiedCheck("SFT throughput", "pass", "", {"tokens_per_s": 1e4, "parameters": 4e9}),
            CertifiedCheck("GRPO update", "pass", "", {"tokens_per_s": 1e4, "parameters": 4e9}),
            CertifiedCheck("kernel flex", "absent", "no"),
        ),
    }
    return Certificate(**{**given, **changes})


def test_certificates_are_read_back_or_refused(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "runs")
    assert read_certificates(workspace) == []
    write_certificate(workspace, certificate())
    assert read_certificates(workspace) == [certificate()]
    workspace.layout.certificate("node17").write_text('{"version": 1}')
    with pytest.raises(WorkspaceError, match="refiner certify"):
        read_certificates(workspace)
    workspace.layout.certificate("node17").write_text('{"version": 99}')
    with pytest.raises(WorkspaceError, match="has version 99"):
        read_certificates(workspace)


def test_the_doctor_compares_the_certificate(tmp_path: Path) -> None:
    from infra.host.processes import host_name
    from infra.store.provenance import versions

    def finding() -> Iterator[Any]:
        found = examine(None, (f"workspace={tmp_path}/runs",), only=("gpu",))
        return iter([f for f in found if f.name == "certificate"])

    assert next(finding(), None) is None, "no GPU, and nothing asks for one"
    workspace = Workspace.open(tmp_path / "runs")
    here = {"host": {"name": host_name()}, "versions": {"torch": versions()["torch"]}}
    write_certificate(workspace, certificate(**here))
    assert next(finding()).state == "ok"
    write_certificate(workspace, certificate(**{**here, "versions": {"torch": "1.0"}}))
    old = next(finding())
    assert (old.state, "certified: 1.0" in old.what) == ("warning", True)
    write_certificate(
        workspace,
        certificate(**here, checks=(CertifiedCheck("planted hang", "fail", "not named"),)),
    )
    failed = next(finding())
    assert (failed.state, "failed: planted hang" in failed.what) == ("warning", True)


def test_a_card_names_certified_hardware_alone() -> None:
    there: dict[str, Any] = {"host": {"name": "node99", "cpu": "EPYC", "gpus": ["H100"]}}
    there["versions"] = {"torch": "2.13.0"}
    known = public_certificate([certificate()], there)
    assert known["passed"] == 2
    assert "node17" not in str(known), "no machine's name on a card"
    card = build_card(full_facts(certificate=known))
    text = " ".join(card.split())
    assert "2026-11-23" in text
    assert "2 checks passed" in text
    for other in ({"gpus": ["A100"]}, {"cpu": "Xeon"}):
        assert not public_certificate(
            [certificate()], {**there, "host": {**there["host"], **other}}
        )
    bad = certificate(checks=(CertifiedCheck("kernel sdpa", "fail", "off"),))
    assert not public_certificate([bad], there)


def test_a_judge_that_reasons_is_not_certified(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "runs")
    off = 'judge.extra_body={"chat_template_kwargs": {"enable_thinking": false}}'
    with JudgeServer(lambda body, call: reasoning(body)) as server:
        asked = ["judge.kind=openai", "judge.model=m", f"judge.base_url={server.base_url}"]
        made = [
            judge_check(load_recipe("tiny", more), workspace) for more in (asked, [*asked, off])
        ]
    assert [check.verdict for check in made if check] == ["fail", "pass"]
    assert made[0] is not None
    assert "enable_thinking" in made[0].why
    assert judge_check(load_recipe("tiny"), workspace) is None, "word overlap has no server"
