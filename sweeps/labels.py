"""Names of levels and arms: what people read, type into shells, and find as folders.

In: values and texts. Out: labels and names of letters, digits and ``. = _ -``, joined by ``+``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import ConfigurationError

#: Of an arm or sweep; begins with a letter or digit, so that it is no option and no hidden file.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.=+_-]{0,99}")
#: Of a level; ``+`` joins levels to an arm's name.
LABEL = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9.=_-]{0,59}")
#: Longer names are cut, and end in a hash of the whole.
LONGEST = 96
_LONGEST_LABEL = 40
_OTHER = re.compile(r"[^A-Za-z0-9.=_-]+")


def value_text(value: Any) -> str:
    """A value as a label: ``0.2``, ``1e-5``, ``true``, ``none``; of a path its file's stem."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, tuple | list):
        return cut("-".join(map(value_text, value)) or "empty", _LONGEST_LABEL)
    text = str(value)
    if "/" in text and (Path(text).suffix in (".yaml", ".yml") or text.startswith(("/", "."))):
        text = Path(text).stem  # a file; what is not one (a Hub id) keeps its owner
    return cut(clean(text), _LONGEST_LABEL)


def _float_text(value: float) -> str:
    """``0.0`` is ``0`` and ``1e-05`` is ``1e-5``: as people write them."""
    mantissa, _, exponent = repr(value).partition("e")
    mantissa = mantissa.removesuffix(".0")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def clean(text: str) -> str:
    """``text`` in the letters of a label."""
    return _OTHER.sub("-", text).strip("-.") or "empty"


def cut(text: str, longest: int) -> str:
    """``text``, or where it is too long its beginning and a hash of all of it."""
    if len(text) <= longest:
        return text
    return f"{text[: longest - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def join(parts: Sequence[str]) -> str:
    """An arm's name from those of its levels."""
    return cut("+".join(parts), LONGEST)


def bad_name(what: str, found: Any, *, label: bool = False) -> ConfigurationError:
    """A refusal of a name that could not be a folder, or would have to be quoted in a shell."""
    allowed = "`.`, `=`, `_`, `-`" + ("" if label else ", `+`")
    longest = 60 if label else 100
    return ConfigurationError(
        f"{what} is {str(found)!r}.",
        expected=f"at most {longest} letters, digits and {allowed}, a letter or digit first",
        fix=f"call it e.g. {clean(str(found))[:40]}",
    )
