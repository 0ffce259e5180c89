"""Fields that name files: as whole paths, wherever a job works that reads them.

In: an OmegaConf node and the folder of the file that it was read from. Out: the same node, with
whole paths, and with what is JSON as text, though it was written as YAML.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Fields that name a file or folder, or something shipped. A relative path is taken from the
#: folder of the recipe that names it, else (and in overrides) from the current one; jobs get the
#: whole path.
FILE_FIELDS = (
    "data.sft_path",
    "data.rl_path",
    "reward.static_rubrics",
    "judge.prompt",
    "publish.card_template",
    "environment.name",
    "environment.tasks",
    "dispatch.profile",
)
#: Of these, rows: nothing that is shipped goes by a bare word, so a folder may.
ROWS_FIELDS = ("data.sft_path", "data.rl_path")
#: Fields of JSON text, which may be written as a mapping.
JSON_FIELDS = ("judge.extra_body",)


def settled_files(node: Any, folder: Path) -> Any:
    """``node`` with the files that it names as whole paths, and with JSON as text."""
    from omegaconf import OmegaConf

    for field in (*FILE_FIELDS, *JSON_FIELDS):
        section, _, key = field.rpartition(".")
        values = node.get(section)
        if not OmegaConf.is_dict(values) or key not in values:
            continue
        if OmegaConf.is_interpolation(values, key):
            continue
        value = values[key]
        if field in FILE_FIELDS:
            values[key] = settled_value(field, value, folder)
        elif OmegaConf.is_dict(value):
            values[key] = json.dumps(OmegaConf.to_container(value, resolve=False))
    return node


def settled_value(field: str, value: Any, folder: Path) -> Any:
    """The value of a field, with the whole path where it names a file or folder that is there: in
    ``folder``, else in the current one."""
    if field not in FILE_FIELDS or not isinstance(value, str):
        return value
    return _where_it_lies(value, folder) if field in ROWS_FIELDS else whole_path(value, folder)


def whole_path(value: str, folder: Path) -> str:
    """Where a file lies (and ``:NAME`` behind it, of a Python file); the name of something shipped,
    or of nothing, stays as it is."""
    if ".py:" in value:
        file, _, name = value.rpartition(":")
        return f"{whole_path(file, folder)}:{name}"
    named = Path(value).expanduser()
    if "/" not in value and not named.suffix:
        return value
    return _where_it_lies(value, folder)


def _where_it_lies(value: str, folder: Path) -> str:
    named = Path(value).expanduser()
    found = (p for p in (folder / named, Path.cwd() / named) if p.exists())
    return str(next((p.resolve() for p in found), value))
