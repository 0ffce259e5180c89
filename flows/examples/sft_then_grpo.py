"""A flow of your own over stages: GRPO only if SFT has converged far enough, two models evaluated
at
a time.

    python -m flows.examples.sft_then_grpo WORKSPACE BOUND [KEY=VALUE ...]
"""

from __future__ import annotations

import sys

from prefect import flow

from flows import begin_run, ensure


@flow  # type: ignore[untyped-decorator]  # mypy does not follow Prefect's imports
def sft_then_grpo(
    workspace: str = "runs",
    bound: float = 3.0,
    overrides: list[str] = [],  # noqa: B006  # Prefect shows defaults in its form
) -> dict[str, object]:
    """Train SFT, and continue only if its validation loss is below the bound."""
    run = begin_run("tiny", overrides, workspace)
    loss = ensure(run, "sft").report["validation_loss"]["final"]
    if loss >= bound:
        return {"loss": loss}
    ensure(run, "grpo")
    measured = [ensure.submit(run, name) for name in ("evaluate-sft", "evaluate-grpo")]
    return {"loss": loss, "measured": [future.result().report for future in measured]}


if __name__ == "__main__":
    print(sft_then_grpo(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
