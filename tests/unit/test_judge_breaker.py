"""Circuit breakers and choice of servers: pure rules under a manual clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refiner_core.contract.types import Endpoint
from refiner_core.http.fleet import BreakerSettings, Fleet, FleetServer, Trouble

NONE: Trouble = "none"
BUSY: Trouble = "busy"
SICK: Trouble = "sick"
GONE: Trouble = "gone"


class Clock:
    """A clock that tests set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def closed(clock: Clock, settings: BreakerSettings) -> FleetServer:
    return FleetServer(Endpoint("http://node:80/v1"), clock, settings)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([SICK, GONE, BUSY])), max_size=200))
def test_a_few_items_that_always_fail_never_open_it(failures: list[tuple[int, Trouble]]) -> None:
    breaker = closed(Clock(), BreakerSettings(5))
    for call, trouble in failures:
        breaker.note(call, trouble)
    assert breaker.state == "closed"


def test_distinct_failing_calls_open_it_and_probes_wait_twice_as_long_each_time() -> None:
    clock = Clock()
    breaker = closed(clock, BreakerSettings(3, 1.0, 4.0))
    for call in ("a", "b", "b", "a"):
        breaker.note(call, SICK)
    assert breaker.state == "closed"
    breaker.note("c", GONE)
    assert breaker.state == "open"
    waits = []
    for found in (False, True, False, True, True):
        before = clock.now
        while not breaker.take_probe():
            clock.now += 0.5
        waits.append(clock.now - before)
        assert not breaker.take_probe(), "one probe at a time"
        breaker.probed(alive=found)
        if found:
            breaker.note("a", GONE)  # a lost trial
        assert breaker.state == "open"
    assert waits == [0.0, 1.0, 2.0, 4.0, 4.0]
    clock.now += 4.0
    assert breaker.take_probe()
    breaker.probed(alive=True)
    breaker.note("a", BUSY)
    assert breaker.state == "half_open", "on trial until it answers"
    breaker.note("a", NONE)
    assert breaker.state == "closed"


# ---------------------------------------------------------------- several servers


def fleet(count: int, clock: Clock | None = None, threshold: int = 2) -> Fleet:
    made = Fleet(clock or Clock(), BreakerSettings(threshold=threshold))
    made.renew([Endpoint(f"http://node{n}:80/v1") for n in range(count)])
    return made


def end(fleet: Fleet, server: FleetServer, call: str, trouble: Trouble) -> bool:
    trial = fleet.begins(server)
    return fleet.ended(server, call, trouble, trial=trial)


def kill(fleet: Fleet, server: FleetServer) -> None:
    for n in range(5):
        end(fleet, server, f"killed {n}", GONE)


def found(fleet: Fleet) -> None:
    for server in fleet.due_probes():
        server.probed(alive=True)


def test_the_least_busy_server_is_asked_and_a_dead_one_returns_with_one_call() -> None:
    servers = fleet(2)
    for _ in range(20):
        server = servers.pick()
        assert server is not None
        servers.begins(server)
    assert [server.in_flight for server in servers.servers] == [10, 10]
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
    for server in (dead, alive):
        kill(servers, server)
    assert servers.pick() is None
    assert not servers.up


def test_a_key_that_expires_is_noticed() -> None:
    servers = fleet(1, threshold=3)
    (server,) = servers.servers
    servers.answered(server)
    own = [servers.turned_down(server, call, 401) for call in "abcd"]
    assert own == [True, True, True, False]
    assert servers.all_refuse() is server


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_fault_of_every_call_is_a_fault_of_the_configuration(status: int) -> None:
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
