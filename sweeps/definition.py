"""Definition of a sweep: from the text of its file to a checked :class:`~sweeps.values.SweepFile`.

In: a shipped sweep's name, a path, or the file's text. Out: a :class:`SweepFile` with every value
of its field's type. Errors of form (an unknown key, a value of the wrong type, a group of unequal
lengths, a field that is varied twice) are refused here by name; checks against the recipe follow
when the sweep is planned.

.. code-block:: yaml

    recipe: tiny                        # a shipped name, or a file (beside this one)
    overrides: [sft.max_train_steps=60] # for every trial; or a mapping of fields
    factors:                            # a grid: all combinations of levels
      reward.paper_citation_weight: [0, 0.2, 0.5]
      judge.model: {lenient: lexical-1, strict: lexical-strict-1}     # label: value
    zip:                                # fields that change together, by position
      {grpo.learning_rate: [1e-4, 3e-4], grpo.beta: [0.01, 0.001], labels: [slow, fast]}
    arms:                               # named settings; [] is the recipe unchanged
      recipe: []
      masked: [grpo.mask_truncated_completions=true]
    exclude: [{judge.model: strict, reward.paper_citation_weight: 0.5}]
    baseline: {judge.model: lenient, …} # or an arm's name; default: the first
    seeds: [1, 2, 3]                    # or their number: 3
    limits: {concurrency: 2, gpu_hours: 100, judge_calls: 100000}
    question: {text: …, metric: oracle, decoding: sampled, smallest_effect: 0.05}
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.files import (
    find_file,
    readable,
    refuse_unknown,
    shipped_files,
    yaml_fields,
)
from refiner_core.contract.loading import (
    leaves,
    read_overrides,
    read_values,
    warn_former,
    whole_paths,
    written_overrides,
)
from refiner_core.contract.marks import STRICT
from refiner_core.contract.recipes import shipped_recipes
from sweeps.values import Limits, Question, SweepFile

#: Longer names are cut, and end with a hash of the whole name.
LONGEST = 96
_LONGEST_LABEL = 40
#: Characters not allowed in a label; ``+`` joins levels to an arm's name.
_OTHER = re.compile(r"[^A-Za-z0-9.=_-]+")


def value_text(value: Any) -> str:
    """A value as a label: ``0.2``, ``1e-5``, ``true``, ``none``; for a path the file's stem."""
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
        text = Path(text).stem  # a file; a Hub id keeps its owner
    return cut(clean(text), _LONGEST_LABEL)


def _float_text(value: float) -> str:
    """Short form of a number: ``0.0`` is ``0`` and ``1e-05`` is ``1e-5``."""
    mantissa, _, exponent = repr(value).partition("e")
    mantissa = mantissa.removesuffix(".0")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def clean(text: str) -> str:
    """``text`` with only the characters of a label."""
    return _OTHER.sub("-", text).strip("-.") or "empty"


def cut(text: str, longest: int) -> str:
    """``text``, or if it is too long its beginning and a hash of all of it."""
    if len(text) <= longest:
        return text
    return f"{text[: longest - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def join(parts: Sequence[str]) -> str:
    """An arm's name from the names of its levels."""
    return cut("+".join(parts), LONGEST)


#: Limit of seeds, and of combinations of levels: a typing error should not fill the memory.
MOST = 200_000
_Some = Annotated[list[Any], Field(min_length=1)]
_Fields = dict[str | int | float, Any]
_Rule = Annotated[_Fields, Field(min_length=1)]
_Seed = Annotated[int, Field(ge=0)]
#: Each key of a file: its type, and a description; keys without are sections.
_FORMS: dict[str, tuple[Any, str]] = {
    "name": (str | int | float, "text"),
    "recipe": (str, "a recipe's name or file"),
    "overrides": (list[str] | _Fields, "a list of `key=value`, or a mapping of fields"),
    "factors": (
        dict[str, _Some | _Rule],
        "a mapping of fields to a list of values, or to {label: value}; not an empty one",
    ),
    "zip": (
        list[dict[str, _Some]] | dict[str, _Some],
        "a mapping of fields to non-empty lists, or a list of such",
    ),
    "arms": (
        dict[str | int | float, list[str] | _Fields | None],
        "a mapping of names to a list of `key=value`, or to a mapping of fields",
    ),
    "exclude": (list[_Rule] | _Fields, "a list of {field: value or label}"),
    "baseline": (str | int | float | _Fields, "an arm's name, or {field: value or label}"),
    "seeds": (
        Annotated[int, Field(ge=1, le=MOST)] | Annotated[list[_Seed], Field(min_length=1)],
        f"a list of whole numbers from 0 up, or their number (at most {MOST:,})",
    ),
    "limits": (Limits, ""),
    "question": (Question, ""),
}


