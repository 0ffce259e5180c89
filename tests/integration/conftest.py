"""Fixtures of the tests that talk to real programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.server import ensure_server
from tests.support.prefect_server import PrefectApi, private_server


@pytest.fixture(scope="session")
def prefect_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Prefect server for all tests; it starts when the first one asks."""
    with private_server(tmp_path_factory.mktemp("state")):
        yield


@pytest.fixture
def prefect(prefect_session: None) -> PrefectApi:
    """The API of that server, which is started again if the last test has ended it."""
    return PrefectApi(ensure_server(120))
