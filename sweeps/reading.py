"""The keys of a sweep file, one by one: what YAML made of them becomes typed values, or is refused.

In: the mapping that a file holds. Out: a :class:`~sweeps.values.SweepFile`; see
:mod:`sweeps.definition` for the form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.loading import leaves
from refiner_core.contract.overrides import (
    read_overrides,
    read_values,
    whole_paths,
    written_overrides,
)
from refiner_core.contract.recipes.recipe_files import shipped_recipes
from sweeps.labels import LABEL, NAME, bad_name, value_text
from sweeps.values import Limits, Question, SweepFile

KEYS = (
    "name",
    "recipe",
    "overrides",
    "factors",
    "zip",
    "arms",
    "exclude",
    "baseline",
    "seeds",
    "limits",
    "question",
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
        _known_keys(self.values, KEYS, "", self.where)
        if not self.values.get("recipe"):
            raise self._wrong("recipe", self.values.get("recipe"), "a recipe's name or file")
        factors, labelled = self._factors()
        zipped, zip_labels = self._zips()
        sweep = SweepFile(
            name=self._name(name),
            recipe=self._recipe(),
            overrides=self._overrides(),
            factors=factors,
            labelled=labelled,
            zipped=zipped,
            zip_labels=zip_labels,
            arms=self._arms(),
            exclude=self._exclude(),
            baseline=self._baseline(),
            seeds=self._seeds(),
            limits=self._limits(),
            question=self._question(),
            text=self.text,
            origin=self.origin,
        )
        self._each_field_once(sweep)
        return sweep

    # -------------------------------------------------------------- what it starts from

    def _name(self, name: str) -> str:
        found = self.values.get("name") or name or "unnamed"
        if isinstance(found, int | float) and not isinstance(found, bool):
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
        self._set_once("overrides", texts)
        return texts

    # -------------------------------------------------------------- what is varied

    def _factors(self) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
        found: dict[str, dict[str, Any]] = {}
        labelled = set()
        for field, levels in self._mapping("factors").items():
            values = self._levels(f"factors: {field}", field, levels)
            if isinstance(levels, Mapping):
                labelled.add(field)
                for label in levels:
                    self._label(f"factors: {field}", label)
                found[field] = {value_text(k): v for k, v in zip(levels, values, strict=True)}
            else:
                found[field] = {value_text(v): v for v in values}
            if len(found[field]) < len(values):
                raise self._twice(field, [value_text(v) for v in values])
        return found, frozenset(labelled)

    def _levels(self, key: str, field: str, levels: Any) -> list[Any]:
        if not isinstance(levels, list | tuple | Mapping) or not levels:
            raise self._wrong(
                key, levels, "a list of values, or a mapping of labels to values, not an empty one"
            )
        values = list(levels.values()) if isinstance(levels, Mapping) else list(levels)
        typed = [read_values({field: v}, self.folder, self._at(key))[field] for v in values]
        texts = [repr(value) for value in typed]
        if len(set(texts)) < len(texts):
            raise self._twice(field, texts)
        return typed

    def _zips(self) -> tuple[tuple[dict[str, tuple[Any, ...]], ...], tuple[tuple[str, ...], ...]]:
        groups = self.values.get("zip") or []
        if isinstance(groups, Mapping):
            groups = [groups]
        if not isinstance(groups, list | tuple) or not all(isinstance(g, Mapping) for g in groups):
            raise self._wrong("zip", groups, "a mapping of fields to lists, or a list of such")
        read = [self._zip(group) for group in groups]
        return tuple(g for g, _ in read), tuple(labels for _, labels in read)

    def _zip(self, group: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, ...]], tuple[str, ...]]:
        columns = {str(k): v for k, v in group.items()}
        for field, column in columns.items():
            if not isinstance(column, list | tuple) or not column:
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
        if len(set(map(value_text, labels))) < len(labels):
            raise self._twice("zip: labels", labels)
        values = {
            field: tuple(
                read_values({field: v}, self.folder, self._at(f"zip: {field}"))[field]
                for v in column
            )
            for field, column in columns.items()
        }
        rows = list(zip(*values.values(), strict=True))
        if not rows:
            raise self._wrong("zip", dict(group), "at least one field beside `labels`")
        if len({repr(row) for row in rows}) < len(rows):
            raise self._twice(f"zip: {', '.join(values)}", [repr(row) for row in rows])
        return values, tuple(value_text(label) for label in labels)

    def _arms(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        self._no_truth_values("arms")
        for key, settings in self._mapping("arms").items():
            if not NAME.fullmatch(key):
                raise bad_name(f"The arm {key!r} of {self.where}", key)
            at = f"arms: {key}"
            if isinstance(settings, Mapping):
                found[key] = read_values(settings, self.folder, self._at(at))
            else:
                texts = self._texts(at, settings or [])
                self._set_once(at, texts)
                found[key] = read_overrides(texts, self.folder, self._at(at))
        return found

    def _exclude(self) -> tuple[Mapping[str, Any], ...]:
        found = self.values.get("exclude") or []
        if isinstance(found, Mapping):
            found = [found]
        if not isinstance(found, list | tuple) or not all(
            isinstance(rule, Mapping) and rule for rule in found
        ):
            raise self._wrong("exclude", found, "a list of {field: value or label}")
        return tuple(_flat(rule) for rule in found)

    def _baseline(self) -> str | Mapping[str, Any]:
        found = self.values.get("baseline", "")
        found = "" if found is None else found
        if isinstance(found, Mapping):
            return _flat(found)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return value_text(found)  # an arm may be called 1
        if not isinstance(found, str):
            raise self._wrong("baseline", found, "an arm's name, or {field: value or label}")
        return found

    def _each_field_once(self, sweep: SweepFile) -> None:
        """Whatever varies a field is the only one that does."""
        seen: dict[str, str] = {}
        places = [("factors", set(sweep.factors)), *(("zip", set(g)) for g in sweep.zipped)]
        places.append(("arms", {field for values in sweep.arms.values() for field in values}))
        fixed = {text.partition("=")[0] for text in sweep.overrides}
        for place, fields in places:
            for field in sorted(fields):
                if field in fixed and place != "arms":
                    seen.setdefault(field, "overrides")
                if field in seen:
                    raise ConfigurationError(
                        f"`{field}` stands in `{seen[field]}` and in `{place}` of {self.where}.",
                        expected="each field in one place: else one value would hide the other",
                        fix=f"remove it from one of the two, or move its values to `{place}`",
                    )
                seen[field] = place
                if field == "seed":
                    raise ConfigurationError(
                        f"`{place}` of {self.where} varies `seed`.",
                        expected="run seeds in `seeds`: every arm is tried with each",
                        fix="write `seeds: [1, 2, 3]`",
                    )
        if "seed" in fixed:
            raise ConfigurationError(
                f"`overrides` of {self.where} sets `seed`.",
                expected="run seeds in `seeds`: every arm is tried with each",
                fix="write `seeds: [1, 2, 3]`",
            )

    # -------------------------------------------------------------- how much of it, and what for

    def _seeds(self) -> tuple[int, ...]:
        found = self.values.get("seeds", SEEDS)
        if _is_int(found) and found > MOST:
            raise self._wrong("seeds", found, f"at most {MOST:,}: as many are more than will run")
        if _is_int(found) and found > 0:
            return tuple(range(1, found + 1))
        expected = "a list of whole numbers from 0 up, or how many there are to be"
        if not isinstance(found, list | tuple) or not found:
            raise self._wrong("seeds", found, expected)
        if not all(_is_int(seed) and seed >= 0 for seed in found):
            raise self._wrong("seeds", found, expected)
        if twice := sorted({seed for seed in found if list(found).count(seed) > 1}):
            raise ConfigurationError(
                f"`seeds` of {self.where} lists {', '.join(map(str, twice))} twice.",
                expected="each seed once: the same seed again is the same run, not another one",
                fix="remove the second, or write another seed",
            )
        return tuple(found)

    def _limits(self) -> Limits:
        found = self._mapping("limits")
        _known_keys(
            found, ("concurrency", "gpu_hours", "disk_gb", "judge_calls"), "limits: ", self.where
        )
        for key, value in found.items():
            whole = key in ("concurrency", "judge_calls")
            right = _is_int(value) or (isinstance(value, float) and not whole and value < 1e308)
            if value is not None and not (right and value >= (1 if key == "concurrency" else 0)):
                expected = "a whole number" if whole else "a number"
                least = "above zero" if key == "concurrency" else "from zero up"
                raise self._wrong(f"limits: {key}", value, f"{expected} {least}, or null")
        return Limits(**found)

    def _question(self) -> Question:
        found = self.values.get("question") or {}
        if isinstance(found, str):
            return Question(text=found)
        found = self._mapping("question")
        texts = ("text", "metric", "decoding", "protocol", "model")
        _known_keys(found, (*texts, "smallest_effect"), "question: ", self.where)
        for key, value in found.items():
            if key in texts and not isinstance(value, str):
                raise self._wrong(f"question: {key}", value, "text")
        effect = found.get("smallest_effect")
        if effect is not None and not (
            isinstance(effect, int | float) and not isinstance(effect, bool) and 0 < effect < 1e308
        ):
            raise self._wrong("question: smallest_effect", effect, "a number above zero")
        return Question(**found)

    # -------------------------------------------------------------- refusals

    def _mapping(self, key: str) -> dict[str, Any]:
        found = self.values.get(key) or {}
        if not isinstance(found, Mapping):
            raise self._wrong(key, found, "a mapping")
        return {str(k): v for k, v in found.items()}

    def _texts(self, key: str, found: Any) -> Sequence[str]:
        if not isinstance(found, list | tuple) or not all(isinstance(t, str) for t in found):
            raise self._wrong(key, found, "a list of `key=value`, or a mapping of fields")
        return found

    def _set_once(self, key: str, texts: Sequence[str]) -> None:
        """Of two values for one field, one would hide the other."""
        fields = [text.partition("=")[0].strip() for text in texts]
        if twice := sorted({field for field in fields if fields.count(field) > 1}):
            raise ConfigurationError(
                f"`{key}` of {self.where} sets `{twice[0]}` twice.",
                expected="each field once: else one value would hide the other",
                fix="remove one of the two",
            )

    def _no_truth_values(self, key: str) -> None:
        """YAML reads ``on``, ``off``, ``yes`` and ``no`` as true and false: nobody's names."""
        found = self.values.get(key)
        if isinstance(found, Mapping) and any(isinstance(name, bool) for name in found):
            raise ConfigurationError(
                f"A name in `{key}` of {self.where} is true or false to YAML, as on, off, yes and "
                "no are.",
                expected="names that are text",
                fix='put it in quotes: "on"',
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

    def _twice(self, field: str, levels: Iterable[Any]) -> ConfigurationError:
        names = [str(level) for level in levels]
        twice = sorted({n for n in names if names.count(n) > 1})
        return ConfigurationError(
            f"Two levels of `{field}` of {self.where} are both called {', '.join(twice)}.",
            expected="levels that differ, and whose names differ",
            fix="remove one, or give them labels: {first: VALUE, second: VALUE}",
        )


def _flat(rule: Mapping[Any, Any]) -> dict[str, Any]:
    """Dotted field -> value, nested mappings opened."""
    return dict(leaves("", {str(k): v for k, v in rule.items()}))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _known_keys(found: Mapping[str, Any], known: Sequence[str], at: str, where: str) -> None:
    for key in found:
        if key not in known:
            hint = "" if at else _belongs_elsewhere(str(key))
            raise ConfigurationError(
                f"There is no key `{at}{key}` in {where}.{hint or suggest(str(key), known)}",
                expected=f"some of: {', '.join(known)}",
                fix="correct the key",
            )


def _belongs_elsewhere(key: str) -> str:
    """Where a key of a recipe belongs in a sweep file."""
    from refiner_core.contract.config import RecipeConfig
    from refiner_core.contract.marks import walk

    known = {part for path, _ in walk(RecipeConfig) for part in (path, path.split(".")[0])}
    return " It is a field of the recipe: write it below `overrides:`." if key in known else ""
