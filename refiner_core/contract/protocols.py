"""Protocol files as values: what one fixes, and a configuration under one.

In: the JSON text that a configuration holds for each of its ``evaluate.protocols``, and the
configuration. Out: the configuration under which a model is measured. Pure, and cheap enough for
thousands of trials; files are read by :mod:`refiner_core.contract.recipes`.

A protocol names fields of the recipe that are a matter of measuring (:data:`FIELDS`). Each of the
sections ``evaluate``, ``reward`` and ``judge`` that it names at all is fixed *whole*: an identity
field that it leaves out has refiner's default, not the recipe's. Else an arm of a sweep that
changes, say, the form of its judge's questions would change the yardstick with it. ``data`` is
another set to evaluate on, all of whose prompts are held out; of ``grpo`` only what is named is
fixed. An agent's user (``evaluate.user``) is fixed whole where a field of it is named, and else the
recipe's. Sections that it does not name are the recipe's, and so is where to ask a judge that is
the recipe's own model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from refiner_core.contract.config import (
    DataConfig,
    EvaluateConfig,
    JudgeConfig,
    RecipeConfig,
    UserConfig,
)
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.fields import nested, replace_fields, suggest
from refiner_core.contract.fingerprint import canonical_json, digest, get_field
from refiner_core.contract.marks import walk

#: Stands between the name of a stage (or of a source) and that of its protocol.
AT = "@"
#: How long a file's fingerprint is, hex digits.
_DIGITS = 12
#: Fields that count by what lies where they point, and under which source.
_BY_SOURCE = {
    "reward.static_rubrics": "rubrics",
    "judge.prompt": "judge_prompt",
    "data.rl_path": "data.rl",
}
_VERSION = 1
_NAME = re.compile(r"[a-z][a-z0-9]*([._-][a-z0-9]+)*")
_LONGEST_NAME = 48
_OF_DATA = (
    *("rl_path", "rl_split", "rl_revision", "refiner_mode", "max_rl_rows"),
    *("max_prompt_token_length", "split_seed", "synthetic_rl_rows", "synthetic_seed"),
)
_OF_EVALUATE = (
    *("decoding", "max_prompts", "num_samples", "temperature", "top_p", "top_k"),
    *("bootstrap_samples", "seed", "batch_size", "fresh_reference"),
)
_WHOLE = ("reward", "judge")
_USER = "evaluate.user."
_KINDS = dict(walk(RecipeConfig))
#: Fields that a protocol may fix, in the order of the recipe's.
FIELDS: tuple[str, ...] = tuple(
    path
    for path in _KINDS
    if path.partition(".")[0] in _WHOLE
    or path in {f"evaluate.{name}" for name in _OF_EVALUATE}
    or path.startswith(_USER)
    or path in {f"data.{name}" for name in _OF_DATA}
    or path in ("grpo.response_length", "grpo.stop_strings")
)
SECTIONS = tuple(dict.fromkeys(path.partition(".")[0] for path in FIELDS))
#: Where a judge is asked; one of them said in the file stands for all of them.
_WHERE = ("base_url", "base_urls", "serve_command", "serve", "resources")


@dataclass(frozen=True)
class ProtocolFile:
    """What a protocol file says.

    Attributes
    ----------
    name
        What stages, tables and cards call it; no part of the fingerprint.
    fields
        What it fixes, by dotted path, typed as in the configuration.
    text
        The same as JSON, as ``evaluate.protocols`` has it.
    """

    name: str
    fields: Mapping[str, Any]
    text: str

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections that it names."""
        return tuple(s for s in SECTIONS if any(p.startswith(f"{s}.") for p in self.fields))

    @functools.cached_property
    def fixed(self) -> tuple[str, ...]:
        """Identity fields that it fixes, named or not: two arms that differ in these alone are
        measured alike."""
        whole = (*_WHOLE, "evaluate", "data")
        return tuple(
            path
            for path in FIELDS
            if _KINDS[path].mark == "identity"
            and (
                path in self.fields
                or (path.partition(".")[0] in self.sections and path.partition(".")[0] in whole)
            )
            and (self.names_user or not path.startswith(_USER))
        )

    @functools.cached_property
    def names_user(self) -> bool:
        """Say whether it fixes with whom an agent talks."""
        return any(path.startswith(_USER) for path in self.fields)

    @functools.cached_property
    def _template(self) -> RecipeConfig:
        return replace_fields(RecipeConfig(), self.fields)

    def values(self) -> dict[str, Any]:
        """Give what it fixes in effect: identity fields, JSON-ready."""
        found = {path: get_field(self._template, path) for path in self.fixed}
        return {p: list(v) if isinstance(v, tuple) else v for p, v in found.items()}

    def over(self, config: RecipeConfig) -> RecipeConfig:
        """``config`` as it measures under this protocol: it does nothing else, and names no
        protocols itself."""
        fixed, named = self._template, self.sections
        evaluate = config.evaluate
        if "evaluate" in named:
            evaluate = _evaluate(evaluate, fixed.evaluate, self.fields)
        changes: dict[str, Any] = {
            "stages": ("data", "evaluate"),
            "evaluate": replace(evaluate, protocols=()),
        }
        if "reward" in named:
            changes["reward"] = fixed.reward
        if "judge" in named:
            changes["judge"] = _judge(config.judge, fixed.judge, self.fields)
        if "data" in named:
            changes["data"] = _data(config.data, fixed.data, self.fields)
        if "grpo" in named:
            own = {p.partition(".")[2]: v for p, v in self.fields.items() if p.startswith("grpo.")}
            changes["grpo"] = replace(config.grpo, **own)
        return replace(config, **changes)


