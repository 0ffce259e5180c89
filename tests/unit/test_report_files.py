"""Files of a sweep's report: page, Markdown, tables and JSON."""

import base64
import csv
import hashlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli.main import main
from flows.sweeping.launching import record_version
from infra.store.sweep_records import read_sweep, write_sweep
from infra.store.workspace import Workspace
from refiner_core.report.pages import json_text
from refiner_core.report.printing import decimals_for, escaped, plain, with_interval
from refiner_core.report.sweep.rendering import csv_of, markdown, number_rows, page, trial_rows
from sweeps.values import Question
from tests.support.sweep_reports import HOSTILE, full_report, hostile_report
from tests.support.sweeping import small_sweep

NAN = float("nan")


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.61337, 0.58937, 0.63737, "0.613 [0.589, 0.637]"),
        (0.61337, 0.3, 0.9, "0.61 [0.30, 0.90]"),
        (24981.0, 24020.0, 25940.0, "24981 [24020, 25940]"),
        (-0.0001, -0.02, 0.02, "0.000 [−0.020, 0.020]"),
        (None, 0.1, 0.2, "— [0.100, 0.200]"),
        (0.5, NAN, 0.2, "0.500"),
    ],
)
def test_digits_follow_from_how_well_a_number_is_known(value, low, high, text) -> None:
    width = None if low is None or high is None else high - low
    assert with_interval(value, low, high, decimals_for(width, value)) == text


def test_page_markdown_and_tables_print_the_same_numbers() -> None:
    report = full_report()
    html, text = page(report), markdown(report)
    for shown in ("0.635", "[0.611, 0.659]", "+0.029", "[0.012, 0.046]", "0.038"):
        assert shown in html, shown
        assert shown in text, shown
    row = next(
        r for r in csv.DictReader(io.StringIO(csv_of(number_rows(report)))) if r["arm"] == "mixed-0"
    )
    assert round(float(row["difference"]), 3) == 0.029
    assert (row["seed_3"], row["verdict"], row["factor_rubrics"]) == ("", "better", "mixed")
    values = json.loads(json_text(report))
    assert values["version"] == report.version
    found = values["comparisons"][0]["numbers"][2]
    assert (found["arm"], found["difference"]) == ("mixed-0", float(row["difference"]))


def test_a_missing_number_has_its_cause_and_is_never_nan() -> None:
    report = full_report()
    broken = replace(report.comparisons[0].numbers[1], value=NAN, low=NAN, difference=NAN, p=NAN)
    first = replace(report.comparisons[0], numbers=(broken, *report.comparisons[0].numbers[2:]))
    report = replace(report, comparisons=(first,))
    for text in (page(report), markdown(report), csv_of(number_rows(report)), json_text(report)):
        shown = re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL)
        assert not re.search(r"\b(nan|NaN|inf|None)\b", shown)
        assert "All its trials failed: no room left on the disk." in shown


def test_a_spreadsheet_is_given_no_formula() -> None:
    report = full_report()
    evil = {**report.trials[0], "reason": '=HYPERLINK("http://evil.example")'}
    row = next(csv.DictReader(io.StringIO(csv_of(trial_rows(replace(report, trials=(evil,)))))))
    assert row["reason"].startswith("'=")


# ---------------------------------------------------------------- texts of others


def test_the_page_runs_no_script_but_its_own_and_carries_charts_only_where_it_has_some() -> None:
    for curves, count in ((hostile_report().curves, 2), ((), 1)):
        html = page(replace(hostile_report(), curves=curves))
        policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
        scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
        assert policy
        assert len(scripts) == html.count("<script>") == count
        digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
        wanted = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        assert policy[1].endswith(f"script-src {wanted}")
        assert "default-src 'none'" in policy[1]
        assert HOSTILE not in html


def test_markdown_obeys_no_text() -> None:
    text = markdown(hostile_report())
    assert "<script" not in text
    assert "<img" not in text
    assert escaped("a|b `c` [x](http://e) @all #1 snake_case") == (
        r"a\|b \`c\` \[x](http://e) &#64;all \#1 snake_case"
    )
    assert plain("a\x1b[31m\ud800") == "a␛[31m\ufffd"


# ---------------------------------------------------------------- files and command


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace with a sweep of which nothing has begun."""
    made = Workspace.open(tmp_path / "runs")
    record_version(small_sweep(question=Question("Do weights matter?")), made, (), {})
    return made


def test_a_sweep_with_nothing_done_has_a_report(workspace: Workspace, capsys) -> None:
    assert main(["report", f"workspace={workspace.root}"]) == 0
    printed = capsys.readouterr()
    assert "There is no answer yet" in printed.out
    folder = workspace.layout.reports / "small"
    assert f"Page: {folder}/report.html" in printed.err
    assert {p.name for p in folder.iterdir()} == {
        *("report.html", "report.md", "report.csv", "trials.csv", "report.json")
    }
    assert "No evaluation has ended" in (folder / "report.html").read_text()


def test_the_report_can_go_elsewhere_and_to_scripts(workspace: Workspace, tmp_path, capsys) -> None:
    out = tmp_path / "elsewhere" / "here"
    words = ["report", "small", f"workspace={workspace.root}", "--out", str(out), "--json"]
    assert main(words) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["version"], values["sweep"], values["folder"]) == (1, "small", str(out))
    assert values["question"] == "Do weights matter?"
    assert not workspace.layout.reports.exists()
    (out / "report.md").write_text("mine\n")
    assert main(words) == 0, "a second report takes the place of the first"
    assert "mine" not in (out / "report.md").read_text()


def test_an_unwritable_workspace_is_reported_with_a_fix(workspace: Workspace, capsys) -> None:
    """For example on a read-only mount."""
    workspace.layout.reports.write_text("in the way")
    assert main(["report", f"workspace={workspace.root}"]) == 2
    said = capsys.readouterr().err
    assert str(workspace.layout.reports / "small") in said
    assert "--out DIR" in said


def test_the_newest_sweep_is_the_one_that_was_launched_last(workspace: Workspace, capsys) -> None:
    """An amended older sweep is newer than one that was begun after it."""
    first = read_sweep(workspace, "small")
    write_sweep(workspace, replace(first, name="between", started_at="2027-01-01T00:00:00+00:00"))
    write_sweep(workspace, replace(first, number=2, started_at="2027-01-02T00:00:00+00:00"))
    assert main(["report", f"workspace={workspace.root}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sweep"] == "small"


def test_a_missing_sweep_is_named_with_the_nearest(workspace: Workspace, tmp_path, capsys) -> None:
    assert main(["report", "smal", f"workspace={workspace.root}"]) == 2
    assert "Did you mean 'small'?" in capsys.readouterr().err
    assert main(["report", f"workspace={tmp_path / 'none'}"]) == 2
    assert "refiner sweep FILE" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
