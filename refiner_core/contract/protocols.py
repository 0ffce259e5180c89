"""Protocol files as values: the fields that one fixes, and a configuration under one.

In: the JSON text that a configuration holds for each of its ``evaluate.protocols``, and the
configuration. Out: the configuration under which a model is measured. Pure, and cheap enough for
thousands of trials; files are read by :mod:`refiner_core.contract.recipes`.

A protocol names fields of the recipe that concern measuring (:data:`FIELDS`). Each of the sections
``evaluate``, ``reward`` and ``judge`` that it names at all is fixed *whole*: an identity field that
it leaves out has refiner's default, not the recipe's. Otherwise an arm of a sweep that changes,
say, the form of its judge's questions would change the yardstick with it. ``data`` is another set
to evaluate on, with all of its prompts held out; of ``grpo`` only named fields are fixed. An
agent's user (``evaluate.user``) is fixed whole if a field of it is named, and is else the recipe's.
Sections that it does not name are the recipe's, and so are the address of a judge that is the
recipe's own model, and the sampling backend, by which the numbers' own fingerprint differs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
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

#: Separates the name of a stage (or of a source) from that of its protocol.
AT = "@"
#: Hex digits of a file's fingerprint.
_DIGITS = 12
#: Fields that count by the content of their target, with its source.
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
#: Fields that name protocol files; a configuration holds their contents.
PROTOCOL_FIELDS = ("evaluate.protocols", "monitor.gold")
#: Fields that a protocol may fix, in the recipe's order.
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
#: Fields for the address of a judge; one of them in the file replaces all of them.
_WHERE = ("base_url", "base_urls", "serve_command", "serve", "resources")


@dataclass(frozen=True)
class ProtocolFile:
    """The content of a protocol file.

    Attributes
    ----------
    name
        Its name in stages, tables and cards; not part of the fingerprint.
    fields
        The fixed values, by dotted path, typed as in the configuration.
    text
        The same as JSON, as in ``evaluate.protocols``.
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
        """Identity fields that it fixes, named or not: arms that differ only in these are measured
        alike."""
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
        """Tell whether it fixes an agent's user."""
        return any(path.startswith(_USER) for path in self.fields)

    @functools.cached_property
    def _template(self) -> RecipeConfig:
        return replace_fields(RecipeConfig(), self.fields)

    def values(self) -> dict[str, Any]:
        """The fixed values in effect: identity fields, JSON-ready."""
        found = {path: get_field(self._template, path) for path in self.fixed}
        return {p: list(v) if isinstance(v, tuple) else v for p, v in found.items()}

    def over(self, config: RecipeConfig) -> RecipeConfig:
        """``config`` as it measures under this protocol: with no other stages, and without
        protocols of its own."""
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
    """The protocol in a configuration's JSON.

    Raises
    ------
    ConfigurationError
        It is not a protocol, or names an unknown field, or one that does not concern measuring.
    """
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{text!r:.80} is not a protocol that was read.",
            expected="the name of a shipped protocol (`refiner list protocols`) or a YAML file, "
            "given in a recipe or on the command line, where it is read",
            fix="name it there",
        )
    return protocol_of(values)


def protocol_of(values: Mapping[str, Any], origin: str = "") -> ProtocolFile:
    """The protocol in a mapping from a file; errors as in
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
        Two have the same name; or as in :func:`parse_protocol`.
    """
    return _named("evaluate.protocols", config.evaluate.protocols)


def gold_protocols(config: RecipeConfig) -> dict[str, ProtocolFile]:
    """The protocol files of the monitor by name, in order; none if it is off. Errors as in
    :func:`protocols_of`."""
    on = config.monitor.every and "grpo" in config.stages
    return _named("monitor.gold", config.monitor.gold) if on else {}


def _named(field: str, texts: Sequence[str]) -> dict[str, ProtocolFile]:
    found: dict[str, ProtocolFile] = {}
    for text in texts:
        protocol = parse_protocol(text)
        if protocol.name in found:
            raise ConfigurationError(
                f"`{field}` names {protocol.name} twice.",
                expected="each protocol once, and names of their own for those that differ",
                fix="drop one of them, or change `name:` in one of the files",
            )
        found[protocol.name] = protocol
    return found


def configs_under(config: RecipeConfig) -> dict[str, RecipeConfig]:
    """The configuration under each of its protocol files, by name."""
    return {name: protocol.over(config) for name, protocol in protocols_of(config).items()}


def golds_under(config: RecipeConfig) -> dict[str, RecipeConfig]:
    """The configuration under each protocol file of the monitor, by name."""
    return {name: protocol.over(config) for name, protocol in gold_protocols(config).items()}


def all_under(config: RecipeConfig) -> dict[str, RecipeConfig]:
    """Both, by name. A file in both fields is one."""
    return golds_under(config) | configs_under(config)


@contextlib.contextmanager
def refused_under(name: str) -> Iterator[None]:
    """Add the protocol's name to errors of the block."""
    try:
        yield
    except RefinerError as error:
        error.what = f"Under protocol {name}: {error.what}"
        error.fix = f"{error.fix}, in the protocol's file" if error.fix else ""
        error.args = (error.paragraph(),)
        raise


def protocol_fingerprint(protocol: ProtocolFile, sources: Mapping[str, str]) -> str:
    """Twelve hex digits over the fixed values in effect.

    Its name, the text's form, the address of a judge and the place of files have no effect.
    Numbers have a fingerprint of their own, which also covers the recipe's part and the prompts
    themselves (:mod:`refiner_core.evaluation.protocol`).

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
    """``evaluate-sft@held-out-v1``: a stage (or a source) under a protocol; unchanged without."""
    return f"{name}{AT}{protocol}" if protocol else name


def protocol_name(stage_name: str) -> str:
    """The protocol in a stage's name; empty for the recipe's own."""
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
            continue  # a section with all fields commented out
        yield from _leaves(path, value)


def _check_field(path: str, value: Any, name: str, where: str) -> None:
    if path in FIELDS:
        return
    if path in _KINDS:
        raise ConfigurationError(
            f"Protocol {name}{where} fixes `{path}`, which does not concern measuring.",
            expected=f"fields of {', '.join(SECTIONS)} that define how a model is measured "
            "(`refiner protocols fields` lists them)",
            fix="leave it to the recipe",
        )
    leaf = path.rpartition(".")[2]
    near = suggest(path, FIELDS) or suggest(leaf, [p.rpartition(".")[2] for p in FIELDS])
    raise ConfigurationError(
        f"Protocol {name}{where} has {path!r}, which is not a field.{near}",
        expected="`name`, `description`, and fields of the recipe under their sections "
        "(`refiner protocols fields` lists them)",
        fix="correct the key",
    )


def protocol_text(name: str, kept: Mapping[str, Any]) -> str:
    """A protocol in the form of ``evaluate.protocols``: canonical JSON, sections nested. A dollar
    before a brace is escaped, so that no reader of recipes treats it as an interpolation.

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
    """The protocol's judge; if it is the recipe's own model, with the recipe's address and
    patience."""
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
    """Another set, all of it held out; the recipe's own rows are not used."""
    longest = mine.max_prompt_token_length
    if "data.max_prompt_token_length" in named:
        longest = fixed.max_prompt_token_length
    own = {name: getattr(fixed, name) for name in _OF_DATA}
    own |= {"max_prompt_token_length": longest, "resources": mine.resources}
    return DataConfig(sft_path=None, all_held_out=True, **own)
