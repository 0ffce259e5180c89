"""Definition of a sweep: from the text of its file to a checked :class:`~sweeps.values.SweepFile`.

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

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.files import readable, yaml_fields
from refiner_core.contract.loading import (
    leaves,
    read_overrides,
    read_values,
    whole_paths,
    written_overrides,
)
from refiner_core.contract.marks import walk
from refiner_core.contract.recipes import shipped_recipes
from refiner_core.contract.records import from_json
from refiner_core.contract.shipped import find_file, refuse_unknown, shipped_files
from sweeps.values import Limits, Question, SweepFile

T = TypeVar("T", Limits, Question)
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


KEYS = (
    *("name", "recipe", "overrides", "factors", "zip", "arms"),
    *("exclude", "baseline", "seeds", "limits", "question"),
)
#: More seeds, or combinations of levels, than anybody wants to run; a slip should not fill the
#: memory.
MOST = 200_000
#: Run seeds of a file that names none.
SEEDS = SweepFile("", "").seeds


class Reader:
    """Reads one file; each method one key.

    Parameters
    ----------
    values
        Its keys and values.
    where, origin, text
        What messages call it; its path, beside which files are looked for; its text.
    """

    def __init__(self, values: Mapping[str, Any], where: str, origin: str, text: str) -> None:
        self.values, self.where, self.origin, self.text = values, where, origin, text
        self.folder = Path(origin).parent if origin else Path.cwd()

    def read(self, name: str) -> SweepFile:
        """The whole file, each part checked."""
        alien = next((str(key) for key in self.values if key not in KEYS), "")
        refuse_unknown(self.values, KEYS, self.where, hint=_belongs_elsewhere(alien))
        if not self.values.get("recipe"):
            raise self._wrong("recipe", self.values.get("recipe"), "a recipe's name or file")
        varied = (*self._factors(), *self._zips())
        sweep = SweepFile(
            *(self._name(name), self._recipe(), self._overrides(), *varied, self._arms()),
            *(self._exclude(), self._baseline(), self._seeds(), self._limits(), self._question()),
            *(self.text, self.origin),
        )
        self._each_field_once(sweep)
        return sweep

    # -------------------------------------------------------------- what it starts from

    def _name(self, name: str) -> str:
        found = self.values.get("name") or name or "unnamed"
        if _is_number(found):
            found = value_text(found)
        if not isinstance(found, str) or not NAME.fullmatch(found):
            raise bad_name(f"The name of {self.where}", found)
        return found

    def _recipe(self) -> str:
        recipe = self.values["recipe"]
        if not isinstance(recipe, str):
            raise self._wrong("recipe", recipe, "a recipe's name or file")
        beside = self.folder / Path(recipe).expanduser()
        if recipe not in shipped_recipes() and beside.is_file():
            return str(beside.resolve())
        return recipe

    def _overrides(self) -> tuple[str, ...]:
        """As texts, so that they can be typed behind `refiner run`."""
        found = self.values.get("overrides") or []
        if isinstance(found, Mapping):
            texts = tuple(written_overrides(found, self.folder))
        else:
            texts = tuple(whole_paths(t, self.folder) for t in self._texts("overrides", found))
        self._once("overrides", _fields_of(texts))
        return texts

    # -------------------------------------------------------------- what is varied

    def _factors(self) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
        found: dict[str, dict[str, Any]] = {}
        labelled = set()
        for field, levels in self._mapping("factors").items():
            key = f"factors: {field}"
            if not isinstance(levels, list | tuple | Mapping) or not levels:
                raise self._wrong(
                    key, levels, "a list of values, or {label: value}; not an empty one"
                )
            given = levels.values() if isinstance(levels, Mapping) else levels
            values = self._values(key, field, given)
            named = given is not levels
            labels = [value_text(label) for label in (levels if named else values)]
            self._once(key, labels, "remove one, or give them labels: {first: A, second: B}")
            if named:
                labelled.add(field)
                for label in levels:
                    self._label(key, label)
            found[field] = dict(zip(labels, values, strict=True))
        return found, frozenset(labelled)

    def _values(self, key: str, field: str, values: Iterable[Any]) -> list[Any]:
        """Values as their field holds them."""
        at = self._at(key)
        typed = [read_values({field: value}, self.folder, at)[field] for value in values]
        if key.startswith("factors"):
            self._once(key, map(repr, typed))
        return typed

    def _zips(self) -> tuple[tuple[dict[str, tuple[Any, ...]], ...], tuple[tuple[str, ...], ...]]:
        groups = self.values.get("zip") or []
        groups = [groups] if isinstance(groups, Mapping) else groups
        if not _is_list(groups) or not all(isinstance(g, Mapping) for g in groups):
            raise self._wrong("zip", groups, "a mapping of fields to lists, or a list of such")
        read = [self._zip(group) for group in groups]
        return tuple(g for g, _ in read), tuple(labels for _, labels in read)

    def _zip(self, group: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, ...]], tuple[str, ...]]:
        columns = {str(k): v for k, v in group.items()}
        for field, column in columns.items():
            if not _is_list(column) or not column:
                raise self._wrong(f"zip: {field}", column, "a list of values, not an empty one")
        sizes = {field: len(column) for field, column in columns.items()}
        if len(set(sizes.values())) > 1:
            said = ", ".join(f"{field} has {n}" for field, n in sizes.items())
            raise ConfigurationError(
                f"The lists of a `zip` group of {self.where} differ in length: {said}.",
                expected="as many values in each: they are taken by position",
                fix="add what is missing, or move a field to `factors`, which makes a grid",
            )
        labels = tuple(columns.pop("labels", ()))
        for label in labels:
            self._label("zip: labels", label)
        self._once("zip: labels", map(value_text, labels))
        values = {
            field: tuple(self._values(f"zip: {field}", field, column))
            for field, column in columns.items()
        }
        rows = list(zip(*values.values(), strict=True))
        if not rows:
            raise self._wrong("zip", dict(group), "at least one field beside `labels`")
        self._once(f"zip: {', '.join(values)}", map(repr, rows))
        return values, tuple(value_text(label) for label in labels)

    def _arms(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for key, settings in self._mapping("arms").items():
            if not NAME.fullmatch(key):
                raise bad_name(f"The arm {key!r} of {self.where}", key)
            at = f"arms: {key}"
            if isinstance(settings, Mapping):
                found[key] = read_values(settings, self.folder, self._at(at))
            else:
                texts = self._texts(at, settings or [])
                self._once(at, _fields_of(texts))
                found[key] = read_overrides(texts, self.folder, self._at(at))
        return found

    def _exclude(self) -> tuple[Mapping[str, Any], ...]:
        found = self.values.get("exclude") or []
        rules = [found] if isinstance(found, Mapping) else found
        if not _is_list(rules) or not all(isinstance(r, Mapping) and r for r in rules):
            raise self._wrong("exclude", rules, "a list of {field: value or label}")
        return tuple(map(_flat, rules))

    def _baseline(self) -> str | Mapping[str, Any]:
        found = self.values.get("baseline", "")
        if isinstance(found, Mapping):
            return _flat(found)
        if _is_number(found):
            return value_text(found)  # an arm may be called 1
        if found is not None and not isinstance(found, str):
            raise self._wrong("baseline", found, "an arm's name, or {field: value or label}")
        return found or ""

    def _each_field_once(self, sweep: SweepFile) -> None:
        """Whatever varies a field is the only one that does."""
        seen = dict[str, str]()
        varied = [("factors", set(sweep.factors)), *(("zip", set(group)) for group in sweep.zipped)]
        varied.append(("arms", set(chain.from_iterable(sweep.arms.values()))))
        for place, fields_there in varied:
            for field in sorted(fields_there):
                if before := seen.get(field):
                    raise ConfigurationError(
                        f"`{field}` stands in `{before}` and in `{place}` of {self.where}.",
                        expected="each field in one place: else one value would hide the other",
                        fix=f"remove it from one of the two, or move its values to `{place}`",
                    )
                seen[field] = place

    # -------------------------------------------------------------- how much of it, and what for

    def _seeds(self) -> tuple[int, ...]:
        found = self.values.get("seeds", SEEDS)
        if _is_int(found) and found > MOST:
            raise self._wrong("seeds", found, f"at most {MOST:,}: as many are more than will run")
        if _is_int(found) and found > 0:
            return tuple(range(1, found + 1))
        expected = "a list of whole numbers from 0 up, or how many there are to be"
        if not _is_list(found) or not found or not all(_is_int(s) and s >= 0 for s in found):
            raise self._wrong("seeds", found, expected)
        self._once("seeds", found, "remove it: the same seed again is the same run")
        return tuple(found)

    def _limits(self) -> Limits:
        limits = self._section(Limits, "limits")
        for name, value in vars(limits).items():
            least, words = (1, "above zero") if name == "concurrency" else (0, "from zero up")
            if value is not None and not least <= value < 1e308:
                raise self._wrong(f"limits: {name}", value, f"a number {words}, or null")
        return limits

    def _question(self) -> Question:
        found = self.values.get("question") or {}
        if isinstance(found, str):
            return Question(text=found)
        question = self._section(Question, "question")
        effect = question.smallest_effect
        if effect is not None and not 0 < effect < 1e308:
            raise self._wrong("question: smallest_effect", effect, "a number above zero")
        return question

    def _section(self, kind: type[T], key: str) -> T:
        found = self._mapping(key)
        refuse_unknown(found, [f.name for f in fields(kind)], self.where, f"{key}: ")
        try:
            return from_json(kind, found)
        except TypeError as error:
            name, due = str(error).partition(" is ")[0].rpartition(".")[2], str(error).split()[-1]
            expected = {"int": "a whole number", "str": "text"}.get(due, "a number")
            raise self._wrong(f"{key}: {name}", found[name], expected) from error

    # -------------------------------------------------------------- refusals

    def _mapping(self, key: str) -> dict[str, Any]:
        found = self.values.get(key) or {}
        if not isinstance(found, Mapping):
            raise self._wrong(key, found, "a mapping")
        return {str(k): v for k, v in found.items()}

    def _texts(self, key: str, found: Any) -> Sequence[str]:
        if not _is_list(found) or not all(isinstance(text, str) for text in found):
            raise self._wrong(key, found, "a list of `key=value`, or a mapping of fields")
        return found

    def _once(self, key: str, names: Iterable[Any], fix: str = "remove one of the two") -> None:
        counts = Counter(map(str, names))
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigurationError(
                f"`{key}` of {self.where} has {', '.join(twice)} twice.",
                expected="each once: else one would hide the other",
                fix=fix,
            )

    def _label(self, key: str, label: Any) -> None:
        text = label if isinstance(label, str) else value_text(label)
        if not LABEL.fullmatch(text):
            raise bad_name(f"The label {label!r} of `{key}` in {self.where}", label, label=True)

    def _at(self, key: str) -> str:
        return f"`{key}` of {self.where}"

    def _wrong(self, key: str, found: Any, expected: str) -> ConfigurationError:
        is_ = "missing" if found is None else repr(found)
        return ConfigurationError(
            f"`{key}` of {self.where} is {is_}.", expected=expected, fix=f"correct `{key}`"
        )


def _fields_of(overrides: Iterable[str]) -> list[str]:
    return [text.partition("=")[0].strip() for text in overrides]


def _flat(rule: Mapping[Any, Any]) -> dict[str, Any]:
    """Dotted field -> value, nested mappings opened."""
    return dict(leaves("", {str(k): v for k, v in rule.items()}))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _belongs_elsewhere(key: str) -> str:
    """Hint for a key of a recipe that stands in a sweep file."""
    known = {part for path, _ in walk(RecipeConfig) for part in (path, path.split(".")[0])}
    return " It is a field of the recipe: write it below `overrides:`." if key in known else ""


def shipped_sweeps() -> dict[str, Path]:
    """Names and files of the sweeps that come with refiner."""
    return shipped_files("sweeps")


def load_sweep(name_or_path: str) -> SweepFile:
    """A shipped sweep (by name) or a YAML file.

    Raises
    ------
    ConfigurationError
        There is none of that name, or its form is wrong; says what would fit.
    """
    path = find_sweep(name_or_path)
    with readable(path, f"Sweep {path}"):
        text = path.read_text(encoding="utf-8")
    return parse_sweep(text, path.stem, str(path))


def find_sweep(name_or_path: str) -> Path:
    """The file of a sweep given by shipped name or path."""
    is_recipe = name_or_path in shipped_recipes()
    hint = " That is a recipe; `refiner run` carries it out." if is_recipe else ""
    return find_file(name_or_path, "sweep", shipped_sweeps(), hint=hint).absolute()


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
    if isinstance(source, str):
        source = yaml_fields(source, f"The text of {where}", "recipe: tiny", resolve=False)
    return Reader(source, where, origin, text).read(name)
