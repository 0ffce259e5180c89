# %% [markdown]
# # Compare two arms of a sweep
#
# Records as dataframes: learning curves, and the difference of two arms with an interval. Open this
# file in VS Code or, with jupytext,
# in Jupyter, and run it cell by cell; or all of it:
#
#     python -m flows.examples.compare_two_arms WORKSPACE SWEEP OUT
#
# It needs `pip install refiner[analysis]`, and reads only: the sweep may be running.

# %%
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from flows.api import (
    comparisons_frame,
    metrics_frame,
    sweep_metrics_frame,
    sweep_samples_frame,
    trials_frame,
)
from refiner_core.evaluation.statistics import two_way_means

typed = [
    word for word in sys.argv[1:4] if not word.startswith("-")
]  # Jupyter has its own arguments
workspace, sweep, out = [*typed, *("runs", "citation-weight", "pictures")[len(typed) :]]
Path(out).mkdir(parents=True, exist_ok=True)
plt.rcParams.update({"figure.figsize": (7, 4), "figure.dpi": 120, "axes.grid": True})

# %% [markdown]
# ## One run
# A run is named by its id, or by its place in a sweep. Here: the first trial of the baseline.

# %%
trials = trials_frame(sweep, workspace)
print(trials[["arm", "seed", "state", "seconds"]].to_string(index=False))
baseline = trials.loc[trials["baseline"], "arm"].iloc[0]
arm = trials.loc[~trials["baseline"], "arm"].iloc[0]
run = trials.loc[trials["arm"] == baseline, "run"].iloc[0]

metrics = metrics_frame(run, "grpo", workspace)
print(f"\n{run}: {len(metrics)} steps, last score {metrics['scores'].iloc[-1]:.3f}")

# %% [markdown]
# ## Learning curves
# A thin line is a seed, a thick one the mean over seeds.

# %%
curves = sweep_metrics_frame(sweep, "grpo", workspace, arms=[baseline, arm], columns=["scores"])
colors = {baseline: "tab:gray", arm: "tab:blue"}
figure, axes = plt.subplots(layout="constrained")
for name, of_arm in curves.groupby("arm", sort=False):
    for _, of_seed in of_arm.groupby("seed"):
        axes.plot(of_seed["step"], of_seed["scores"], color=colors[name], alpha=0.3, lw=0.8)
    mean = of_arm.groupby("step")["scores"].mean()
    axes.plot(mean.index, mean, color=colors[name], lw=2, label=name)
axes.set(xlabel="training step", ylabel="mean reward of a step", title=f"{sweep}: learning curves")
axes.legend(frameon=False)
figure.savefig(Path(out, "curves.png"))

# %% [markdown]
# ## Is the arm better?
# The sweep's question names a model, a decoding and a metric. For each arm take the mean per seed
# and prompt, subtract, and compute the interval of the mean over seeds *and* prompts.

# %%
report = comparisons_frame(sweep, workspace)
question = report[report["primary"]].iloc[0]
metric = question["metric"]
samples = sweep_samples_frame(
    sweep, workspace, arms=[baseline, arm], model=question["model"],
    decoding=question["decoding"], columns=["sample_id", metric],
)  # fmt: skip
samples = samples[samples["protocol"] == question["protocol"]]
means = samples.groupby(["arm", "seed", "sample_id"])[metric].mean().unstack()
change = means.loc[arm] - means.loc[baseline]  # seeds x prompts
change = change.dropna(how="all")  # seeds of one arm only
(found,) = two_way_means(change.to_numpy()[None])
print(f"\n{metric} of {question['model']}, {question['decoding']}: {arm} minus {baseline}")
print(f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}], p = {found.p_value:.3g}")
print(f"{found.n} prompts, {found.seeds} seeds; {found.interval}")

# The report has the same values for all arms and metrics, with p-values adjusted over all of them.
print(f"\nPicture: {out}/curves.png")
