"""Who is asked next, and who is left out: pure rules under a clock that stands still."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refiner_core.contract.types import Endpoint
from refiner_core.http.fleet import BreakerSettings, Fleet, Server, Trouble

NONE: Trouble = "none"
BUSY: Trouble = "busy"
SICK: Trouble = "sick"
GONE: Trouble = "gone"


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def closed(clock: Clock, settings: BreakerSettings) -> Server:
    return Server(Endpoint("http://node:80/v1"), clock, settings)


def opened(clock: Clock) -> Server:
    breaker = closed(clock, BreakerSettings(2, 1.0, 4.0))
    breaker.note("a", GONE)
    breaker.note("b", GONE)
    assert breaker.state == "open"
    return breaker


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([SICK, GONE, BUSY])), max_size=200))
def test_a_few_items_that_always_fail_never_open_it(
    failures: list[tuple[int, Trouble]],
) -> None:
    breaker = closed(Clock(), BreakerSettings(5))
    for call, trouble in failures:
        breaker.note(call, trouble)
    assert breaker.state == "closed"


def test_distinct_calls_that_fail_in_a_row_open_it() -> None:
    breaker = closed(Clock(), BreakerSettings(3))
    for call in ("a", "b", "b", "a"):
        breaker.note(call, SICK)
    assert breaker.state == "closed"
    breaker.note("c", GONE)
    assert breaker.state == "open"


def test_it_is_probed_at_once_and_then_after_waits_that_double_up_to_the_longest() -> None:
    clock = Clock()
    breaker = opened(clock)
    waits = []
    for _ in range(5):
        before = clock.now
        while not breaker.take_probe():
            clock.now += 0.5
        waits.append(clock.now - before)
        assert not breaker.take_probe(), "one probe at a time"
        breaker.probed(alive=False)
    assert waits == [0.0, 1.0, 2.0, 4.0, 4.0]


def test_a_server_that_is_found_is_on_trial_until_it_answers() -> None:
    breaker = opened(Clock())
    assert breaker.take_probe()
    breaker.probed(alive=True)
    assert breaker.state == "half_open"
    breaker.note("a", BUSY)
    assert breaker.state == "half_open"
    breaker.note("a", NONE)
    assert breaker.state == "closed"


def test_a_trial_that_is_lost_makes_the_next_wait_longer() -> None:
    clock = Clock()
    breaker = opened(clock)
    for wait_s in (0.0, 1.0, 2.0, 4.0, 4.0):
        if wait_s:
            clock.now += wait_s - 0.01
            assert not breaker.take_probe()
            clock.now += 0.01
        assert breaker.take_probe()
        breaker.probed(alive=True)
        breaker.note("a", GONE)
        assert breaker.state == "open"


# ---------------------------------------------------------------- several servers


def fleet(count: int, clock: Clock | None = None, threshold: int = 2) -> Fleet:
    made = Fleet(clock or Clock(), BreakerSettings(threshold=threshold))
    made.renew([Endpoint(f"http://node{n}:80/v1") for n in range(count)])
    return made


def end(fleet: Fleet, server: Server, call: str, trouble: Trouble) -> bool:
    trial = fleet.begins(server)
    return fleet.ended(server, call, trouble, trial=trial)


def kill(fleet: Fleet, server: Server) -> None:
    for n in range(5):
        end(fleet, server, f"killed {n}", GONE)


def found(fleet: Fleet) -> None:
    for server in fleet.due_probes():
        server.probed(alive=True)


def test_the_one_with_the_fewest_calls_in_flight_is_asked() -> None:
    servers = fleet(3)
    for _ in range(30):
        server = servers.pick()
        assert server is not None
        servers.begins(server)
    assert [server.in_flight for server in servers.servers] == [10, 10, 10]


def test_a_dead_one_is_left_out_and_comes_back_with_one_call_at_first() -> None:
    servers = fleet(2)
    dead, alive = servers.servers
    kill(servers, dead)
    assert servers.up
    assert {servers.pick() for _ in range(4)} == {alive}
    found(servers)
    assert servers.pick() is dead
    trial = servers.begins(dead)
    assert servers.pick() is alive, "one trial at a time"
    servers.ended(dead, "x", NONE, trial=trial)
    assert servers.pick() is dead, "it has the fewest in flight"


def test_a_server_that_asked_for_patience_has_it_while_others_can_be_asked() -> None:
    clock = Clock()
    servers = fleet(2, clock)
    busy, other = servers.servers
    busy.held_until = clock.now + 30
    servers.begins(other)
    assert servers.pick() is other
    assert servers.wait_s(busy) == 0.0
    kill(servers, other)
    assert servers.pick() is busy
    assert servers.wait_s(busy) == 30.0


def test_what_fails_because_the_server_is_gone_counts_against_no_call() -> None:
    servers = fleet(1, threshold=3)
    (server,) = servers.servers
    ends = [end(servers, server, call, GONE) for call in "abc"]
    assert ends == [False, False, True]
    assert end(servers, server, "late", GONE)
    assert not end(servers, server, "late", SICK)


def test_nobody_is_asked_while_all_are_gone() -> None:
    servers = fleet(2)
    for server in servers.servers:
        kill(servers, server)
    assert servers.pick() is None
    assert not servers.up


def test_a_server_that_has_answered_nothing_and_refuses_is_wrong_once_all_have_come_back() -> None:
    servers = fleet(1)
    (server,) = servers.servers
    trials = [servers.begins(server) for _ in range(2)]
    servers.ended(server, "a", NONE, trial=trials[0])
    assert not servers.turned_down(server, "a", 403)
    assert servers.all_refuse() is None, "the other one may be answered"
    assert servers.pick() is None
    servers.ended(server, "b", NONE, trial=trials[1])
    assert servers.all_refuse() is server


def test_one_item_that_is_refused_does_not_make_a_server_wrong() -> None:
    servers = fleet(1)
    (server,) = servers.servers
    trials = [servers.begins(server) for _ in range(2)]
    servers.ended(server, "a", NONE, trial=trials[0])
    servers.turned_down(server, "a", 403)
    servers.answered(server)
    servers.ended(server, "b", NONE, trial=trials[1])
    assert servers.all_refuse() is None
    assert servers.pick() is server
    assert servers.turned_down(server, "a", 403), "now it is known to be this item's alone"


def test_a_key_that_runs_out_is_noticed() -> None:
    servers = fleet(1, threshold=3)
    (server,) = servers.servers
    servers.answered(server)
    own = [servers.turned_down(server, call, 401) for call in "abcd"]
    assert own == [True, True, True, False]
    assert servers.all_refuse() is server


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_is_wrong_with_every_call_is_wrong_with_the_configuration(status: int) -> None:
    servers = fleet(1, threshold=3)
    (server,) = servers.servers
    assert all(servers.turned_down(server, call, status) for call in "abc")
    assert servers.all_refuse() is server
    servers.begin_anew()
    servers.answered(server)
    assert all(servers.turned_down(server, call, status) for call in "abcdef")
    assert servers.all_refuse() is None, "one that has answered may be asked nonsense"


def test_the_key_of_a_server_shows_nowhere() -> None:
    servers = Fleet(Clock())
    servers.renew([Endpoint("http://node:8000/v1", key="sk-secret")])
    (server,) = servers.servers
    assert "secret" not in repr(server) + repr(vars(server)) + str(server.name)
    assert server.name == "node:8000"
