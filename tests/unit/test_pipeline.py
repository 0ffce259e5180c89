"""A campaign with its picture: what is told to the drawing process, and that work never waits."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from flows.picture.artifacts import (
    artifact_key,
    card_in,
    curves_in,
    markdown_table,
    numbers_in,
    sparkline,
)
from flows.picture.feed import (
    END_LINE,
    Drawing,
    Feed,
    NothingMore,
    drawing_of,
    header_line,
    read_header,
    view_line,
)
from flows.running.console import Console
from flows.running.pipeline import prune_logs, run_pictured
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.types import Progress
from refiner_core.contract.views import StageView
from tests.support.fake_campaign import FakeCampaign


@pytest.fixture
def plan() -> Plan:
    return make_plan(RecipeConfig(recipe="tiny"), {})


@pytest.fixture
def drawing(plan: Plan) -> Drawing:
    return drawing_of(plan, "r1", "host:1:2.00")


SFT = StageView("sft", "sft", "f", "running", progress=Progress(1, 2, "step", {"loss": 0.5}))


def fed(drawing: Drawing, *lines: str) -> Feed:
    feed = Feed(drawing)
    feed.read(io.StringIO("".join(lines)))
    return feed


def test_without_a_server_a_campaign_just_runs(plan: Plan) -> None:
    stream = io.StringIO()
    views = run_pictured(
        FakeCampaign(plan), plan, "r1", use_server=False, console=Console(stream=stream)
    )
    assert {view.state for view in views.values()} == {"done"}
    assert f"{len(plan.stages)} done" in stream.getvalue()


def test_where_no_server_can_be_had_there_is_one_warning(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REFINER_STATE_DIR", str(tmp_path / "file"))
    stream = io.StringIO()
    views = run_pictured(
        FakeCampaign(plan), plan, "r1", use_server=True, console=Console(stream=stream)
    )
    assert {view.state for view in views.values()} == {"done"}
    assert stream.getvalue().count("warning:") == 1
    assert "Work goes on without it" in stream.getvalue()


def test_what_ends_the_reconciler_is_raised(plan: Plan) -> None:
    class Broken(FakeCampaign):
        def join(self) -> dict[str, StageView]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_pictured(
            Broken(plan), plan, "r1", use_server=False, console=Console(stream=io.StringIO())
        )


def test_ctrl_c_asks_to_stop_and_a_second_one_leaves(plan: Plan) -> None:
    class Impatient(Console):
        presses = 0

        def show(self, views: object) -> None:
            self.presses += 1
            raise KeyboardInterrupt

    class Stubborn(FakeCampaign):
        def request_stop(self, reason: str) -> None:
            self.stopped_for = reason

    campaign = Stubborn(plan, {"data": [(60.0, {"state": "done"})]})
    console = Impatient(stream=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        run_pictured(campaign, plan, "r1", use_server=False, console=console)
    assert campaign.stopped_for == "Ctrl-C"
    assert console.presses > 2  # within a second they are one wish


def test_the_graph_survives_the_pipe(drawing: Drawing) -> None:
    assert read_header(header_line(drawing)) == drawing
    grpo = next(node for node in drawing.nodes if node.name == "grpo")
    assert set(grpo.inputs) == {"data", "sft"}


def test_views_survive_the_pipe(drawing: Drawing) -> None:
    feed = Feed(drawing)
    assert feed.wait("sft", 0.0).state == "waiting"
    done = StageView("sft", "sft", "f", "done", report={"curve": [[1, 2.0]]})
    feed = fed(drawing, view_line(SFT), view_line(done), END_LINE)
    assert feed.wait("sft", 0.0) == done


def test_a_closed_pipe_means_that_the_orchestrator_is_gone(drawing: Drawing) -> None:
    feed = fed(drawing, view_line(SFT), '{"vie')
    with pytest.raises(NothingMore, match="orchestrator is gone"):
        feed.wait("sft", 0.0)


def test_an_end_without_the_stage_is_no_death(drawing: Drawing) -> None:
    with pytest.raises(NothingMore, match="ended while this stage was running"):
        fed(drawing, view_line(SFT), END_LINE).wait("sft", 0.0)


def test_a_stream_without_header_is_refused() -> None:
    with pytest.raises(ValueError, match="did not begin"):
        read_header("\n")


def test_numbers_are_found_wherever_they_are() -> None:
    number = {"metric": "f1", "value": 0.5, "n": 9, "numerator": 3}
    report = {"evaluations": [number], "deep": {"reference": [number]}}
    assert numbers_in(report) == [{"metric": "f1", "value": 0.5, "n": 9}] * 2


def test_curves_are_found_under_both_names() -> None:
    report = {
        "train_loss": {"curve": [[1, 2.0], [2, float("nan")]]},
        "curves": {"scores": [[1, 0.5]]},
        "other": [[1, 2]],
    }
    assert curves_in(report) == {"train loss": [(1.0, 2.0)], "scores": [(1.0, 0.5)]}


def test_a_card_may_be_text_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("---\nlicense: mit\n---\n\n# Title\n")
    assert card_in({"card_path": str(path)}) == "# Title\n"
    assert card_in({"card": "# Title\nText"}) == "# Title\nText"
    assert card_in({"card": str(tmp_path / "missing")}) == ""


def test_sparklines_are_short_and_flat_ones_low() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)])) == 60


def test_tables_escape_what_would_break_them() -> None:
    assert markdown_table([{"a": "x|y", "b": None}]).splitlines()[-1] == "| x\\|y |  |"


def test_keys_are_as_prefect_wants_them() -> None:
    assert artifact_key("My recipe_1", "sft", "log") == "my-recipe-1-sft-log"


def test_old_logs_of_pictures_go(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.log").write_text("")
    prune_logs(tmp_path, keep=2)
    assert len(list(tmp_path.iterdir())) == 2
