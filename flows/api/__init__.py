"""What `refiner` does, as functions: the one door for scripts and notebooks.

Everything that a command does is a function here, with types and a docstring. It returns values and
prints nothing to stdout; what goes wrong raises a
:class:`~refiner_core.contract.errors.RefinerError` that says what was expected and what mends it.
``workspace`` is a folder (default: ``runs``), overrides are ``key=value`` as on the command line,
and runs are named as in `refiner status`: an id, or enough of its beginning or end.

>>> from flows import api
>>> plan = api.make_recipe_plan("tiny", ["seed=3"])
>>> [stage.name for stage in plan.stages][:3]
['data', 'sft', 'grpo']

Records as dataframes (``api.metrics_frame()`` and others) are :mod:`flows.frames`. Importing this
package imports nothing else: a name is looked up in its module when it is used.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.api.beginning import Begun, ExplainedFields, explain_fields, init_folder
    from flows.api.cards import (
        adopt_run,
        begin_publication,
        card_template,
        check_card,
        plan_publication,
        publish_checkpoints,
        show_card,
    )
    from flows.api.evidence import (
        Rescored,
        diff_runs,
        explain_number,
        find_numbers,
        make_sweep_report,
        plan_rescoring,
        plan_resume_proofs,
        prove_resume,
        report_of_run,
        report_run,
        report_sweep,
        rescore,
    )
    from flows.api.judges import (
        Stopped,
        ask_judge,
        list_judge_servers,
        measure_judge,
        stop_judge_servers,
    )
    from flows.api.logs import find_log, follow_log, read_log
    from flows.api.nightly import (
        CheckedNightly,
        NightlyHistory,
        check_nightly,
        nightly_history,
        nightly_page,
        nightly_status,
        run_nightly,
    )
    from flows.api.nodes import certificate_json, certify_node
    from flows.api.plans import (
        OUTPUT_VERSION,
        DiskPlan,
        Explained,
        disk_of_plan,
        explain_stage,
        forecast,
        list_recipes,
        list_slurm_profiles,
        plan_json,
    )
    from flows.api.results import evaluations_of, run_json
    from flows.api.runs import (
        KnownRun,
        cancel_run,
        detach_run,
        list_runs,
        publish_run,
        resume_run,
        run_recipe,
        status_of_run,
        watch_run,
    )
    from flows.api.sets import (
        Played,
        check_environment,
        check_protocol,
        check_rubrics,
        environment_config,
        find_task,
        list_environments,
        list_protocols,
        list_rubric_sets,
        play_task,
        protocol_fields,
        show_environment,
        show_protocol,
        show_rubric_set,
    )
    from flows.api.sweeps import (
        KnownSweeps,
        ShippedSweep,
        begin_sweep,
        cancel_sweep,
        detach_sweep,
        forecast_sweep,
        list_sweeps,
        rescore_share,
        resume_sweep,
        run_sweep,
        status_of_sweep,
        watch_sweep,
    )
    from flows.api.upkeep import (
        Pinned,
        Synced,
        disk_report,
        pin_stage,
        prefect_server_status,
        reclaim_disk,
        stop_prefect_server,
        sync_tracking,
        unpin_stage,
    )
    from flows.doctor import examine
    from flows.frames import (
        comparisons_frame,
        describe_columns,
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
    from flows.notifying.delivery import notify_settings, try_channels
    from flows.running.calls import (
        RunOutcome,
        begin_run,
        check_supported,
        make_recipe_plan,
        work_on,
    )
    from flows.serving import deploy, serve
    from flows.starting.completing import Candidate, candidates
    from flows.sweeping.launching import Launch, SweepOutcome, work_on_sweep
    from flows.sweeping.planning import make_sweep_plan

#: Module -> the names that are found in it.
_HOMES: dict[str, tuple[str, ...]] = {
    "flows.api.plans": (
        "DiskPlan",
        "Explained",
        "OUTPUT_VERSION",
        "disk_of_plan",
        "explain_stage",
        "forecast",
        "list_recipes",
        "list_slurm_profiles",
        "plan_json",
    ),
    "flows.api.nodes": ("certificate_json", "certify_node"),
    "flows.api.runs": (
        "KnownRun",
        "cancel_run",
        "detach_run",
        "list_runs",
        "publish_run",
        "resume_run",
        "run_recipe",
        "status_of_run",
        "watch_run",
    ),
    "flows.api.results": (
        "evaluations_of",
        "run_json",
    ),
    "flows.api.beginning": ("Begun", "ExplainedFields", "explain_fields", "init_folder"),
    "flows.api.logs": ("find_log", "follow_log", "read_log"),
    "flows.api.sweeps": (
        "KnownSweeps",
        "ShippedSweep",
        "begin_sweep",
        "cancel_sweep",
        "detach_sweep",
        "forecast_sweep",
        "list_sweeps",
        "rescore_share",
        "resume_sweep",
        "run_sweep",
        "status_of_sweep",
        "watch_sweep",
    ),
    "flows.api.evidence": (
        "Rescored",
        "diff_runs",
        "explain_number",
        "find_numbers",
        "make_sweep_report",
        "plan_rescoring",
        "plan_resume_proofs",
        "prove_resume",
        "report_of_run",
        "report_run",
        "report_sweep",
        "rescore",
    ),
    "flows.api.cards": (
        "adopt_run",
        "begin_publication",
        "card_template",
        "check_card",
        "plan_publication",
        "publish_checkpoints",
        "show_card",
    ),
    "flows.api.sets": (
        "Played",
        "check_environment",
        "check_protocol",
        "check_rubrics",
        "environment_config",
        "find_task",
        "list_environments",
        "list_protocols",
        "list_rubric_sets",
        "play_task",
        "protocol_fields",
        "show_environment",
        "show_protocol",
        "show_rubric_set",
    ),
    "flows.api.judges": (
        "Stopped",
        "ask_judge",
        "list_judge_servers",
        "measure_judge",
        "stop_judge_servers",
    ),
    "flows.api.nightly": (
        "CheckedNightly",
        "NightlyHistory",
        "check_nightly",
        "nightly_history",
        "nightly_page",
        "nightly_status",
        "run_nightly",
    ),
    "flows.api.upkeep": (
        "Pinned",
        "Synced",
        "disk_report",
        "pin_stage",
        "prefect_server_status",
        "reclaim_disk",
        "stop_prefect_server",
        "sync_tracking",
        "unpin_stage",
    ),
    "flows.running.calls": (
        "RunOutcome",
        "begin_run",
        "check_supported",
        "make_recipe_plan",
        "work_on",
    ),
    "flows.serving": ("deploy", "serve"),
    "flows.sweeping.launching": (
        "Launch",
        "SweepOutcome",
        "work_on_sweep",
    ),
    "flows.sweeping.planning": ("make_sweep_plan",),
    "flows.doctor": ("examine",),
    "flows.starting.completing": ("Candidate", "candidates"),
    "flows.notifying.delivery": (
        "notify_settings",
        "try_channels",
    ),
    "flows.frames": (
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
    ),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}
#: Former names: their successors take the workspace by its name.
_FORMER = {"deploy_nightly": "deploy", "serve_nightly": "serve"}


def __getattr__(name: str) -> Any:
    """The function or type of that name, its module imported on first use."""
    if name in _FORMER:
        warnings.warn(f"{name} is {_FORMER[name]} now", DeprecationWarning, stacklevel=2)
        name = _FORMER[name]
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Names for completion and help."""
    return sorted([*globals(), *_MODULES])