class _Reader:
    """Reads one file; one method per key.

    Parameters
    ----------
    values
        Its keys and values.
    where, origin
        Its name in messages; its path, as the base of relative paths.
    """

    def __init__(self, values: Mapping[str, Any], where: str, origin: str) -> None:
        self.where, self.folder = where, Path(origin).parent if origin else Path.cwd()
        fix = "correct the key; fields of the recipe go below `overrides:`"
        refuse_unknown(values, _FORMS, where, fix=fix)
        if isinstance(text := values.get("question"), str):
            values = {**values, "question": {"text": text}}
        if not values.get("recipe"):
            raise self._wrong("recipe", values.get("recipe"), _FORMS["recipe"][1])
        self.values = {k: self._form(k, v) for k, v in values.items() if v is not None}

    def _form(self, key: str, value: Any) -> Any:
        kind, expected = _FORMS[key]
        try:
            if expected:
                return TypeAdapter(kind, config=STRICT).validate_python(value)
            found = TypeAdapter(dict[str, Any], config=STRICT).validate_python(value)
            if found.get("disk_gb") is not None:
                warn_former(
                    "limits: disk_gb", "`overrides: [disk.limit_gb=…]` limits the workspace"
                )
            refuse_unknown(found, kind.__dataclass_fields__, self.where, f"{key}: ")
            return kind(**found)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if isinstance(value, Mapping) and (at := first["loc"][:1]) and at[0] in value:
                key, value = f"{key}: {at[0]}", value[at[0]]
            said = first["msg"].removeprefix("Input should be ")
            raise self._wrong(key, value, expected or said) from None

    def read(self, name: str) -> dict[str, Any]:
        """The fields of a :class:`SweepFile` that the file sets."""
        found: dict[str, Any] = {key: self.values[key] for key in _AS_IS if key in self.values}
        found["name"] = self._name(name)
        found["recipe"] = self._recipe()
        found["overrides"] = self._overrides()
        found["factors"] = self._factors()
        factors = self.values.get("factors", {})
        found["labelled"] = frozenset(f for f, v in factors.items() if isinstance(v, Mapping))
        groups = self._listed("zip")
        found["zip_labels"] = tuple(self._labels(group) for group in groups)
        found["zipped"] = tuple(map(self._group, groups))
        found["arms"] = self._arms()
        found["exclude"] = tuple(map(_flat, self._listed("exclude")))
        baseline = self.values.get("baseline", "")  # an arm may be named 1
        found["baseline"] = _flat(baseline) if isinstance(baseline, dict) else _word(baseline)
        self._each_field_once(found)
        return found | self._seeds()

    def _name(self, name: str) -> str:
        return _name(_word(self.values.get("name") or name or "unnamed"))

    def _recipe(self) -> str:
        recipe = str(self.values["recipe"])
        beside = self.folder / Path(recipe).expanduser()
        if recipe not in shipped_recipes() and beside.is_file():
            return str(beside.resolve())
        return recipe

    def _overrides(self) -> tuple[str, ...]:
        """Overrides as texts, in the form of `refiner run`."""
        found = self.values.get("overrides", ())
        if isinstance(found, Mapping):
            texts = tuple(written_overrides(found, self.folder))
        else:
            texts = tuple(whole_paths(text, self.folder) for text in found)
        self._only_once("overrides", _fields_of(texts))
        return texts

    def _factors(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for field, levels in self.values.get("factors", {}).items():
            key, named = f"factors: {field}", isinstance(levels, Mapping)
            values = self._typed(key, field, levels.values() if named else levels)
            labels = [value_text(label) for label in (levels if named else values)]
            self._only_once(key, labels, "remove one, or give them labels: {first: A, second: B}")
            found[field] = dict(zip(labels, values, strict=True))
        return found

    def _typed(self, key: str, field: str, values: Iterable[Any]) -> list[Any]:
        """Values with the type of their field."""
        at = f"`{key}` of {self.where}"
        return [read_values({field: value}, self.folder, at)[field] for value in values]

    def _labels(self, group: Mapping[str, list[Any]]) -> tuple[str, ...]:
        """Labels of a group, whose columns have the same length."""
        if len({*map(len, group.values())}) > 1:
            said = ", ".join(f"{field} has {len(column)}" for field, column in group.items())
            raise ConfigurationError(
                f"The lists of a `zip` group of {self.where} differ in length: {said}.",
                expected="the same number of values in each: they are combined by position",
                fix="add the missing values, or move a field to `factors`, which makes a grid",
            )
        if not group.keys() - {"labels"}:
            raise self._wrong("zip", group, "at least one field beside `labels`")
        labels = [value_text(_word(label)) for label in group.get("labels", ())]
        self._only_once("zip: labels", labels)
        return tuple(labels)

    def _group(self, group: Mapping[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
        columns = ((field, column) for field, column in group.items() if field != "labels")
        return {field: tuple(self._typed(f"zip: {field}", field, c)) for field, c in columns}

    def _arms(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        self._only_once("arms", (_name(str(name)) for name in self.values.get("arms", {})))
        for name, settings in self.values.get("arms", {}).items():
            at = f"`arms: {name}` of {self.where}"
            if isinstance(settings, Mapping):
                values = read_values(settings, self.folder, at)
            else:
                self._only_once(f"arms: {name}", _fields_of(settings or ()))
                values = read_overrides(settings or (), self.folder, at)
            found[_name(str(name))] = values
        return found

    def _seeds(self) -> dict[str, tuple[int, ...]]:
        found = self.values.get("seeds")
        if found is None:
            return {}
        seeds = tuple(range(1, found + 1)) if isinstance(found, int) else tuple(found)
        self._only_once("seeds", seeds, "remove it: the same seed again is the same run")
        return {"seeds": seeds}

    def _each_field_once(self, found: Mapping[str, Any]) -> None:
        """Refuse a field that is varied in several places."""
        varied = [("factors", found["factors"]), *(("zip", group) for group in found["zipped"])]
        varied.append(("arms", {field: 0 for arm in found["arms"].values() for field in arm}))
        places: dict[str, list[str]] = {}
        for place, there in varied:
            for field in there:
                places.setdefault(field, []).append(place)
        for field, (first, *others) in places.items():
            if others:
                raise ConfigurationError(
                    f"`{field}` is in `{first}` and in `{others[0]}` of {self.where}.",
                    expected="each field in one place: else one value would hide the other",
                    fix=f"remove it from one of the two, or move its values to `{others[0]}`",
                )

    # -------------------------------------------------------------- parts

    def _listed(self, key: str) -> list[Any]:
        """Mappings of a key that holds one or a list of them."""
        found = self.values.get(key, [])
        return [found] if isinstance(found, Mapping) and found else [*found]

    def _only_once(
        self, key: str, names: Iterable[Any], fix: str = "remove one of the two"
    ) -> None:
        counts = Counter(map(str, names))
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigurationError(
                f"`{key}` of {self.where} has {', '.join(twice)} twice.",
                expected="each once: else one would hide the other",
                fix=fix,
            )

    def _wrong(self, key: str, found: Any, expected: str) -> ConfigurationError:
        is_ = "missing" if found is None else repr(found)
        return ConfigurationError(
            f"`{key}` of {self.where} is {is_}.", expected=expected, fix=f"correct `{key}`"
        )


_AS_IS = ("limits", "question")


def _name(text: str) -> str:
    """A name for an arm or sweep that is no option, no hidden file, and needs no quotes."""
    return join([clean(part) for part in text.split("+")])


def _word(found: Any) -> str:
    """A name that YAML may have parsed as a number."""
    return found if isinstance(found, str) else value_text(found)


def _fields_of(overrides: Iterable[str]) -> list[str]:
    return [text.partition("=")[0].strip() for text in overrides]


def _flat(rule: Mapping[Any, Any]) -> dict[str, Any]:
    """Dotted field -> value, with nested mappings flattened."""
    return dict(leaves("", {str(k): v for k, v in rule.items()}))


def shipped_sweeps() -> dict[str, Path]:
    """Names and files of the shipped sweeps."""
    return shipped_files("sweeps")


def load_sweep(name_or_path: str) -> SweepFile:
    """Load a shipped sweep (by name) or a YAML file.

    Raises
    ------
    ConfigurationError
        There is no such sweep, or its form is wrong; the message has what was expected.
    """
    is_recipe = name_or_path in shipped_recipes()
    hint = " That is a recipe; `refiner run` carries it out." if is_recipe else ""
    path = find_file(name_or_path, "sweep", shipped_sweeps(), hint=hint).absolute()
    with readable(f"Sweep {path}"):
        text = path.read_text(encoding="utf-8")
    return parse_sweep(text, path.stem, str(path))


def parse_sweep(source: str | Mapping[str, Any], name: str = "", origin: str = "") -> SweepFile:
    """A sweep from its text, or from the parsed YAML.

    Parameters
    ----------
    name
        Its name if the text has none.
    origin
        The file's path: the base of relative paths.

    Raises
    ------
    ConfigurationError
        Names the key, its value, and what was expected.
    """
    text = source if isinstance(source, str) else ""
    where = f"sweep {Path(origin).name if origin else name or 'file'}"
    if isinstance(source, str):
        source = yaml_fields(source, f"The text of {where}", "recipe: tiny", resolve=False)
    return SweepFile(**_Reader(source, where, origin).read(name), text=text, origin=origin)
