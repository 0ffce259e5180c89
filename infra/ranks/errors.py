"""An exception on its way to another process: as JSON, and back as what it was.

In: an exception. Out: a value that JSON takes, and from it an exception of the same class, with the
same words, system error number and causes, so that :func:`infra.jobs.failures.classify` and a
caller's ``except`` see no difference. Its traceback travels as a note, which a log shows and
nothing reads.

Errors of the contract, of our own rooms and of Python are made again as such. Of any other class
(torch's) only the name is known here: it becomes a :class:`RankError` of that name.
"""

from __future__ import annotations

import builtins
import importlib
import traceback
from typing import Any

from infra.jobs.failures import traceback_signature
from refiner_core.contract.errors import RefinerError

_OURS = ("refiner_core", "infra", "flows")
_CAUSES = 5
#: A line of output is what carries it: what is longer is cut.
_TEXT_LIMIT, _TRACEBACK_LIMIT = 8_000, 24_000


class RankError(RuntimeError):
    """An error of a class that this process does not know."""


def encode(error: BaseException, causes: int = _CAUSES) -> dict[str, Any]:
    """The error as a value of JSON."""
    value: dict[str, Any] = {
        "module": type(error).__module__,
        "name": type(error).__qualname__,
        "text": str(error)[:_TEXT_LIMIT],
    }
    if isinstance(error, RefinerError):
        value["parts"] = [error.what, error.expected, error.fix]
    if isinstance(error, OSError):
        value |= {"errno": error.errno, "strerror": error.strerror, "filename": _name(error)}
    if causes == _CAUSES:
        value["signature"] = traceback_signature(error)
        text = "".join(traceback.format_exception(error))
        value["traceback"] = text[-_TRACEBACK_LIMIT:]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and causes:
        value["cause"] = encode(cause, causes - 1)
    return value


def decode(value: dict[str, Any], where: str = "") -> Exception:
    """The error again; ``where`` says in its note whose traceback it is."""
    kind = _class(value["module"], value["name"])
    error = _made(kind, value)
    if text := value.get("traceback"):
        error.add_note(f"{where or 'There'}:\n{text.rstrip()}")
        error.signature = value["signature"]  # type: ignore[attr-defined]
    if "cause" in value:
        error.__cause__ = decode(value["cause"])
    return error


def _made(kind: type[Exception], value: dict[str, Any]) -> Exception:
    if issubclass(kind, RefinerError):
        what, expected, fix = value.get("parts") or (value["text"], "", "")
        ours = kind.__new__(kind)
        RefinerError.__init__(ours, what, expected=expected, fix=fix)
        if isinstance(ours, OSError):
            ours.errno = value.get("errno")
        return ours
    if issubclass(kind, OSError) and value.get("errno") is not None:
        name = value.get("filename")
        return kind(value["errno"], value.get("strerror") or "", *([name] if name else []))
    try:
        return kind(value["text"])
    except Exception:  # one that is made of other things than words (UnicodeDecodeError)
        return _unknown(kind.__name__, kind.__module__)(value["text"])


def _class(module: str, name: str) -> type[Exception]:
    found: Any = None
    if module == "builtins":
        found = getattr(builtins, name, None)
    elif module.partition(".")[0] in _OURS:
        found = getattr(importlib.import_module(module), name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    return _unknown(name.rpartition(".")[2], module)


def _unknown(name: str, module: str) -> type[RankError]:
    return type(name, (RankError,), {"__module__": module})


def _name(error: OSError) -> str | None:
    return None if error.filename is None else str(error.filename)