@functools.lru_cache(maxsize=256)
def parse_protocol(text: str) -> ProtocolFile:
    """The protocol that a configuration holds as JSON.

    Raises
    ------
    ConfigurationError
        It is none, or names what is no field, or none of measuring.
    """
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"`evaluate.protocols` has {text!r:.80}, which is no protocol that was read.",
            expected="the name of a shipped protocol (`refiner list protocols`) or a YAML file, "
            "given in a recipe or on the command line, where it is read",
            fix="name it there",
        )
    return protocol_of(values)


def protocol_of(values: Mapping[str, Any], origin: str = "") -> ProtocolFile:
    """The protocol that a mapping says, as it stands in a file; errors as of
    :func:`parse_protocol`.

    Parameters
    ----------
    origin
        The file, for messages.
    """
    sections = {k: v for k, v in values.items() if k not in ("name", "description")}
    where = f" in {origin}" if origin else ""
    name = values.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ConfigurationError(
            f"A protocol{where} has the name {name!r}.",
            expected=f"`name:` with small letters, digits and single `-`, `_` or `.` between them, "
            f"a letter first, at most {_LONGEST_NAME} characters: stages are named after it",
            fix="write e.g. `name: held-out-mine-v1`",
        )
    found = dict(_leaves("", sections))
    for path, value in found.items():
        _check_field(path, value, name, where)
    if not found:
        raise ConfigurationError(
            f"Protocol {name}{where} fixes nothing.",
            expected=f"at least one field of {', '.join(SECTIONS)}",
            fix="see `refiner protocols show held-out-greedy-v1` for the form",
        )
    if any(p.startswith("data.") for p in found) and not found.get("data.rl_path"):
        raise ConfigurationError(
            f"Protocol {name}{where} has a `data` section without data.rl_path.",
            expected="the set to evaluate on: all of its prompts are held out",
            fix="name it, or drop the section to evaluate on the recipe's held-out prompts",
        )
    with refused_under(name):
        typed = replace_fields(RecipeConfig(), found)
    kept = {path: get_field(typed, path) for path in _KINDS if path in found}
    return ProtocolFile(name, kept, protocol_text(name, kept))


def protocols_of(config: RecipeConfig) -> dict[str, ProtocolFile]:
    """A configuration's protocol files by name, in order.

    Raises
    ------
    ConfigurationError
        Two have one name; or as of :func:`parse_protocol`.
    """
    found: dict[str, ProtocolFile] = {}
    for text in config.evaluate.protocols:
        protocol = parse_protocol(text)
        if protocol.name in found:
            raise ConfigurationError(
                f"`evaluate.protocols` names {protocol.name} twice.",
                expected="each protocol once, and names of their own for those that differ",
                fix="drop one of them, or change `name:` in one of the files",
            )
        found[protocol.name] = protocol
    return found


def configs_under(config: RecipeConfig) -> dict[str, RecipeConfig]:
    """The configuration under each of its protocol files, by name."""
    return {name: protocol.over(config) for name, protocol in protocols_of(config).items()}


@contextlib.contextmanager
def refused_under(name: str) -> Iterator[None]:
    """Name the protocol in what is refused within."""
    try:
        yield
    except RefinerError as error:
        error.what = f"Under protocol {name}: {error.what}"
        error.fix = f"{error.fix}, in the protocol's file" if error.fix else ""
        error.args = (error.paragraph(),)
        raise


