"""A run said again for others: its overrides without where it ran, or all of it as a recipe.

In: overrides and a configuration. Out: overrides for a command on a card, or the text of a
``recipe.yaml``. What decides what is computed is kept, and little else; names of local files lose
their folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml

from refiner_core.cards.facts import public_name
from refiner_core.cards.public import SHOWN_EXECUTION, public_body, public_protocol, public_text
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import FieldInfo, walk
from refiner_core.contract.protocols import parse_protocol
from refiner_core.contract.recipes.protocol_files import load_protocol, shipped_protocols
from refiner_core.contract.services import asks_judge

#: Where somebody's checkpoints went: nobody else can, or should, publish there.
_SOMEBODYS = frozenset(
    f"publish.{name}"
    for name in ("target", "path", "repo_id", "private", "per_step", "card_template")
)
_WHICH_STEPS = frozenset({"publish.which", "publish.steps"})
#: Execution settings without which a run would have other stages or save other steps, or another
#: trainer would not be understood.
_NEEDED = frozenset(
    {
        *SHOWN_EXECUTION,
        *("stages", "sft.save_freq", "command.resume_arguments", "command.checkpoints"),
        *("command.step_pattern", "command.complete", "command.progress_pattern"),
    }
)
#: Texts that only look like paths: never shortened.
_NO_PATHS = frozenset({"grpo.stop_strings", "model.chat_template"})
#: Text that every reader of YAML takes for text, and what among it is none.
_WORD = re.compile(r"[A-Za-z_][\w./-]*")
_NO_TEXT = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null", "none"})
#: What protocol files say stands in a recipe for others: those may not have the files.
_PROTOCOLS = "evaluate.protocols"
#: What goes to a judge's server beside the question; services put keys there.
_BODY = "judge.extra_body"
#: In the place of a judge's address, which is nobody else's.
_ANY_JUDGE = "http://127.0.0.1:8000/v1"
_HEADER = """\
# The configuration of this checkpoint's run, as far as it decides what is computed; all else has
# refiner's defaults. Names of files without folders stand for those that the run read.
"""


def said_again(
    overrides: Sequence[str], config: RecipeConfig, base: RecipeConfig
) -> tuple[str, ...]:
    """The overrides of a call, without those that only say where it ran or where it published.

    Parameters
    ----------
    config, base
        The configuration in effect, and that of the recipe without any overrides.
    """
    fields, words = dict(walk(RecipeConfig)), list[str]()
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key == _PROTOCOLS:
            words.append(f"{key}={_flow([_named_protocol(t) for t in config.evaluate.protocols])}")
            continue
        if key == _BODY:
            words.append(f"{key}={public_body(config.judge.extra_body)}")
            continue
        if key in fields:
            words += [text] if _is_said(key, fields[key], config) else []
            continue
        for path, info in walk(RecipeConfig):  # a whole section at once
            value = get_field(config, path)
            changed = path.startswith(f"{key}.") and value != get_field(base, path)
            if changed and _is_said(path, info, config):
                words.append(f"{path}={_flow(value)}")
    return tuple(dict.fromkeys(words))


def recipe_text(config: RecipeConfig) -> str:
    """A recipe that says all that decides what is computed; the same configuration gives the same
    text."""
    values: dict[str, Any] = {"recipe": config.recipe}
    if config.description.strip():
        values["description"] = public_text(config.description.strip())
    for path, info in walk(RecipeConfig):
        value = get_field(config, path)
        if path == "stages" or (value != info.default and _is_said(path, info, config)):
            _put(values, path, _public(path, value))
    if config.judge.kind == "openai" and asks_judge(config):
        _put(values, "judge.base_url", _ANY_JUDGE)
    return _HEADER + yaml.dump(
        _escaped(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )


def stands_for(path: str, said: Any, meant: Any) -> bool:
    """Whether a value on a card is the public name of the recorded one."""
    if path == _PROTOCOLS:
        return [public_protocol(text) for text in said] == [public_protocol(t) for t in meant]
    return bool(said == _public(path, meant) or said == _worded(path, meant))


def _is_said(path: str, info: FieldInfo, config: RecipeConfig) -> bool:
    if path in _SOMEBODYS or (config.publish.which == "listed" and path in _WHICH_STEPS):
        return False
    return info.mark == "identity" or path in _NEEDED


def _public(path: str, value: Any) -> Any:
    """A value as a recipe for others has it."""
    if path == _PROTOCOLS:
        return tuple(_protocol(text) for text in value)
    if isinstance(value, tuple):
        return tuple(_public(path, v) for v in value)
    if not isinstance(value, str) or path in _NO_PATHS:
        return value
    if path == _BODY:
        return public_body(value)
    return public_text(value if path.startswith("command.") else _named(path, value))


def _named_protocol(text: str) -> str | dict[str, Any]:
    """A shipped protocol by its name; what any other says, which nobody else has."""
    name = parse_protocol(text).name
    shipped = name in shipped_protocols() and load_protocol(name).text == text
    return name if shipped else _protocol(text)


def _protocol(text: str) -> dict[str, Any]:
    """A protocol file as a recipe for others says it in its own place."""
    said: dict[str, Any] = json.loads(public_protocol(text))
    if said.get("judge", {}).get("kind") == "openai":
        said["judge"]["base_url"] = _ANY_JUDGE
    return said


def _worded(path: str, value: Any) -> Any:
    """A value as a command for others has it."""
    if isinstance(value, tuple):
        return tuple(_worded(path, v) for v in value)
    if not isinstance(value, str) or path in _NO_PATHS:
        return value
    return public_body(value) if path == _BODY else _named(path, value)


def _named(path: str, value: str) -> str:
    """The public name; a folder of prompts keeps looking like one, and not like a version."""
    name = public_name(value)
    return f"./{name}" if path == "judge.prompt" and "/" in value else name


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[name] = value


def _flow(value: Any) -> str:
    """A value as an override has it."""
    text = yaml.dump(
        _escaped(value), Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9
    )
    return text.removesuffix("\n").removesuffix("\n...")


class _Text(str):
    """Text that may look like something else to a reader of YAML, and so is quoted."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    """Plain YAML."""

    def ignore_aliases(self, data: Any) -> bool:
        """Whether a value that occurs twice is written twice."""
        return True


_Dumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def _escaped(value: Any) -> Any:
    """Ready for YAML: lists for tuples, texts quoted, ``${`` as OmegaConf wants it."""
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_escaped(v) for v in value]
    if not isinstance(value, str) or (_WORD.fullmatch(value) and value.lower() not in _NO_TEXT):
        return value
    return _Text(value.replace("${", "\\${"))
