"""An orchestrator as a process of its own: runs a small plan with the fake worker, to be killed.

    python run_campaign.py WORKSPACE [stage …]

Prints the last views as JSON; SIGINT asks for a stop, as the command line does.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from infra.store.workspace import Workspace
from tests.support.plans import fake_router, orchestrator_on, run_record, small_plan


def main() -> None:
    """Run the plan to its end."""
    workspace = Workspace.open(Path(sys.argv[1]))
    plan = small_plan(*sys.argv[2:])
    run = run_record(workspace, plan)
    campaign = orchestrator_on(plan, workspace, fake_router(workspace), run=run)
    campaign.start()
    try:
        views = campaign.join()
    except KeyboardInterrupt:
        campaign.request_stop("Ctrl-C")
        views = campaign.join()
    print(json.dumps({name: asdict(view) for name, view in views.items()}))


if __name__ == "__main__":
    main()
