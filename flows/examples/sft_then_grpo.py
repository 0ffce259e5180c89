"""A flow of one's own over recipes: GRPO only where SFT has come far enough.

python -m flows.examples.sft_then_grpo WORKSPACE BOUND [KEY=VALUE ...]
"""

from __future__ import annotations

import sys

from prefect import flow

from flows import api
from flows.pipeline import pipeline


@flow  # type: ignore[untyped-decorator]  # mypy does not follow Prefect's imports
def sft_then_grpo(
    workspace: str = "runs",
    bound: float = 3.0,
    overrides: list[str] = [],  # noqa: B006  # Prefect shows defaults in its form
) -> float:
    """Train, look, and go on only if the validation loss of SFT is below the bound."""
    run = pipeline("tiny", [*overrides, "stages=[data,sft]"], workspace)  # a subflow; its run's id
    loss = api.metrics_frame(run, "sft", workspace)["loss/validation"].dropna().iloc[-1]
    if loss < bound:
        pipeline("tiny", overrides, workspace)  # what is done is not done again
    return float(loss)


if __name__ == "__main__":
    print(sft_then_grpo(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
