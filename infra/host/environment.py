"""The environment of this process, as one value.

In: nothing. Out: a copy that no other thread changes while it is read.
"""

from __future__ import annotations

import os


def environment() -> dict[str, str]:
    """All variables as they are now. ``{**os.environ}`` raises where another thread deletes one
    meanwhile, as submitting a job does with the settings of the job that we run in."""
    known = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in known if value is not None}
