"""The evidence of a card: ``refiner.json``, which lies beside it.

In: :class:`CardFacts` and the files of a publication. Out: JSON from which anybody makes the same
card again, byte for byte::

    {"format": 1, "kind": "refiner publication", "step", "final", "fingerprint",
     "files": [{"path", "bytes", "sha256"}, …], "facts": {…}}

``files`` are those of the publication without README.md and refiner.json themselves. Nothing
private is in ``facts``, and cards are made from what is: names lose their folders, and no host,
environment or secret is left. It is done once, before a card is made, so that a card can show
nothing that its evidence does not hold. Doing it again changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from refiner_core.cards.facts import (
    CONTROLS,
    AttemptNote,
    CardFacts,
    file_digest,
    finite,
    is_local,
    public_name,
)
from refiner_core.contract.checks.environment import ONLY_OF_AGENTS
from refiner_core.contract.checks.secrets import is_secret_name
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import ABSENT, FieldInfo, walk
from refiner_core.contract.protocols import parse_protocol, protocol_text
from refiner_core.contract.records import OutputFile, to_json

#: Execution settings that cards tell of; all others are nobody else's business.
SHOWN_EXECUTION = (
    "grpo.deepspeed_stage",
    "grpo.offload_optimizer",
    "grpo.save_freq",
    "sft.deepspeed_stage",
)
#: What a card reads of each stage's report. Reports say more, and some of it names machines.
_OF_ROWS = ("read", "kept", "dropped", "digest", "modes", "domains", "flawed", "solved")
_PROCESSES = ("ranks", "engine", "resumed_on")
_OF_JUDGE = (
    *("asked", "calls", "stored", "shared", "failed"),
    *("prompt_tokens", "completion_tokens"),
)
SHOWN_OF_REPORTS: Mapping[str, tuple[str, ...]] = {
    "data": (*(f"{which}.{key}" for which in ("rl", "sft") for key in _OF_ROWS), "split"),
    "sft": (
        *("steps", "epochs", "demonstrations", "tokens", "loss_tokens"),
        *("train_loss", "validation_loss", *_PROCESSES),
    ),
    "sample": (
        *("lane", "attempts", "prompts", "acceptance", "success_rate", "kept", "not_kept"),
        *("errors", "tokens", "by_domain"),
        *(f"judge.{key}" for key in _OF_JUDGE),
    ),
    "grpo": (
        *("steps", "episodes", "tokens", "prompts", "counts", "curves"),
        *(f"judge.{key}" for key in _OF_JUDGE),
        *_PROCESSES,
    ),
    "command": ("steps", "steps_planned", "final", "source", "adopted", "base_model"),
}
#: Settings of a command that say where it ran, and nothing of what it made.
_PLACES = ("dispatch.", "disk.", "tracking.")
_SHOWN_TEXTS = ("recipe", "description", "command.resume_arguments", "command.checkpoints")
_TEXT_DIGEST = "(text with SHA-256 {}…)"
_DIGESTED = re.compile(r"\(text with SHA-256 [0-9a-f]{12}…\)")
#: Texts of a request's further fields that are no secret: `high`, `gold standard`.
_PLAIN_WORDS = re.compile(r"(?=.{1,24}\Z)[A-Za-z]+(?:[ _-][A-Za-z]+)*")
#: Texts that look like paths and are none.
_NO_PATHS = ("grpo.stop_strings",)

#: An absolute path, or one from a home folder; the group is its last part.
_FOLDERS = re.compile(r"(?<![\w./-])(?:~|/(?!/))[\w.~+-]*(?:/[\w.~+-]+)*/([\w.~+-]+)")
_WINDOWS = re.compile(r"(?<!\w)[A-Za-z]:\\(?:[^\\\s]+\\)*([^\\\s]+)")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
#: Signs of Markdown and HTML with which a name could end a line or a cell, or begin a link, and
#: what stands for them: names come from rows, trainers and evaluations.
_MARKS = str.maketrans({"|": "¦", "`": "'", "<": "‹", ">": "›", "[": "(", "]": ")"})


def plain_name(text: str) -> str:
    """A name that can forge nothing: no control characters, nor signs of Markdown and HTML."""
    return " ".join(CONTROLS.sub(" ", text).split("\n")).translate(_MARKS)


def public_text(text: str) -> str:
    """A sentence or a shell command without the folders of the machine, nor logins in addresses,
    nor control characters."""
    text = CONTROLS.sub(" ", text)
    while True:
        shorter = _CREDENTIALS.sub("", text)
        shorter = _WINDOWS.sub(lambda m: m.group(1), shorter)
        shorter = _FOLDERS.sub(lambda m: m.group(1), shorter)
        if shorter == text:
            return text
        text = shorter


def short_text(text: str) -> str:
    """Text of several lines by its digest, as cards name it; any other text as it is."""
    return _digest(text) if "\n" in text else text


def public_body(text: str) -> str:
    """Further fields of a judge's requests (JSON), with a digest for each text that could be a
    secret: services put keys there, under names that nobody can know."""
    try:
        value = json.loads(text or "null")
    except ValueError:
        return _digest(text)
    shown = _public_leaves(value, is_secret=False)
    return text if shown == value else json.dumps(shown, ensure_ascii=False)


def _public_leaves(value: Any, *, is_secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {k: _public_leaves(v, is_secret=is_secret_name(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_public_leaves(v, is_secret=is_secret) for v in value]
    if not isinstance(value, str) or _DIGESTED.fullmatch(value):
        return value
    return _digest(value) if is_secret or not _PLAIN_WORDS.fullmatch(value) else value


def _digest(text: str) -> str:
    return _TEXT_DIGEST.format(hashlib.sha256(text.encode()).hexdigest()[:12])


def public_command(command: str) -> str:
    """A ``refiner`` command that others can give: names of files without folders, and no settings
    that only say where it ran. What it plans stays the same."""
    while (shorter := _shorter_command(command).strip()) != command:
        command = shorter
    return command


def _shorter_command(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError:
        return public_text(command)
    said = [_public_word(word) for word in words if not is_place(word)]
    return command if said == words else shlex.join(said)


def is_place(override: str) -> bool:
    """True if a ``key=value`` says where something ran, and nothing of what was made."""
    key, equals, _ = override.partition("=")
    info = dict(walk(RecipeConfig)).get(key)
    if not equals or info is None or info.mark == "identity":
        return False
    if key.startswith(_PLACES) or ".resources." in key or key == "log_level":
        return True
    return info.type in (str, str | None) and key not in _SHOWN_TEXTS


def _public_word(word: str) -> str:
    key, equals, value = word.partition("=")
    if key == "judge.extra_body" and value.startswith('{"'):
        return f"{key}={public_body(value)}"
    if equals and is_local(value):
        return f"{key}={public_name(value)}"
    return public_name(word) if is_local(word) else public_text(word)


def public_config(config: RecipeConfig, stages: Collection[str] = ()) -> dict[str, Any]:
    """Identity settings and :data:`SHOWN_EXECUTION` by dotted path, as JSON values; without those
    of an environment where there is none, and of attempts where ``stages`` trained on none.

    Texts of several lines are replaced by their digest, paths lose their folders; of a protocol
    file what it fixes is left.
    """
    idle = () if config.environment.name else ONLY_OF_AGENTS
    hidden = (k for k in KINDS.values() if k.shown_where_used and k.entry not in stages)
    idle = (*idle, *(f"{kind.section}." for kind in hidden))
    return {
        path: _public_value(path, get_field(config, path))
        for path, info in walk(RecipeConfig)
        if is_public(path, info) and not path.startswith(idle)
    }


def is_public(path: str, info: FieldInfo) -> bool:
    """True if a configuration field stands in the evidence."""
    return info.mark == "identity" or path in SHOWN_EXECUTION


def public_protocol(text: str) -> str:
    """Fixed content of a protocol file, without where its judge is served and its files lie."""
    protocol = parse_protocol(text)
    fixed = {p: v for p, v in protocol.fields.items() if p in protocol.fixed}
    if not fixed:  # it says nothing but where a judge is asked
        fixed = {p: v for p, v in protocol.values().items() if p == "judge.model"}
    return protocol_text(protocol.name, {p: _public_value(p, v) for p, v in fixed.items()})


def _public_value(path: str, value: Any) -> Any:
    if path == "evaluate.protocols":
        return [public_protocol(text) for text in value]
    if isinstance(value, list | tuple):
        return [_public_value(path, v) for v in value]
    if not isinstance(value, str) or path in _NO_PATHS:
        return value
    if path == "judge.extra_body":
        return public_body(value)
    if path.startswith("command."):
        return public_text(value)
    return public_text(public_name(short_text(value)))


def public_reports(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of each stage's report what cards read (:data:`SHOWN_OF_REPORTS`)."""
    found: dict[str, Any] = {}
    for stage, report in reports.items():
        kept: dict[str, Any] = {}
        for path in SHOWN_OF_REPORTS.get(stage, SHOWN_OF_REPORTS["sft"]):
            head, _, inner = path.partition(".")
            value = report.get(head)
            if not inner and head in report:
                kept[head] = named_tree(value)
            elif isinstance(value, Mapping) and inner in value:
                kept.setdefault(head, {})[inner] = named_tree(value[inner])
        found[stage] = kept
    return found


