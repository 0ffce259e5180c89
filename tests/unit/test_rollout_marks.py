"""The mark of the rollout servers of a stage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.ranks import training
from infra.rollouts import servers as opening
from infra.store.workspace import Workspace
from refiner_core.contract.loading import load_recipe
from refiner_core.training.ranks import Ranks


def test_an_attempt_finds_the_servers_of_the_attempt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold GPUs; a mark of each attempt's own would let them stay."""
    folders: list[Path] = []
    monkeypatch.setattr(
        opening, "open_vllm", lambda config, tokenizer, workdir, **_: folders.append(workdir)
    )
    work: Any = SimpleNamespace(
        config=load_recipe("tiny"), io=SimpleNamespace(should_stop=bool), stage_id="grpo-1",
        workspace=Workspace.open(tmp_path), starts=str,
    )  # fmt: skip
    engine: Any = SimpleNamespace(tokenizer=None, ranks=Ranks())
    for work.attempt in (1, 2):
        training._rollout_servers(work, engine)
    work.stage_id = "grpo-2"
    training._rollout_servers(work, engine)
    assert folders[0] == folders[1] != folders[2]
