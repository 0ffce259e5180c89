"""Task files of the desk: read as they are meant, and refused by file and line where they cannot be
played, before anything is run."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.errors import DataError
from refiner_core.contract.sections.environment import EnvironmentConfig, UserConfig
from refiner_core.environments.desk import DeskEnvironment, desk_digest
from refiner_core.environments.desk.tasks import own_tasks
from refiner_core.environments.protocol import Task

CONFIG = EnvironmentConfig(name="desk")
DESK = DeskEnvironment(CONFIG, UserConfig())
ALL = own_tasks()


def of_family(domain: str, family: str) -> Task:
    return next(t for t in ALL if t.domain == domain and t.data["family"] == family)


def line_of(task: Task, **changes: Any) -> str:
    return json.dumps({**task.__dict__, **changes})


def desk_of(path: Path) -> DeskEnvironment:
    return DeskEnvironment(replace(CONFIG, tasks=str(path)), UserConfig())


def test_a_file_of_tasks_in_the_place_of_the_own_ones(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n\n".join(line_of(task) for task in reversed(ALL)) + "\n")
    desk = desk_of(path)
    assert sorted(desk.tasks("test"), key=lambda t: t.id) == sorted(
        DESK.tasks("test"), key=lambda t: t.id
    )
    assert [t.domain for t in desk.tasks("test")] == [t.domain for t in DESK.tasks("test")]
    moved = tmp_path / "moved.jsonl"
    path.rename(moved)
    assert desk_digest(replace(CONFIG, tasks=str(moved))) == desk.describe()["digest"]
    assert str(tmp_path) not in json.dumps(desk.describe())
    moved.write_text(line_of(ALL[0]))
    assert desk_digest(replace(CONFIG, tasks=str(moved))) != desk.describe()["digest"]


def test_the_own_tasks_can_be_printed_as_such_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_module("refiner_core.environments.desk", run_name="__main__")
    path = tmp_path / "tasks.jsonl"
    path.write_text(capsys.readouterr().out)
    assert desk_of(path).describe()["digest"] == DESK.describe()["digest"]


BOOKING = of_family("bookings", "cancel_fee")
DEVICE = of_family("devices", "cable")


def changed(task: Task, *path: str | int, to: Any) -> str:
    """A line of a task in which one value, or for `...` none, stands at a place."""
    values = json.loads(line_of(task))
    at = values
    for key in path[:-1]:
        at = at[key]
    if to is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return json.dumps(values)


KEY = BOOKING.data["user"]["knows"]["booking"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", r"JSONDecodeError"),
        ("[" * 100_000, r"RecursionError|JSONDecodeError"),
        ("3", r"TypeError"),
        (line_of(BOOKING, id="x").replace('"x"', '"\\ud800"'), r"UnicodeEncodeError"),
        (changed(BOOKING, "id", to=...), r"'id'"),
        (changed(BOOKING, "extra", to=1), r"'extra'"),
        (changed(BOOKING, "domain", to="hotels"), r"no domain 'hotels', only bookings"),
        (changed(BOOKING, "data", "tell", to=...), r"'tell'"),
        (changed(BOOKING, "data", "state", "rooms", to=...), r"'rooms'"),
        (changed(BOOKING, "data", "state", "bookings", KEY, "fee", to="12"), "other keys or types"),
        (changed(BOOKING, "data", "state", "bookings", KEY, "name", to=...), "other keys or types"),
        (changed(BOOKING, "data", "user", "volunteers", to=["pin"]), r"'pin'"),
        (changed(DEVICE, "data", "user", "device", "id", to="S_x"), r"'S_x'"),
        (changed(BOOKING, "data", "solution", to=[]), r"solves nothing"),
        (changed(BOOKING, "data", "solution", to=[["finish", {}]]), r"solves nothing"),
        (changed(BOOKING, "data", "solution", 0, to=["finish", {}]), r"solution\[0\] \(finish\)"),
        (
            changed(BOOKING, "data", "solution", 1, to=["delete", {}]),
            r"solution\[1\] \(delete\) wrong_tool",
        ),
        (
            changed(BOOKING, "data", "solution", 2, to=["respond", {"content": "hello"}]),
            r"solution\[3\] \(cancel\) rule_broken: .*tell the fee",
        ),
        (
            changed(BOOKING, "data", "tell", to=[["never said"]]),
            r"solves nothing: communicate tell 0 never said",
        ),
    ],
)
def test_a_malformed_line_is_named_with_file_and_line(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{line_of(ALL[-1])}\n\n{line}\n")
    with pytest.raises(DataError, match=rf"tasks\.jsonl:3 is .*{what}") as caught:
        desk_of(path)
    assert "Expected" in str(caught.value)
    assert "To mend it" in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"environment\.tasks=.*cannot be read"):
        desk_of(tmp_path / "nothing.jsonl")
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read"):
        desk_of(path)
    path.write_text("\n \n")
    with pytest.raises(DataError, match="holds no task"):
        desk_of(path)
    path.write_text(f"{line_of(ALL[0])}\n{line_of(ALL[0])}\n")
    with pytest.raises(
        DataError, match=rf"tasks\.jsonl:2 .*the id '{ALL[0].id}' stands in another"
    ):
        desk_of(path)
