"""The work of a stage, and how it is carried out.

A stage function gets a :class:`StageWork` (what it is, where its inputs lie, where to write) and
returns a JSON-ready report; outputs are whatever files it leaves in ``output_dir``. No stage calls
another. Each kind names its function, and a function imports what it needs, so that a publish job
does not pay for torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.records import StageSpec
from refiner_core.contract.types import StageIO


@dataclass(frozen=True)
class StageWork:
    """All that a stage may use.

    ``inputs`` maps a role (``data``, ``policy``, ``weights`` …) to the output folder of the
    finished stage that fills it, ``input_stages`` to its id. ``workspace`` is for cards, which
    describe a whole run, and for what is shared: servers and the store of judgements. ``attempt``
    is the number of this try.
    """

    spec: StageSpec
    config: RecipeConfig
    inputs: Mapping[str, Path]
    input_stages: Mapping[str, str]
    output_dir: Path
    io: StageIO
    stage_id: str
    workspace: Workspace
    attempt: int = 1

    @property
    def model_ref(self) -> str:
        """The model that this stage starts from or measures: a folder, or a reference to the
        recipe's base."""
        for role in ("policy", "weights"):
            if role in self.inputs:
                return str(self.inputs[role] / "model")
        return self.config.model.name_or_path


def run_stage(work: StageWork) -> dict[str, Any]:
    """Carry out a stage by the function that its kind names; its report."""
    module, _, function = KINDS[work.spec.kind].run.partition(":")
    report: dict[str, Any] = getattr(importlib.import_module(module), function)(work)
    return report
