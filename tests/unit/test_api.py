"""The Python door: every command has its function, and every function says what it is.

A command without a function, a function without types or without a word on its errors, and a
command that does its work past the door, all fail here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import click
import pytest

from flows import api
from flows.cli.main import cli

ROOT = Path(api.__file__).parents[1]

#: Command -> what it calls of flows.api. A new command is entered here, with its functions.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "init": ("init_folder",),
    "doctor": ("examine",),
    "run": ("begin_run", "detach_run", "make_recipe_plan", "run_json", "run_recipe"),
    "plan": ("disk_of_plan", "forecast", "make_recipe_plan", "plan_json"),
    "explain": ("explain_stage",),
    "status": ("list_runs", "watch_run"),
    "logs": ("find_log", "follow_log"),
    "cancel": ("cancel_run", "cancel_sweep"),
    "resume": ("resume_run",),
    "sweep": (
        *("begin_sweep", "detach_sweep", "forecast_sweep", "list_sweeps", "make_sweep_plan"),
        "resume_sweep",
    ),
    "report": ("report_run", "report_sweep"),
    "certify": ("certificate_json", "certify_node"),
    "prove-resume": ("plan_resume_proofs", "prove_resume"),
    "diff": ("diff_runs",),
    "nightly check": ("check_nightly",),
    "nightly run": ("run_nightly",),
    "nightly status": ("nightly_status",),
    "nightly history": ("nightly_history",),
    "nightly page": ("nightly_page",),
    "nightly serve": ("serve",),
    "nightly deploy": ("deploy",),
    "track sync": ("sync_tracking",),
    "disk": ("disk_report", "pin_stage", "reclaim_disk", "unpin_stage"),
    "adopt": ("adopt_run",),
    "publish": ("begin_publication", "plan_publication", "publish_run"),
    "card check": ("check_card",),
    "card show": ("show_card",),
    "card template": ("card_template",),
    "why": ("explain_number", "find_numbers"),
    "rescore": ("plan_rescoring", "rescore"),
    "judge ask": ("ask_judge",),
    "judge report": ("measure_judge",),
    "judge servers": ("list_judge_servers",),
    "judge stop": ("stop_judge_servers",),
    "rubrics list": (),
    "rubrics show": ("show_rubric_set",),
    "rubrics check": ("check_rubrics",),
    "protocols list": (),
    "protocols show": ("show_protocol",),
    "protocols check": ("check_protocol",),
    "protocols fields": ("protocol_fields",),
    "environments list": (),
    "environments show": ("show_environment",),
    "environments check": ("check_environment",),
    "environments play": ("find_task", "play_task", "show_environment"),
    "notify test": ("notify_settings", "try_channels"),
    "show": ("explain_fields",),
    "list": (
        *("list_environments", "list_protocols", "list_recipes", "list_rubric_sets"),
        "list_slurm_profiles",
    ),
    "serve": ("serve",),
    "deploy": ("deploy",),
    "server": ("prefect_server_status", "stop_prefect_server"),
    "completion": ("candidates",),
}
#: For whom a command's way is not one's own: all of it in one call, or values where it prints.
BESIDE = {
    *("cancel_sweep", "check_supported", "describe_columns", "environment_config"),
    *("evaluations_of", "make_sweep_report", "publish_checkpoints", "read_log"),
    *("report_of_run", "run_sweep"),
    *("status_of_run", "status_of_sweep", "watch_sweep", "work_on", "work_on_sweep"),
}


def commands() -> dict[str, click.Command]:
    """Every command that does something, by the words that call it."""
    found: dict[str, click.Command] = {}
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            for sub in command.list_commands(context):
                one = command.get_command(context, sub)
                assert one is not None
                found[f"{name} {sub}"] = one
        else:
            found[name] = command
    return found


def functions() -> dict[str, object]:
    """The public functions of the door."""
    found = {name: getattr(api, name) for name in api._MODULES}
    return {name: f for name, f in found.items() if inspect.isfunction(f)}


def test_every_command_has_its_functions() -> None:
    assert set(commands()) == set(FUNCTIONS)


def test_every_function_is_some_commands_or_a_frame() -> None:
    of_commands = {name for names in FUNCTIONS.values() for name in names}
    left = {n for n in functions() if not n.endswith("_frame")} - of_commands - BESIDE
    assert not left, f"no command calls {sorted(left)}: enter them above, or take them away"
    assert of_commands <= set(functions())


@pytest.mark.parametrize("command", FUNCTIONS)
def test_a_command_calls_its_functions(command: str) -> None:
    callback = commands()[command].callback
    assert callback is not None
    imported = _imports(sys.modules[callback.__module__].__name__)
    missing = [name for name in FUNCTIONS[command] if name not in imported]
    assert not missing, f"`refiner {command}` does its work without {missing} of flows.api"


#: Module and name of a function there -> what it is called in the door.
_NAMES = {home: name for name, home in api._MODULES.items()}


def _imports(module: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Names of the door whose functions a module of the command line takes, or one beside it."""
    tree = ast.parse(Path(importlib.import_module(module).__file__ or "").read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        for alias in node.names:
            found.add(_NAMES.get((node.module, alias.name), ""))
        if node.module.startswith("flows.cli.") and node.module not in seen:
            found |= _imports(node.module, seen | {module})
    return found


@pytest.mark.parametrize("name", sorted(functions()))
def test_a_function_has_types_and_says_what_goes_wrong(name: str) -> None:
    function = functions()[name]
    signature = inspect.signature(function)  # type: ignore[arg-type]
    untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert not untyped, f"{name}: no types of {untyped}"
    assert signature.return_annotation is not signature.empty, f"{name}: no type of its result"
    doc = inspect.getdoc(function) or ""
    said = "Raises\n------" in doc or "raises nothing" in " ".join(doc.lower().split())
    assert said or name in _PURE, f"{name}: not a word on what it raises"
    if signature.parameters:
        for parameter in signature.parameters:
            assert parameter in doc, f"{name}: {parameter} is not described"


#: Values in, values out.
_PURE = {"plan_json"}


def test_importing_the_door_imports_nothing_behind_it() -> None:
    code = (
        "import sys, flows.api, flows.frames.columns; from flows.api import rollouts_frame; "
        "print(sorted({'torch', 'prefect', 'pandas', 'pyarrow', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'run_recipes'"):
        api.run_recipes  # noqa: B018
    assert "run_recipe" in dir(api)


@pytest.mark.parametrize(("former", "now"), list(api._FORMER.items()))
def test_a_former_name_warns_and_means_its_successor(former: str, now: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{former} is {now} now"):
        assert getattr(api, former) is getattr(api, now)
