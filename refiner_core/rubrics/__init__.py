"""Rubrics: the criteria of a judge.

In: a row's rubric JSON, the name of a shipped set (``v3``) or the path of a YAML file, the reward
configuration. Out: :class:`Rubric` values in a fixed order (a row's own first, then the static
ones); a :class:`RubricSet` and its digest for fingerprints and cards. A new set is a new file in
``sets``; no code changes.

A stage uses the same wording from start to end: :func:`hold_rubrics` refuses a set that
differs from the planned one, and keeps the loaded set until the stage is over, whatever
happens to the file meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RewardConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.files import read_yaml
from refiner_core.rubrics.rows import Rubric as Rubric
from refiner_core.rubrics.rows import RubricSet as RubricSet
from refiner_core.rubrics.rows import normalise_rubrics as normalise_rubrics
from refiner_core.rubrics.rows import parse_rubrics as parse_rubrics

_FOLDER = Path(__file__).parent / "sets"
_FIX = "see `refiner rubrics check FILE`, and `refiner rubrics show v3` for a set that fits"
#: Sets held by stages of this process, by their names in the recipes.
_retained: dict[str, RubricSet] = {}


def shipped_rubric_sets() -> tuple[str, ...]:
    """Names of the shipped sets."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def rubric_set_path(name: str) -> Path:
    """The file of a set given by shipped name or path. A shipped name takes precedence over a file
    of that name; ``./v3`` is the file.

    Raises
    ------
    ConfigurationError
        There is no such set or file.
    """
    shipped = name in shipped_rubric_sets()
    path = _FOLDER / f"{name}.yaml" if shipped else Path(name).expanduser()
    try:
        if path.is_file():
            return path
    except OSError:  # the name is too long for a file
        pass
    raise ConfigurationError(
        f"There is no rubric set or file {name!r}",
        expected=f"{', '.join(shipped_rubric_sets())}, or the path of a YAML file",
        fix="correct the name or path (in a recipe: reward.static_rubrics)",
    )


def load_rubric_set(name: str) -> RubricSet:
    """Load a shipped set by name, or a user's own YAML file by path.

    A file is read again after a change, unless a stage holds it.

    Raises
    ------
    ConfigurationError
        There is no such set, or the file is invalid; the message says why.
    """
    if name in _retained:
        return _retained[name]
    path = rubric_set_path(name)
    state = path.stat()
    return _load(path.absolute(), state.st_mtime_ns, state.st_size)


def rubric_set_digest(name: str) -> str:
    """Digest of a set's content, without comments, file name and version."""
    return load_rubric_set(name).digest()


@contextlib.contextmanager
def hold_rubrics(name: str, digest: str) -> Iterator[RubricSet]:
    """The planned set of a stage: within the block, edits of the file have no effect.

    Parameters
    ----------
    name
        As in ``reward.static_rubrics``.
    digest
        The digest in the stage's record (``sources["rubrics"]``).

    Raises
    ------
    ConfigurationError
        The file has changed, is gone, or is no longer valid.
    """
    rubrics = load_rubric_set(name)
    if rubrics.digest() != digest:
        raise ConfigurationError(
            f"The rubric set {name} has changed since this stage was planned (its digest was "
            f"{digest[:12]} and is {rubrics.digest()[:12]})",
            expected="titles, descriptions, polarities, weights and their order as they were",
            fix="put the file back as it was; or run the recipe again, which then is another stage",
        )
    before = _retained.get(name)
    _retained[name] = rubrics
    try:
        yield rubrics
    finally:
        del _retained[name]
        if before is not None:
            _retained[name] = before


@functools.lru_cache(maxsize=32)
def _load(path: Path, modified_ns: int, size: int) -> RubricSet:
    from refiner_core.rubrics.rows import read_set

    content = read_yaml(path, f"The rubric set {path}")
    rubrics, faults = read_set(content, path.stem)
    if rubrics is None:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ConfigurationError(
            f"The rubric set {path} does not fit: {faults[0][1]}{more}",
            expected="a name, and rubrics each with title, description, polarity and weight",
            fix=_FIX,
        )
    return rubrics


def select_rubrics(row_rubrics: Any, reward: RewardConfig) -> tuple[Rubric, ...]:
    """The rubrics selected by ``rubric_source``.

    ``instance_rubrics_only`` drops static ones for any source: they are then neither judged,
    nor part of the reward, nor logged. Under ``static`` nothing is left.

    Raises
    ------
    DataError
        The row's rubrics are invalid (see :func:`~refiner_core.rubrics.rows.normalise_rubrics`).
    ConfigurationError
        The static set cannot be loaded.
    """
    source = reward.rubric_source
    rubrics: tuple[Rubric, ...] = ()
    if source in ("instance", "instance+static"):
        rubrics += parse_rubrics(row_rubrics)
    if source in ("static", "instance+static") and not reward.instance_rubrics_only:
        rubrics += load_rubric_set(reward.static_rubrics).rubrics
    return rubrics