def public_tree(value: Any, name: Callable[[str], str] = str) -> Any:
    """Any value of a record as JSON: names without folders, None for what is no finite number;
    ``name`` is what becomes of each text then."""
    if isinstance(value, Mapping):
        return {
            name(public_text(public_name(str(k)))): public_tree(v, name) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [public_tree(v, name) for v in value]
    if isinstance(value, str):
        return name(public_text(public_name(short_text(value))))
    return finite(value) if isinstance(value, float) else value


def named_tree(value: Any) -> Any:
    """As :func:`public_tree`, of values whose texts are names (:func:`plain_name`)."""
    return public_tree(value, plain_name)


def public_address(address: str) -> str | None:
    """A web address that others can open, without login and query; None for any other."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:
        return None
    if parts.scheme != "https" or "." not in host or host.endswith((".local", ".internal")):
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return f"https://{host}{parts.path}"
    return None


EVIDENCE_FORMAT = 1
EVIDENCE_KIND = "refiner publication"
#: Files of a publication that its evidence does not list.
_NOT_LISTED = ("README.md", "refiner.json")
#: What is kept of each evaluation.
_OF_EVALUATIONS = (
    *("stage", "protocol", "protocol_name", "decoding", "metric", "value", "low", "high", "n"),
    *("numerator", "denominator", "interval", "samples_file", "under"),
)
#: Facts that came later: without any, the evidence is as before there were such.
_ONLY_WHERE_ANY = ("proof", "certificate", "versions")
_FIX = "take the refiner.json that lies beside the card"


@dataclass(frozen=True)
class Evidence:
    """A read ``refiner.json``: what a publication consists of and what its card was made from."""

    facts: CardFacts
    step: int
    final: bool
    fingerprint: str
    files: tuple[OutputFile, ...]


def published_facts(facts: CardFacts) -> CardFacts:
    """The facts as the evidence has them; a card is made from these and no others."""
    return facts_from_json(facts_to_json(facts))


def facts_to_json(facts: CardFacts) -> dict[str, Any]:
    """The facts as JSON values, with nothing in them that is not to be published."""
    tracking = {stage: public_address(address) for stage, address in facts.tracking.items()}
    special: dict[str, Any] = {
        "config": public_config(facts.config, {facts.stage, *facts.reports}),
        "command": public_command(facts.command),
        "reports": public_reports(facts.reports),
        "description": public_text(facts.description).strip(),
        "recipe_file": None if facts.recipe_file is None else file_digest(facts.recipe_file),
        "tracking": {stage: address for stage, address in tracking.items() if address},
        "template": facts.template,
        "repo_id": facts.repo_id,
        "base_model": None
        if facts.base_model is None
        else plain_name(public_name(facts.base_model)),
        "attempts": [public_tree(note._asdict()) for note in facts.attempts],
        "static_rubric_titles": named_tree(list(facts.static_rubric_titles)),
        "evaluations": [_evaluation(entry) for entry in facts.evaluations],
        "records": {fact: public_text(record) for fact, record in facts.records.items()},
    }
    return {
        f.name: special[f.name]
        if f.name in special
        else public_tree(to_json(getattr(facts, f.name)))
        for f in dataclasses.fields(facts)
        if f.name not in _ONLY_WHERE_ANY or getattr(facts, f.name)
    }


def _evaluation(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: named_tree(entry[key]) for key in _OF_EVALUATIONS if key in entry}


def facts_from_json(data: Mapping[str, Any]) -> CardFacts:
    """The facts that :func:`facts_to_json` has written.

    Settings that are not in them came later: they have the value that older runs had in effect.

    Raises
    ------
    DataError
        These are no facts, or those of a newer version.
    """
    fields = {f.name: f for f in dataclasses.fields(CardFacts)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise DataError(
            f"The evidence has facts that this version does not know: {', '.join(unknown)}",
            expected=f"format {EVIDENCE_FORMAT} of {EVIDENCE_KIND}",
            fix="install the version of refiner that the card names",
        )
    values: dict[str, Any] = {name: _frozen(name, value) for name, value in data.items()}
    try:
        values["config"] = _config(data["config"])
        values["attempts"] = tuple(AttemptNote(**note) for note in data.get("attempts", ()))
        return CardFacts(**values)
    except (KeyError, TypeError, AttributeError, ConfigurationError) as error:
        raise DataError(
            f"The evidence is incomplete or damaged ({error})", expected="its facts", fix=_FIX
        ) from error


def _frozen(name: str, value: Any) -> Any:
    tuples = ("static_rubric_titles", "static_rubric_weights", "recorded_fields", "evaluations")
    return tuple(value) if name in tuples and isinstance(value, list) else value


def _config(values: Mapping[str, Any]) -> RecipeConfig:
    later = {
        path: info.legacy_value
        for path, info in walk(RecipeConfig)
        if is_public(path, info) and path not in values and info.legacy_value is not ABSENT
    }
    return replace_fields(RecipeConfig(), {**later, **values})


def evidence_text(
    facts: CardFacts, files: Sequence[OutputFile], *, fingerprint: str | None = None
) -> str:
    """``refiner.json`` as text; the same facts and files give the same bytes.

    Parameters
    ----------
    files
        Files of the publication; README.md and refiner.json are left out here.
    fingerprint
        Of the stage that trained the weights, where it is not ``facts.fingerprint``.
    """
    listed = sorted((f for f in files if f.path not in _NOT_LISTED), key=lambda f: f.path)
    content = {
        "format": EVIDENCE_FORMAT,
        "kind": EVIDENCE_KIND,
        "step": facts.step,
        "final": facts.final,
        "fingerprint": facts.fingerprint if fingerprint is None else fingerprint,
        "files": to_json(listed),
        "facts": facts_to_json(facts),
    }
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def load_evidence(text: str) -> Evidence:
    """Read ``refiner.json``.

    Raises
    ------
    DataError
        It is no evidence of a card, of a newer format, or damaged.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"The evidence is not JSON ({error})", expected="a refiner.json", fix=_FIX
        ) from error
    if not isinstance(content, dict) or content.get("kind") != EVIDENCE_KIND:
        raise DataError(
            "This file is not the evidence of a card", expected=f"kind {EVIDENCE_KIND!r}", fix=_FIX
        )
    if content.get("format") != EVIDENCE_FORMAT:
        raise DataError(
            f"The evidence has format {content.get('format')}",
            expected=f"format {EVIDENCE_FORMAT}",
            fix="install the version of refiner that wrote it",
        )
    try:
        return Evidence(
            facts=facts_from_json(content["facts"]),
            step=int(content["step"]),
            final=bool(content["final"]),
            fingerprint=str(content["fingerprint"]),
            files=tuple(
                OutputFile(f["path"], f["bytes"], f["sha256"]) for f in content.get("files", ())
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"The evidence is incomplete or damaged ({error})", expected="all its parts", fix=_FIX
        ) from error
