"""The command on a card, checked by planning it before the card is accepted.

In: the call of a checkpoint, its configuration, the record of the stage that trained it. Out
(:func:`reproduce`): a command for other users, and, unless the recipe is shipped and unedited, the
text of a ``recipe.yaml`` beside the card. It keeps the identity settings, and few others.

The check follows the command line: :func:`load_recipe`, :func:`check_config`, :func:`make_plan`.
Names of local files lose their folders on a card; in the check such a name stands for the run's
file, whose digest is in its record.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flows.checking.sources import resolve_sources
from infra.orchestrator.observe import differences
from infra.store.checkpoints import hash_of
from refiner_core.cards.facts import public_name
from refiner_core.cards.public import (
    SHOWN_EXECUTION,
    public_body,
    public_command,
    public_protocol,
    public_text,
)
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError, StageFailed
from refiner_core.contract.fields import nested, replace_fields
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.marks import FieldInfo, walk
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import HUB_DIGEST
from refiner_core.contract.protocols import parse_protocol
from refiner_core.contract.recipes import load_protocol, shipped_protocols, shipped_recipes
from refiner_core.contract.records import StageSpec
from refiner_core.contract.services import asks_judge
from refiner_core.judges.prompting import prompt_versions
from refiner_core.rubrics import shipped_rubric_sets

#: The target of the publication: other users cannot publish there.
_SOMEBODYS = frozenset(
    f"publish.{name}"
    for name in ("target", "path", "repo_id", "private", "per_step", "card_template")
)
_WHICH_STEPS = frozenset({"publish.which", "publish.steps"})
#: Execution settings that decide which stages run and which steps are saved, or that a foreign
#: trainer needs.
_NEEDED = frozenset(
    {
        *SHOWN_EXECUTION,
        *("stages", "sft.save_freq", "command.resume_arguments", "command.checkpoints"),
        *("command.step_pattern", "command.complete", "command.progress_pattern"),
    }
)
#: Texts that only look like paths: never shortened.
_NO_PATHS = frozenset({"grpo.stop_strings", "model.chat_template"})
#: Text that every YAML reader parses as text, and its exceptions.
_WORD = re.compile(r"[A-Za-z_][\w./-]*")
_NO_TEXT = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null", "none"})
#: The content of protocol files is inlined for other users, who may not have the files.
_PROTOCOLS = "evaluate.protocols"
#: Extra fields of requests to a judge's server; services put keys there.
_BODY = "judge.extra_body"
#: Replaces a judge's address, which is private.
_ANY_JUDGE = "http://127.0.0.1:8000/v1"
_HEADER = """\
# The configuration of this checkpoint's run, as far as it decides what is computed; all else has
# refiner's defaults. Names of files without folders stand for those that the run read.
"""


def restated(overrides: Sequence[str], config: RecipeConfig, base: RecipeConfig) -> tuple[str, ...]:
    """Overrides of a call, without those for its place and its publication.

    Parameters
    ----------
    config, base
        The configuration in effect, and that of the recipe without overrides.
    """
    fields, words = dict(walk(RecipeConfig)), list[str]()
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key == _PROTOCOLS:
            words.append(f"{key}={_flow([_named_protocol(t) for t in config.evaluate.protocols])}")
        elif key == _BODY:
            words.append(f"{key}={public_body(config.judge.extra_body)}")
        elif key in fields:
            words += [text] if _is_said(key, fields[key], config) else []
        else:  # a whole section at once
            for path in (p for p in fields if p.startswith(f"{key}.")):
                value = get_field(config, path)
                if value != get_field(base, path) and _is_said(path, fields[path], config):
                    words.append(f"{path}={_flow(value)}")
    return tuple(dict.fromkeys(words))


def recipe_text(config: RecipeConfig) -> str:
    """A recipe with everything that decides what is computed; equal configurations give equal
    texts."""
    values: dict[str, Any] = {"recipe": config.recipe}
    if config.description.strip():
        values["description"] = public_text(config.description.strip())
    for path, info in walk(RecipeConfig):
        value = get_field(config, path)
        if path == "stages" or (value != info.default and _is_said(path, info, config)):
            values[path] = _public(path, value)
    if config.judge.kind == "openai" and asks_judge(config):
        values["judge.base_url"] = _ANY_JUDGE
    return _HEADER + yaml.dump(
        nested(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )


def stands_for(path: str, said: Any, meant: Any) -> bool:
    """True if a value on a card is the public name of the recorded one."""
    if path == _PROTOCOLS:
        return [public_protocol(text) for text in said] == [public_protocol(t) for t in meant]
    return bool(said == _public(path, meant) or said == _public(path, meant, in_command=True))


def _is_said(path: str, info: FieldInfo, config: RecipeConfig) -> bool:
    if path in _SOMEBODYS or (config.publish.which == "listed" and path in _WHICH_STEPS):
        return False
    return info.mark == "identity" or path in _NEEDED


def _public(path: str, value: Any, *, in_command: bool = False) -> Any:
    """A value in a public recipe or command."""
    if path == _PROTOCOLS:
        return tuple(_protocol(text) for text in value)
    if isinstance(value, tuple):
        return tuple(_public(path, v, in_command=in_command) for v in value)
    if not isinstance(value, str) or path in _NO_PATHS:
        return value
    if path == _BODY:
        return public_body(value)
    if in_command:
        return _named(path, value)
    return public_text(value if path.startswith("command.") else _named(path, value))


def _named_protocol(text: str) -> str | dict[str, Any]:
    """A shipped protocol by its name; the content of any other."""
    name = parse_protocol(text).name
    shipped = name in shipped_protocols() and load_protocol(name).text == text
    return name if shipped else _protocol(text)


def _protocol(text: str) -> dict[str, Any]:
    """Content of a protocol file, for a public recipe."""
    said: dict[str, Any] = json.loads(public_protocol(text))
    if said.get("judge", {}).get("kind") == "openai":
        said["judge"]["base_url"] = _ANY_JUDGE
    return said


def _named(path: str, value: str) -> str:
    """Public name; a folder of prompts still looks like a folder, not like a version."""
    name = public_name(value)
    return f"./{name}" if path == "judge.prompt" and "/" in value else name


def _flow(value: Any) -> str:
    """A value in the form of an override."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9
    )
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """Plain YAML, for OmegaConf: texts that may look like something else are quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a repeated value twice."""
        return True

    def represent_text(self, text: str) -> yaml.Node:
        """Quote everything but plain words, with ``${`` escaped for OmegaConf."""
        is_word = _WORD.fullmatch(text) and text.lower() not in _NO_TEXT
        text = text.replace("${", "\\${")
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_word else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


