"""Goldens of the interfaces that users' scripts and recorded workspaces rely on."""

from __future__ import annotations

import json

import pytest

from tests.support import goldens


@pytest.mark.parametrize("name", goldens.MADE)
def test_goldens_are_unchanged(name: str) -> None:
    """If the change is meant (a stage version was raised, a flag added), write the goldens again
    (``python -m tests.support.goldens``) and say in the commit what users have to know."""
    made = json.loads(json.dumps(goldens.MADE[name]()))
    assert made == goldens.read(name)
