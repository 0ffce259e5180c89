"""Records as dataframes: what a notebook begins with.

In: the name of a run or a sweep, and a workspace. Out: pandas dataframes, one row per stage, step,
rollout, evaluated sample, number, trial, comparison or incident. Only records are read: nothing is
written, no scheduler is asked but for :func:`stages_frame`, and what runs may go on running.

>>> from flows.frames import metrics_frame
>>> metrics_frame(stage="grpo", workspace="runs").plot(x="step", y="scores")  # doctest: +SKIP

In all of them a run is named as in ``refiner status``: its id, or enough of its beginning or end,
or ``SWEEP:ARM/seed1``; None is the newest. Columns have fixed types, also in a frame without rows:

- text is ``string``, whole numbers ``Int64``, yes or no ``boolean``, times ``datetime64[ns, UTC]``;
  what is missing there is ``<NA>`` (``NaT``);
- other numbers are ``float64``; what is missing is NaN, and never 0.

:func:`describe_columns` says what each column is, and its unit. Importing this package imports
neither pandas nor pyarrow; its functions do.
"""

from flows.frames.columns import describe_columns
from flows.frames.of_runs import (
    comparisons_frame,
    evaluations_frame,
    incidents_frame,
    metrics_frame,
    rollouts_frame,
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
    "samples_frame",
    "stages_frame",
    "sweep_metrics_frame",
    "sweep_samples_frame",
    "trials_frame",
]