RECIPE_FILE = "recipe.yaml"
#: Source name -> its field, and the placeholder used while the record has its digest.
_FILES: Mapping[str, tuple[str, Any]] = {
    "model": ("model.name_or_path", RecipeConfig().model.name_or_path),
    "tokenizer": ("model.tokenizer_name_or_path", None),
    "data.sft": ("data.sft_path", None),
    "data.rl": ("data.rl_path", None),
    "rubrics": ("reward.static_rubrics", RecipeConfig().reward.static_rubrics),
    "judge_prompt": ("judge.prompt", RecipeConfig().judge.prompt),
}
#: Beginnings of digests of sources that are not files.
_NO_FILE = (HUB_DIGEST, "synthetic:", "none")


@dataclass(frozen=True)
class CheckpointOrigin:
    """Records of a checkpoint's origin.

    Attributes
    ----------
    recipe, overrides
        As in the call; no recipe without a recorded call.
    config
        The configuration in effect.
    trained
        Name of its training stage.
    specs
        Stages before it, and that stage itself, by name.
    """

    recipe: str
    overrides: tuple[str, ...]
    config: RecipeConfig
    trained: str
    specs: Mapping[str, StageSpec]

    @property
    def sources(self) -> dict[str, str]:
        """Digests of external inputs of the stages."""
        return {k: v for spec in self.specs.values() for k, v in spec.sources.items()}

    @property
    def fingerprint(self) -> str:
        """Fingerprint of its training stage."""
        return self.specs[self.trained].fingerprint


def reproduce(made: CheckpointOrigin) -> dict[str, Any]:
    """The checked command for a card, in the form of a publication's record.

    Returns
    -------
    dict
        ``makes``: the fingerprint; ``command``; ``recipe_file``: the text of its ``recipe.yaml``,
        None with a shipped recipe; ``not_the_shipped_recipe``: reason why the call's shipped recipe
        does not suffice; ``sources``: local files in the command, without their folders, with their
        SHA-256.

    Raises
    ------
    StageFailed
        Even the whole configuration does not plan to the recorded stage; names the fields.
    """
    why: tuple[str, ...] = ()
    text: str | None = None
    if made.recipe in shipped_recipes():
        said = restated(made.overrides, made.config, load_recipe(made.recipe))
        command = public_command(shlex.join(["refiner", "run", made.recipe, *said]))
        why = differing(command, made)
    if why or made.recipe not in shipped_recipes():
        text = recipe_text(made.config)
        command = shlex.join(["refiner", "run", RECIPE_FILE])
        if left := differing(command, made, text):
            raise StageFailed(
                f"No command can be given that makes {made.trained} "
                f"{made.fingerprint[:12]} again; it would differ in: {'; '.join(left[:5])}",
                expected="a configuration that this version plans to the recorded fingerprint",
                fix="publish it with the version that trained it (`code` in the run's record)",
            )
    return {
        "makes": made.fingerprint,
        "command": command,
        "recipe_file": text,
        "not_the_shipped_recipe": list(why),
        "sources": _files(command, made, text),
    }


