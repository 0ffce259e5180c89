"""Former names that still work, with a warning, for one release."""

import json
from pathlib import Path

import pytest

from flows import api
from flows.cli.main import main
from flows.doctor import findings_json
from flows.former import API_NAMES
from infra.doctor.check import found
from refiner_core.contract.config import NotifyConfig, RecipeConfig
from refiner_core.contract.loading import load_recipe, warn_former
from refiner_core.contract.records import from_json, to_json
from refiner_core.contract.sections.steering import NotifyChannel, alarms_of
from tests.bench.many_runs import write_runs
from tests.support.nightly import NightLab
from tests.support.recorded_run import RecordedRun


@pytest.mark.parametrize(("former", "now"), list(API_NAMES.items()))
def test_a_name_of_the_api(former: str, now: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{former} is {now} now"):
        assert getattr(api, former) is getattr(api, now)


@pytest.mark.parametrize(
    "former", ["recipes", "profiles", "rubrics list", "protocols list", "environments list"]
)
def test_a_command_that_lists(former: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = former.split()[0]
    assert main(["list", kind]) == 0
    now = capsys.readouterr().out
    assert main(former.split()) == 0
    shown = capsys.readouterr()
    assert (shown.out, f"`refiner list {kind}` now" in shown.err) == (now, True)


def test_the_list_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"workspace={tmp_path}"
    write_runs(tmp_path, 2)
    assert main(["runs", "--all", "--json", where]) == 0
    now = json.loads(capsys.readouterr().out)["runs"]
    assert main(["status", "--all", "--json", where]) == 0
    shown = capsys.readouterr()
    assert "`refiner runs --all` now" in shown.err
    assert json.loads(shown.out)["runs"] == [
        {"run": r["run"], "recipe": "tiny", "state": "done", "stages_done": "3/3"}
        for r in reversed(now)
    ]
    assert main(["runs", "--all", where]) == 0
    table = capsys.readouterr().out
    assert main(["status", "--all", where]) == 0
    assert capsys.readouterr().out == table


def test_the_list_of_runs_from_python(tmp_path: Path) -> None:
    write_runs(tmp_path, 2)
    with pytest.warns(DeprecationWarning, match="list_runs is list_rows now"):
        found = api.list_runs(tmp_path)
    now = api.list_rows(tmp_path, every=True)
    assert [run.run for run in found] == [row.run for row in reversed(now)], "oldest first"
    first = found[0]
    assert (first.recipe, first.finished, first.done, first.stages) == ("tiny", True, 3, 3)
    assert first.state == "finished"


def test_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disk", f"workspace={tmp_path}", "--caches", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)
    assert "--caches does nothing any more" in shown.err


def test_fields_of_recipes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_former.cache_clear()
    recipe = tmp_path / "own.yaml"
    recipe.write_text("notify: {prefect: true, webhook: TEAM_HOOK, 'on': [failed, resumed]}")
    notify = load_recipe(str(recipe)).notify
    assert notify == NotifyConfig(on=("failed",), webhook="TEAM_HOOK")
    assert alarms_of(notify) == (NotifyChannel("url", "TEAM_HOOK"),)
    assert [r.message.partition(" ")[0] for r in caplog.records] == [
        "notify.prefect",
        "notify.webhook",
        "`resumed`",
    ]
    record = to_json(RecipeConfig())
    record["notify"] |= {"prefect": True, "on": ["failed", "resumed"]}
    assert from_json(RecipeConfig, record).notify.on[0] == "failed", "records are read as they are"


def test_keys_of_nightly_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_former.cache_clear()
    lab = NightLab(tmp_path, alerts="channels: [{prefect: true}, {webhook: LAB_HOOK}]\ncatch_up: 3")
    assert lab.nightly.alerts.alarms == (NotifyChannel("url", "LAB_HOOK"),)
    assert [r.message.partition(" ")[0] for r in caplog.records] == [
        "catch_up",
        "alerts.channels.prefect",
        "alerts.channels.webhook",
    ]


def test_a_field_of_the_doctor_s_findings() -> None:
    finding = found("missing", "no tool", "install it")
    with pytest.warns(DeprecationWarning, match="finding.fix"):
        assert finding.mend == "install it"
    (shown,) = findings_json([finding])["findings"]
    assert shown["mend"] == shown["fix"] == "install it"


def test_watchers_still_have_look(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs")
    watcher = api.watch_run(run.run.run, tmp_path / "runs")
    with pytest.warns(DeprecationWarning, match=r"observe\(\)"):
        assert watcher.look().run == run.run.run