def protocol_fingerprint(protocol: ProtocolFile, sources: Mapping[str, str]) -> str:
    """Twelve hex digits over what a file fixes in effect.

    Its name, the text's form, where a judge is served and where files lie have no part in it.
    Numbers have a fingerprint of their own, which also covers what the file leaves to the recipe
    and the prompts themselves (:mod:`refiner_core.evaluation.protocol`).

    Parameters
    ----------
    sources
        Digests of the rubric set, the judge's prompts and the data that it names
        (:func:`flows.checking.sources.protocol_sources`).
    """
    values: dict[str, Any] = {}
    for path, value in protocol.values().items():
        if path in _BY_SOURCE:
            if _BY_SOURCE[path] in sources:  # else nothing reads it
                values[path] = sources[_BY_SOURCE[path]]
        elif value != _KINDS[path].legacy_value:
            values[path] = value
    return digest({"version": _VERSION, "fixed": values})[:_DIGITS]


# ---------------------------------------------------------------- names of stages and sources


def under(name: str, protocol: str) -> str:
    """``evaluate-sft@held-out-v1``: a stage (or a source) under a protocol; as it is under none."""
    return f"{name}{AT}{protocol}" if protocol else name


def protocol_name(stage_name: str) -> str:
    """The protocol file that a stage's name names; empty for the recipe's own."""
    return stage_name.partition(AT)[2]


def without_protocol(stage_name: str) -> str:
    """A stage's name (or a role) without its protocol."""
    return stage_name.partition(AT)[0]


# ---------------------------------------------------------------- parts


def _leaves(prefix: str, values: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(values, Mapping) or prefix in _KINDS:
        yield prefix, values
        return
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if value is None and path not in _KINDS:
            continue  # a section whose fields are all commented out
        yield from _leaves(path, value)


def _check_field(path: str, value: Any, name: str, where: str) -> None:
    if path in FIELDS:
        return
    if path in _KINDS:
        raise ConfigurationError(
            f"Protocol {name}{where} fixes `{path}`, which is no matter of measuring.",
            expected=f"fields of {', '.join(SECTIONS)} that say how a model is measured "
            "(`refiner protocols fields` lists them)",
            fix="leave it to the recipe",
        )
    leaf = path.rpartition(".")[2]
    near = suggest(path, FIELDS) or suggest(leaf, [p.rpartition(".")[2] for p in FIELDS])
    raise ConfigurationError(
        f"Protocol {name}{where} has {path!r}, which is no field.{near}",
        expected="`name`, `description`, and fields of the recipe under their sections "
        "(`refiner protocols fields` lists them)",
        fix="correct the key",
    )


def protocol_text(name: str, kept: Mapping[str, Any]) -> str:
    """A protocol as ``evaluate.protocols`` has it: canonical JSON, sections nested. A dollar before
    a brace is escaped, so that no reader of recipes takes it for an interpolation.

    Parameters
    ----------
    kept
        Fields by dotted path.
    """
    plain = {p: list(v) if isinstance(v, tuple) else v for p, v in kept.items()}
    return canonical_json({"name": name, **nested(plain)}).replace("${", "\\u0024{")


def _evaluate(
    mine: EvaluateConfig, fixed: EvaluateConfig, named: Mapping[str, Any]
) -> EvaluateConfig:
    measuring = {name: getattr(fixed, name) for name in _OF_EVALUATE}
    if "evaluate.fresh_reference" not in named:
        measuring["fresh_reference"] = mine.fresh_reference
    if any(path.startswith(_USER) for path in named):
        where = {
            f.name: getattr(mine.user, f.name)
            for f in fields(UserConfig)
            if f"{_USER}{f.name}" not in named and _is_execution(f"{_USER}{f.name}")
        }
        measuring["user"] = replace(fixed.user, **where)
    return replace(mine, **measuring)


def _judge(mine: JudgeConfig, fixed: JudgeConfig, named: Mapping[str, Any]) -> JudgeConfig:
    """The protocol's judge; where it is the recipe's own model, it is asked where that is, and
    as patiently."""
    if (mine.kind, mine.model, mine.revision) != (fixed.kind, fixed.model, fixed.revision):
        return fixed
    said = {path.split(".")[1] for path in named if path.startswith("judge.")}
    if said.intersection(_WHERE):
        said.update(_WHERE)
    kept = {
        f.name: getattr(mine, f.name)
        for f in fields(JudgeConfig)
        if f.name not in said and (f.name in _WHERE or _is_execution(f"judge.{f.name}"))
    }
    return replace(fixed, **kept)


def _is_execution(path: str) -> bool:
    return path in _KINDS and _KINDS[path].mark == "execution"


def _data(mine: DataConfig, fixed: DataConfig, named: Mapping[str, Any]) -> DataConfig:
    """Another set, all of it held out; nothing of the recipe's own rows has a part in it."""
    longest = mine.max_prompt_token_length
    if "data.max_prompt_token_length" in named:
        longest = fixed.max_prompt_token_length
    own = {name: getattr(fixed, name) for name in _OF_DATA}
    own |= {"max_prompt_token_length": longest, "resources": mine.resources}
    return DataConfig(sft_path=None, all_held_out=True, **own)