def differing(
    command: str, made: CheckpointOrigin, recipe_file: str | None = None
) -> tuple[str, ...]:
    """Differences between the model of a command and the recorded one; empty if it is the same.

    Parameters
    ----------
    recipe_file
        Text of the :data:`RECIPE_FILE` in the command, if it names one.
    """
    try:
        plan = planned(command, made, recipe_file)
    except RefinerError as error:
        return (error.what.rstrip("."),)
    stage = plan.by_name.get(made.trained)
    if stage is None:
        return (f"it has no stage {made.trained}",)
    if stage.fingerprint == made.fingerprint:
        return ()
    lines = [
        f"{name}: {line}"
        for name, spec in made.specs.items()
        if name in plan.by_name and plan.by_name[name].fingerprint != spec.fingerprint
        for line in differences(spec, plan.by_name[name])
        if not line.startswith("input ")  # reported for the stage that makes it
    ]
    return tuple(lines) or ("its stages depend on others than the recorded ones",)


def planned(command: str, made: CheckpointOrigin, recipe_file: str | None = None) -> Plan:
    """The plan of a command, with the recorded files in place of its own.

    Raises
    ------
    RefinerError
        It cannot be parsed or carried out.
    """
    config = _with_recorded(_parsed(command, recipe_file), made.config)
    return make_plan(check_config(config), _sources(config, made))


def _parsed(command: str, recipe_file: str | None) -> RecipeConfig:
    """The configuration of a `refiner run …` command."""
    _, _, recipe, *overrides = shlex.split(command)
    if recipe_file is None:
        return load_recipe(recipe, overrides)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / RECIPE_FILE
        path.write_text(recipe_file, encoding="utf-8")
        return load_recipe(str(path), overrides)


def _with_recorded(config: RecipeConfig, recorded: RecipeConfig) -> RecipeConfig:
    """Replace public names by the recorded values."""
    fields = (
        (path, get_field(config, path), get_field(recorded, path)) for path, _ in walk(RecipeConfig)
    )
    found = {p: meant for p, said, meant in fields if said != meant and stands_for(p, said, meant)}
    return replace_fields(config, found)


def _sources(config: RecipeConfig, made: CheckpointOrigin) -> dict[str, str]:
    """Digests as in `refiner plan`, those of local files from the record."""
    files = {
        name: digest
        for name, digest in _recorded_files(made).items()
        if get_field(config, _FILES[name][0]) == get_field(made.config, _FILES[name][0])
    }
    without = {_FILES[name][0]: _FILES[name][1] for name in files}
    without |= {"publish.card_template": None, "evaluate.protocols": ()}  # not part of the training
    sources = resolve_sources(replace_fields(config, without))
    # A local tokenizer is identified by its name alone.
    return sources | {k: v for k, v in files.items() if k != "tokenizer"}


def _recorded_files(made: CheckpointOrigin) -> dict[str, str]:
    """Source name -> digest of local inputs."""
    sources, config = made.sources, made.config
    found = {}
    for name, (path, instead) in _FILES.items():
        value, digest = get_field(config, path), sources.get(name, "")
        if value in (None, instead) or str(value).startswith("builtin:"):
            continue
        if name == "rubrics" and value in shipped_rubric_sets():
            continue
        if name == "judge_prompt" and value in prompt_versions():
            continue
        if name == "tokenizer":
            is_folder = str(value).startswith(("/", ".", "~")) or str(value).count("/") != 1
            if is_folder and not digest:
                found[name] = ""
        elif digest and not digest.startswith(_NO_FILE):
            found[name] = digest
    return found


def _files(command: str, made: CheckpointOrigin, recipe_file: str | None = None) -> dict[str, str]:
    """Local files in the command, by their names there."""
    said = _parsed(command, recipe_file)
    found = {}
    for name, digest in _recorded_files(made).items():
        shown, file = (str(get_field(c, _FILES[name][0])) for c in (said, made.config))
        if digest:
            found[shown] = _digest(Path(file), digest)
    return found | _environment_files(said, made.config)


def _environment_files(said: RecipeConfig, had: RecipeConfig) -> dict[str, str]:
    """The file of an agent's own environment, and that of its tasks. They are the recorded ones:
    with others the command would not plan to the fingerprint."""
    shown, file = (config.environment.name.rpartition(":")[0] for config in (said, had))
    names = [(said.environment.tasks, had.environment.tasks)]
    if file.endswith(".py"):
        names.append((shown, file))
    return {
        shown: hash_of(Path(file).expanduser())
        for shown, file in names
        if shown is not None and file is not None
    }


def _digest(path: Path, recorded: str) -> str:
    """SHA-256 of a file, if it is still the recorded one (the record has the hash of the hashes of
    its files); else the recorded digest."""
    recorded = recorded.removeprefix("sha256:")
    path = path.expanduser()
    content = hash_of(path) if path.is_file() else ""
    same = hashlib.sha256(bytes.fromhex(content)).hexdigest() == recorded
    return content if same else recorded
