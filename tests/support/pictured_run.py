"""A run with a fake campaign in a process of its own: ``python -m tests.support.pictured_run ID``.

One training stage goes on for a minute, so that there is time to kill things.
"""

from __future__ import annotations

import sys

from flows.running.console import Console
from flows.running.pipeline import run_pictured
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.plan import make_plan
from tests.support.fake_campaign import FakeCampaign

if __name__ == "__main__":
    plan = make_plan(RecipeConfig(recipe="tiny"), {})
    slow = {"sft": [(0.0, {"state": "running"}), (60.0, {"state": "done"})]}
    run_pictured(FakeCampaign(plan, slow), plan, sys.argv[1], use_server=True, console=Console())
