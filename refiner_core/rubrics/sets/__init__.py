"""Static rubric sets: named, versioned YAML files, shipped or the user's own.

In: the name of a shipped set (``v3``) or the path of a YAML file. Out: :class:`RubricSet`, and its
digest for fingerprints and cards. A new set is a new file; no code changes.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.rubrics.row import Rubric, normalise_rubrics

_FOLDER = Path(__file__).parent
_FIX = f"compare with a shipped set, e.g. {_FOLDER / 'v3.yaml'}"
_SET_KEYS = {"name", "version", "rubrics"}
_RUBRIC_KEYS = {"title", "description", "polarity", "weight", "source"}


@dataclass(frozen=True)
class RubricSet:
    """A static set. The rubrics' own ``source`` is the set's name."""

    name: str
    version: int
    rubrics: tuple[Rubric, ...]

    def digest(self) -> str:
        """SHA-256 of what is judged: titles, descriptions, polarities, weights, in order."""
        content = [[r.title, r.description, r.polarity, r.weight] for r in self.rubrics]
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def shipped_rubric_sets() -> tuple[str, ...]:
    """Names of the sets that come with refiner."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def load_rubric_set(name: str) -> RubricSet:
    """Load a shipped set by name, or a user's own YAML file by path.

    A shipped name wins over a file of that name; ``./v3`` is the file. A file is read again after
    it changed.

    Raises
    ------
    ConfigurationError
        There is no such set, or the file does not fit; the message says what does.
    """
    shipped = name in shipped_rubric_sets()
    path = _FOLDER / f"{name}.yaml" if shipped else Path(name).expanduser()
    try:
        modified_ns = path.stat().st_mtime_ns
        if not path.is_file():
            raise FileNotFoundError
    except OSError:
        raise ConfigurationError(
            f"There is no rubric set or file {name!r}",
            expected=f"{', '.join(shipped_rubric_sets())}, or the path of a YAML file",
            fix="reward.static_rubrics",
        ) from None
    return _load(path, modified_ns)


def rubric_set_digest(name: str) -> str:
    """Digest of a set's content; comments, file name and version do not enter it."""
    return load_rubric_set(name).digest()


@functools.lru_cache(maxsize=32)
def _load(path: Path, modified_ns: int) -> RubricSet:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"The rubric set {path} cannot be read: {error}", fix=_FIX
        ) from error
    if not isinstance(content, Mapping) or not isinstance(content.get("rubrics"), list):
        raise _unfit(path, "it has no list `rubrics`")
    _known(path, content, _SET_KEYS, "the set")
    name, version = content.get("name", path.stem), content.get("version", 1)
    if not isinstance(name, str) or not isinstance(version, int) or isinstance(version, bool):
        raise _unfit(path, "`name` is not text or `version` is not a whole number")
    rubrics = tuple(_rubric(path, i, entry, name) for i, entry in enumerate(content["rubrics"]))
    if not rubrics:
        raise _unfit(path, "`rubrics` is empty")
    return RubricSet(name, version, rubrics)


def _rubric(path: Path, position: int, entry: Any, name: str) -> Rubric:
    where = f"rubrics[{position}]"
    if not isinstance(entry, Mapping):
        raise _unfit(path, f"`{where}` is not a mapping")
    _known(path, entry, _RUBRIC_KEYS, f"`{where}`")
    polarity = entry.get("polarity", "positive")
    if polarity not in ("positive", "negative"):
        raise _unfit(path, f"`{where}.polarity` is {polarity!r}, not positive or negative")
    key = f"{polarity}_rubrics"
    try:
        entries = normalise_rubrics({key: [entry]})[key]
    except DataError as error:
        raise _unfit(path, f"{where}: {error.what}") from error
    if not entries:
        raise _unfit(path, f"`{where}.weight` is below 0 (say `polarity: negative` instead)")
    normal = entries[0]
    return Rubric(normal["title"], normal["description"], polarity, normal["weight"], name)


def _known(path: Path, entry: Mapping[Any, Any], keys: set[str], where: str) -> None:
    unknown = sorted(str(key) for key in entry if key not in keys)
    if unknown:
        raise _unfit(path, f"{where} has unknown keys {', '.join(unknown)} (known: {sorted(keys)})")


def _unfit(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError(f"The rubric set {path} does not fit: {what}", fix=_FIX)
