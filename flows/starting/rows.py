"""A first look at somebody's own rows: can they be read, and which form have they?

In: what one answers when asked for rows: a file, a folder, a Hub id with its commit, or a builtin.
Out: :class:`Rows`, or a refusal that names the line. The Hub is not asked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from refiner_core.contract.config import DataConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.data.rows import parse_row
from refiner_core.data.sources import SYNTHETIC, Source, Which, read_rows, resolve_source

#: Rows that are read: a form that is wrong is wrong from the first row on.
_READ = 200
NONE = "none"


@dataclass(frozen=True)
class Rows:
    """What was found.

    Attributes
    ----------
    path, revision
        As a recipe names them; a path is whole.
    said
        In a line.
    """

    path: str | None
    revision: str | None
    said: str

    @property
    def own(self) -> bool:
        """Whether they are somebody's own, and not made up."""
        return self.path not in (None, SYNTHETIC)


def look_at_rows(answer: str, which: Which, *, of_refiner: bool = True) -> Rows:
    """Read the first rows that ``answer`` names.

    Parameters
    ----------
    of_refiner
        Whether they have to have a form of the refiner's rows; an agent's demonstrations have
        others.

    Raises
    ------
    DataError, ConfigurationError
        There are none, they cannot be read, or one has no known form.
    """
    if answer == NONE:
        return Rows(None, None, "none")
    if answer == SYNTHETIC:
        return Rows(SYNTHETIC, None, "made up by refiner")
    source = _source(answer, which)
    if source.kind == "hub":
        said = "on the Hub: read when the run fetches them"
        return Rows(source.path, source.revision, said)
    count, forms = 0, dict[str, int]()
    for raw in itertools.islice(read_rows(source), _READ):
        count += 1
        form = "conversations" if raw.row.get("conversations") is not None else "messages"
        forms[form] = forms.get(form, 0) + 1
        if of_refiner:
            parse_row(raw, which)
    named = " and ".join(f"`{form}`" for form in forms)
    said = f"{'the first ' * (count == _READ)}{count} rows can be read, of the form {named}"
    return Rows(str(Path(source.path).expanduser().resolve()), None, said)


def _source(answer: str, which: Which) -> Source:
    """``OWNER/NAME@COMMIT`` is a data set on the Hub, at a commit."""
    local = Path(answer).expanduser()
    path, _, revision = answer.rpartition("@") if not local.exists() else ("", "", "")
    if not path and "/" in answer and not local.exists() and not local.parent.is_dir():
        raise ConfigurationError(
            f"There is no file or folder {answer}; taken as a data set on the Hub, it has no "
            "commit.",
            expected="a file, or OWNER/NAME@COMMIT of a data set on the Hub",
            fix=f"correct the path, or write {answer}@COMMIT",
        )
    named: dict[str, Any] = {
        f"{which}_path": path or answer,
        f"{which}_revision": revision if path else None,
    }
    return resolve_source(replace(DataConfig(), **named), which, pinned=False)
