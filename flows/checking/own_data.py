"""`refiner data`: rows of one's own: checked before a run, examples, other layouts.

In: a file of rows, and perhaps a recipe. Out: a :class:`refiner_core.data.checking.DataCheck`; rows
in refiner's form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.data.sources import SYNTHETIC, RawRow, Which, read_all_rows, resolve_source

if TYPE_CHECKING:
    from refiner_core.data.checking import DataCheck


def check_data(
    file: str | Path,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    which: Which | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DataCheck:
    """Check a file of rows before a run.

    Parameters
    ----------
    file
        A .jsonl or .parquet file, a folder made by ``save_to_disk``, or a Hub data set.
    recipe, overrides
        Its windows, tokenizer and split; without a recipe no lengths are checked.
    which
        ``sft`` or ``rl`` (default: ``rl`` if the first row has rubrics, else ``sft``).
    progress
        Receives the number of rows read, and 0.

    Returns
    -------
    DataCheck
        Rows that a run would refuse or drop, lengths, near repetitions across the split.

    Raises
    ------
    DataError
        The file does not exist, has no rows, or cannot be read at all.
    ConfigurationError
        There is no such recipe, or its tokenizer cannot be loaded.
    """
    from refiner_core.data.checking import check_rows

    config = RecipeConfig() if recipe is None else load_recipe(recipe, overrides)
    which = which or _kind_of(file, config)
    tokenizer = None
    if recipe is not None:
        from refiner_core.generation.load import load_tokenizer

        tokenizer = load_tokenizer(config.model.name_or_path, config.model)
    return check_rows(_with_file(config, file, which), which, tokenizer, progress)


def convert_data(file: str | Path, out: str | Path) -> dict[str, int]:
    """Write the rows of a file in refiner's form, as JSON Lines.

    Parameters
    ----------
    file
        Rows in one of the layouts of :mod:`refiner_core.data.converting`.
    out
        The new file; it must not exist.

    Returns
    -------
    dict
        ``rows``, and how many have ``rubrics``.

    Raises
    ------
    DataError
        A row is unreadable or of no known layout; nothing is written.
    ConfigurationError
        ``out`` exists.
    """
    from refiner_core.data.converting import convert_row

    target = Path(out).expanduser()
    if target.exists():
        raise ConfigurationError(
            f"{target} exists.", expected="a new file", fix="name another one, or move it away"
        )
    rows = []
    for raw in _rows(file, RecipeConfig(), "sft"):
        if isinstance(raw, DataError):
            raise raw
        rows.append(convert_row(raw))
    # Strict JSON: what is written is read again by a strict reader.
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) for row in rows]
    target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {"rows": len(rows), "rubrics": sum("rubrics" in r or "ground_truth" in r for r in rows)}


def example_rows(which: Which, count: int = 2) -> list[dict[str, Any]]:
    """Rows that work, from the synthetic task.

    Parameters
    ----------
    which
        ``sft``: demonstrations; ``rl``: prompts with rubrics.
    count
        Number of rows.

    Returns
    -------
    list of dict
        The rows, without the generator's own columns.

    Raises
    ------
    ConfigurationError
        ``count`` is below 1.
    """
    if count < 1:
        raise ConfigurationError(
            f"{count} rows cannot be made.", expected="at least 1", fix="name another number"
        )
    from refiner_core.data.synthetic import generate_rows

    wanted = ("conversations", "rubrics", "metadata")
    found = []
    for row in generate_rows(which, count, 0):
        shown = {name: row[name] for name in wanted}
        shown["rubrics"] = json.loads(shown["rubrics"])
        shown["metadata"] = {k: v for k, v in shown["metadata"].items() if k != "flaw"}
        found.append(shown)
    return found


def _rows(file: str | Path, config: RecipeConfig, which: Which) -> Iterator[RawRow | DataError]:
    source = resolve_source(_with_file(config, file, which).data, which)
    return read_all_rows(source)


def _kind_of(file: str | Path, config: RecipeConfig) -> Which:
    first = next((r for r in _rows(file, config, "rl") if isinstance(r, RawRow)), None)
    has = first is not None and any(first.row.get(n) for n in ("rubrics", "ground_truth"))
    return "rl" if has else "sft"


def _with_file(config: RecipeConfig, file: str | Path, which: Which) -> RecipeConfig:
    path = str(file)
    if path.startswith("builtin:") and path != SYNTHETIC:
        path = f"./{path}"
    return replace_fields(config, {f"data.{which}_path": path})
