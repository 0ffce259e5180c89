"""All functions of `refiner`, for scripts and notebooks.

Every command has a function here, with types and a docstring. It returns values and prints nothing
to stdout; an error is a :class:`~refiner_core.contract.errors.RefinerError` with what was expected
and how to fix it. ``workspace`` is a folder (default: ``runs``), overrides are ``key=value`` as on
the command line, and runs are named as in `refiner status`: an id, or an unambiguous part
of one.

>>> from flows import api
>>> plan = api.make_recipe_plan("tiny", ["seed=3"])
>>> [stage.name for stage in plan.stages][:3]
['data', 'sft', 'grpo']

Records as dataframes (``api.metrics_frame()`` and others) are in :mod:`flows.frames`. Importing
this module imports nothing else: a name is imported from its module on first use.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import sys
import warnings
from typing import TYPE_CHECKING, Any

from flows.former import API_NAMES

_OURS = ("flows.", "infra.", "refiner_core.")

if TYPE_CHECKING:
    from flows.adopting import adopt_run
    from flows.attacking import attack_reward
    from flows.cards.inspection import check_card, show_card
    from flows.certify.node import certificate_json, certify_node
    from flows.checking.own_data import check_data, convert_data, example_rows
    from flows.checking.sets import (
        PlayedTask,
        check_environment,
        check_protocol,
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
    from flows.diffing.run_diff import diff_runs
    from flows.disk import (
        DiskPlan,
        PinnedStage,
        disk_of_plan,
        disk_report,
        pin_stage,
        reclaim_disk,
        unpin_stage,
    )
    from flows.doctor import examine
    from flows.evaluations import evaluations_of
    from flows.former import KnownRun, list_runs
    from flows.frames import (
        comparisons_frame,
        describe_columns,
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
    from flows.judges import (
        StoppedServers,
        ask_judge,
        list_judge_servers,
        measure_judge,
        stop_judge_servers,
    )
    from flows.nightly.night import (
        CheckedNightly,
        NightlyHistory,
        check_nightly,
        nightly_history,
        nightly_page,
        nightly_status,
        run_nightly,
    )
    from flows.notifying.notifiers import notify_settings, try_channels
    from flows.plans import (
        OUTPUT_VERSION,
        StageExplanation,
        explain_stage,
        forecast,
        list_recipes,
        plan_json,
    )
    from flows.proving.runs import plan_resume_proofs, prove_resume
    from flows.publishing.by_hand import begin_publication, plan_publication, publish_checkpoints
    from flows.reporting.run.report import report_of_run, report_run
    from flows.reporting.several import compare_runs, report_runs
    from flows.reporting.writing import make_sweep_report, report_sweep
    from flows.rescoring.criteria import report_criteria
    from flows.rescoring.labelling import read_label_forms, write_label_form
    from flows.rescoring.rescore import RescoreResult, rescore
    from flows.rescoring.rescore_plan import plan_rescoring
    from flows.running.background import detach_run
    from flows.running.calls import (
        RunOutcome,
        begin_run,
        check_supported,
        make_recipe_plan,
        publish_run,
        resume_run,
        run_json,
        run_recipe,
        work_on,
    )
    from flows.running.cancelling import cancel_run
    from flows.running.foreground import LaunchOptions
    from flows.running.logs import find_log, follow_log, read_log
    from flows.running.status import status_of_run, watch_run
    from flows.runs.bundling import Bundle, Unbundled, bundle_run, unbundle
    from flows.runs.removing import Removal, prune_runs, remove_runs
    from flows.runs.run_table import RunRow, label_run, list_rows
    from flows.serving import deploy, serve
    from flows.starting.completion import Candidate, candidates
    from flows.starting.fields import ExplainedFields, explain_fields
    from flows.starting.folder import InitFolder, init_folder
    from flows.sweeping.launching import (
        SweepOutcome,
        begin_sweep,
        cancel_sweep,
        detach_sweep,
        resume_sweep,
        run_sweep,
        work_on_sweep,
    )
    from flows.sweeping.planning import (
        KnownSweeps,
        ShippedSweep,
        forecast_sweep,
        list_sweeps,
        make_sweep_plan,
    )
    from flows.sweeping.status import status_of_sweep, watch_sweep
    from flows.tracking import SyncResult, sync_tracking
    from flows.why.explanation import explain_number, find_numbers
    from infra.prefect_server import server_status as prefect_server_status
    from infra.prefect_server import stop_server as stop_prefect_server
    from infra.slurm.profiles import list_profiles as list_slurm_profiles
    from refiner_core.cards.build import shipped_template as card_template
    from refiner_core.rubrics.lint import check_file as check_rubrics

#: Name -> its module, and its name there; mirrors the imports above for type checkers.
_MODULES = {
    alias.asname or alias.name: (node.module or "", alias.name)
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[__name__])))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OURS)
    for alias in node.names
}
#: Former names: their successors take the workspace by name.
#: Functions whose rows were objects and are mappings now.
_ROWS = (*("diff_runs", "explain_number", "make_sweep_report", "report_of_run"), "try_channels")


class _Row(dict[str, Any]):
    """A row that still allows attributes for its fields, with a warning."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"this row has no {name!r}; it has {', '.join(self)}")
        warnings.warn(f"row.{name} is row[{name!r}] now", DeprecationWarning, stacklevel=2)
        return self[name]


def _with_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return _Row({key: _with_attributes(each) for key, each in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map(_with_attributes, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **{n: _with_attributes(v) for n, v in fields.items()})
    return value


def _as_before(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        return _with_attributes(function(*args, **options))

    return called


def __getattr__(name: str) -> Any:
    """The function or type of that name; imports its module on first use."""
    if name in API_NAMES:
        warnings.warn(f"{name} is {API_NAMES[name]} now", DeprecationWarning, stacklevel=2)
        name = API_NAMES[name]
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, called = _MODULES[name]
    found = getattr(importlib.import_module(module), called)
    found = _as_before(found) if name in _ROWS else found
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Names for completion and help."""
    return sorted([*globals(), *_MODULES])
