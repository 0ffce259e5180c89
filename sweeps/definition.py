"""From the text of a sweep file to :class:`~sweeps.values.SweepFile`, checked for form.

In: a shipped sweep's name, a path, or the file's text. Out: a :class:`SweepFile` with every value
typed as its field holds it. What is wrong with the form (an unknown key, a value of another type,
a group of unequal lengths, a field that is varied twice) is refused here by name; what only the
recipe can tell is checked when the sweep is planned.

.. code-block:: yaml

    recipe: tiny                        # a shipped name, or a file (beside this one)
    overrides: [sft.max_train_steps=60] # for every trial; or a mapping of fields
    factors:                            # a grid: all levels of each with all of the others
      reward.paper_citation_weight: [0, 0.2, 0.5]
      judge.model: {lenient: lexical-1, strict: lexical-strict-1}     # label: value
    zip:                                # fields that change together, by position
      {grpo.learning_rate: [1e-4, 3e-4], grpo.beta: [0.01, 0.001], labels: [slow, fast]}
    arms:                               # named settings; [] is the recipe as it is
      recipe: []
      masked: [grpo.mask_truncated_completions=true]
    exclude: [{judge.model: strict, reward.paper_citation_weight: 0.5}]
    baseline: {judge.model: lenient, …} # or an arm's name; the first where it is left out
    seeds: [1, 2, 3]                    # or how many: 3
    limits: {concurrency: 2, gpu_hours: 100, disk_gb: 200, judge_calls: 100000}
    question: {text: …, metric: oracle, decoding: sampled, smallest_effect: 0.05}
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.recipes.recipe_files import shipped_recipes
from refiner_core.contract.yaml_words import yaml_reason
from sweeps.reading import KEYS, Reader
from sweeps.values import SweepFile


def shipped_sweeps() -> dict[str, Path]:
    """Names and files of the sweeps that come with refiner."""
    folder = Path(str(resources.files("sweeps")))
    return {p.stem: p for p in sorted(folder.glob("*.yaml"), key=lambda p: p.stem)}


def load_sweep(name_or_path: str) -> SweepFile:
    """A shipped sweep (by name) or a YAML file.

    Raises
    ------
    ConfigurationError
        There is none of that name, or its form is wrong; says what would fit.
    """
    path = find_sweep(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigurationError(
            f"Sweep {path} cannot be read: {why}.",
            expected="a YAML file in UTF-8",
            fix="correct the file",
        ) from error
    return parse_sweep(text, path.stem, str(path))


def find_sweep(name_or_path: str) -> Path:
    """The file of a sweep given by shipped name or path."""
    shipped = shipped_sweeps()
    if name_or_path in shipped:
        return shipped[name_or_path]
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path.absolute()
    known = ", ".join(shipped)
    if "/" in name_or_path or path.suffix in (".yaml", ".yml"):
        raise ConfigurationError(
            f"There is no sweep file {name_or_path}.",
            expected=f"the path of a YAML file, or a shipped name: {known}",
            fix="check the path (it is taken from the current folder)",
        )
    hint = ""
    if name_or_path in shipped_recipes():
        hint = " That is a recipe; `refiner run` carries it out."
    raise ConfigurationError(
        f"There is no sweep {name_or_path!r}.{hint or suggest(name_or_path, shipped)}",
        expected=f"a shipped name ({known}) or the path of a YAML file",
        fix="name one of these",
    )


def parse_sweep(source: str | Mapping[str, Any], name: str = "", origin: str = "") -> SweepFile:
    """A sweep from its text, or from what YAML made of it.

    Parameters
    ----------
    name
        What it is called where it does not say so itself.
    origin
        The file's path: files that it names are looked for beside it.

    Raises
    ------
    ConfigurationError
        Names the key, what it is, what was expected.
    """
    text = source if isinstance(source, str) else ""
    where = f"sweep {Path(origin).name if origin else name or 'file'}"
    return Reader(_read_yaml(source, where), where, origin, text).read(name)


def _read_yaml(source: str | Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys and values, with dots in keys left alone."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not isinstance(source, str):
        return dict(source)
    try:
        node = OmegaConf.create(source)
        found: Any = OmegaConf.to_container(node, resolve=False)
    except AssertionError:  # OmegaConf's answer to a lone number
        found = None
    except (YAMLError, OmegaConfBaseException, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = "it is nested too deeply" if deep else yaml_reason(error)
        raise ConfigurationError(
            f"The text of {where} cannot be read: {why}.",
            expected="YAML",
            fix="correct the nesting" if deep else "correct the place named above",
        ) from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"The text of {where} is no mapping of keys.",
            expected=f"`key: value` lines with keys among {', '.join(KEYS)}",
            fix="see a shipped sweep for the form",
        )
    return {str(k): v for k, v in found.items()}
