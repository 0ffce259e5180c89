"""Records as dataframes, for notebooks.

In: the name of a run or a sweep, and a workspace. Out: pandas dataframes, one row per run, stage,
step, rollout, evaluated sample, metric, trial, comparison or incident. Only records are read:
nothing is written, no scheduler is asked except by :func:`stages_frame`, and runs may be running.

>>> from flows.frames import metrics_frame
>>> metrics_frame(stage="grpo", workspace="runs").plot(x="step", y="scores")  # doctest: +SKIP

In all of them a run is named as in ``refiner status``: by its id, an unambiguous part of
it, or ``SWEEP:ARM/seed1``; None is the newest. Columns have fixed types, also without rows:

- text is ``string``, integers ``Int64``, flags ``boolean``, times ``datetime64[ns, UTC]``, with
  ``<NA>`` (``NaT``) for missing values;
- other numbers are ``float64``, with NaN for missing values, never 0.

:func:`describe_columns` has the meaning and unit of each column. Importing this package imports
neither pandas nor pyarrow; its functions do.
"""

from flows.frames.columns import describe_columns
from flows.frames.of_runs import (
    comparisons_frame,
    evaluations_frame,
    incidents_frame,
    metrics_frame,
    rollouts_frame,
    runs_frame,
    samples_frame,
    stages_frame,
    sweep_metrics_frame,
    sweep_samples_frame,
    trials_frame,
)

__all__ = [
    "comparisons_frame",
    "describe_columns",
    "evaluations_frame",
    "incidents_frame",
    "metrics_frame",
    "rollouts_frame",
    "runs_frame",
    "samples_frame",
    "stages_frame",
    "sweep_metrics_frame",
    "sweep_samples_frame",
    "trials_frame",
]
