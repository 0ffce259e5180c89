"""The public part of records: names without folders, no host, environment or secret.
In: values of a configuration, of reports and other records. Out: the same as JSON for evidence, and
for the command on a card. All functions are idempotent. The verdict of a proof of exact resume is
recomputed each time and compared with the recorded one.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from refiner_core.cards.facts import CONTROLS, CardFacts, finite, is_local, public_name
from refiner_core.contract.checks.environment import ONLY_OF_AGENTS
from refiner_core.contract.checks.secrets import is_secret_name
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import FieldInfo, walk
from refiner_core.contract.proofs import PROOF_VERSION, Certificate, ResumeProof
from refiner_core.contract.protocols import parse_protocol, protocol_text
from refiner_core.contract.records import from_json, to_json

#: Execution settings shown on cards; all others stay private.
SHOWN_EXECUTION = (
    "grpo.deepspeed_stage",
    "grpo.offload_optimizer",
    "grpo.save_freq",
    "sft.deepspeed_stage",
)
#: The parts of each stage's report that cards use. Other parts may name machines.
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
        *(f"monitor.{key}" for key in ("rows", "alpha", "alarm", "stopped", "since", "best")),
        *("monitor.proxy", "monitor.gold"),
        *_PROCESSES,
    ),
    "command": ("steps", "steps_planned", "final", "source", "adopted", "base_model"),
}
#: Settings of a command about the place of execution, without effect on the result.
_PLACES = ("dispatch.", "disk.", "tracking.")
_SHOWN_TEXTS = ("recipe", "description", "command.resume_arguments", "command.checkpoints")
_TEXT_DIGEST = "(text with SHA-256 {}…)"
_DIGESTED = re.compile(r"\(text with SHA-256 [0-9a-f]{12}…\)")
#: Non-secret texts in a request's further fields: `high`, `gold standard`.
_PLAIN_WORDS = re.compile(r"(?=.{1,24}\Z)[A-Za-z]+(?:[ _-][A-Za-z]+)*")
#: Texts that look like paths but are not.
_NO_PATHS = ("grpo.stop_strings",)

#: An absolute path, or one from a home folder; the group is its last part.
_FOLDERS = re.compile(r"(?<![\w./-])(?:~|/(?!/))[\w.~+-]*(?:/[\w.~+-]+)*/([\w.~+-]+)")
_WINDOWS = re.compile(r"(?<!\w)[A-Za-z]:\\(?:[^\\\s]+\\)*([^\\\s]+)")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
#: Markdown and HTML characters with which a name could end a line or a cell, or start a link, and
#: their replacements: names come from rows, trainers and evaluations.
_MARKS = str.maketrans({"|": "¦", "`": "'", "<": "‹", ">": "›", "[": "(", "]": ")"})


def plain_name(text: str) -> str:
    """A name that cannot forge anything: no control, Markdown or HTML characters."""
    return " ".join(CONTROLS.sub(" ", text).split("\n")).translate(_MARKS)


def public_text(text: str) -> str:
    """A sentence or a shell command without the machine's folders, logins in addresses, and
    control characters."""
    text = CONTROLS.sub(" ", text)
    while True:
        shorter = _CREDENTIALS.sub("", text)
        shorter = _WINDOWS.sub(lambda m: m.group(1), shorter)
        shorter = _FOLDERS.sub(lambda m: m.group(1), shorter)
        if shorter == text:
            return text
        text = shorter


def short_text(text: str) -> str:
    """The digest of a text of several lines, as on cards; any other text unchanged."""
    return _digest(text) if "\n" in text else text


def public_body(text: str) -> str:
    """Further fields of a judge's requests (JSON), with a digest for each text that could be a
    secret: services put keys there, under unpredictable names."""
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
    """A ``refiner`` command for others: names of files without folders, and no settings about the
    place of execution. It plans the same."""
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
    """True if a ``key=value`` is about the place of execution only."""
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
    of an environment if there is none, and of attempts if none of ``stages`` trained on them.

    Texts of several lines are replaced by their digest, paths lose their folders; the fixed
    content of a protocol file is kept.
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
    """True if a configuration field is part of the evidence."""
    return info.mark == "identity" or path in SHOWN_EXECUTION


def public_protocol(text: str) -> str:
    """Fixed content of a protocol file, without its judge's addresses and its folders."""
    protocol = parse_protocol(text)
    fixed = {p: v for p, v in protocol.fields.items() if p in protocol.fixed}
    if not fixed:  # it only has a judge's address
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
    """The parts of each stage's report that cards use (:data:`SHOWN_OF_REPORTS`)."""
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
    """Any value of a record as JSON: names without folders, None for a number that is not finite;
    ``name`` is then applied to each text."""
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
    """As :func:`public_tree`, for values whose texts are names (:func:`plain_name`)."""
    return public_tree(value, plain_name)


def public_address(address: str) -> str | None:
    """A public web address, without login and query; None for any other."""
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


# ---------------------------------------------------------------- proofs and certificates


def public_proof(proof: ResumeProof) -> dict[str, Any]:
    """A proof for the evidence, without its place and the settings of a machine."""
    kept = replace(proof, overrides=(), changed={}, provenance={})
    return {**to_json(kept), "verdict": proof.verdict}


def read_proof(known: Mapping[str, Any]) -> ResumeProof | None:
    """The proof in a card's facts; None without one.

    Raises
    ------
    DataError
        It is invalid, or of a newer version.
    """
    if not known:
        return None
    try:
        if int(known["version"]) > PROOF_VERSION:
            raise ValueError(f"version {known['version']}")
        return from_json(ResumeProof, known)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"facts.proof cannot be read ({error})",
            expected=f"a proof of version {PROOF_VERSION} or older",
            fix="use the refiner.json beside the card, and the version of refiner that "
            "the card names",
        ) from error


def proof_problems(facts: CardFacts) -> Iterator[str]:
    """Claims of a proof that contradict its own numbers, or concern another stage."""
    proof = read_proof(facts.proof)
    if proof is None:
        return
    said = facts.proof.get("verdict")
    if said != proof.verdict:
        yield f"proof.verdict is {said!r}, and its comparisons give {proof.verdict!r}"
    if facts.fingerprint and proof.fingerprint != facts.fingerprint:
        yield f"proof is of the stage {proof.fingerprint[:12]}, not of {facts.fingerprint[:12]}"
    if not proof.interruptions:
        yield "proof has no interruption, so that nothing was tried"
    for found in proof.comparisons:
        if not 0 <= found.differing <= found.compared or not found.compared:
            counts = f"{found.differing} of {found.compared}"
            yield f"proof: {counts} of {found.quantity} differ, which cannot be"


def public_certificate(
    certificates: list[Certificate], trained_on: Mapping[str, Any]
) -> dict[str, Any]:
    """The newest certificate of the training machine's kind, without its name.

    Parameters
    ----------
    certificates
        The workspace's certificates, oldest first.
    trained_on
        Provenance of the training stage: its ``host`` and ``versions``.

    Returns
    -------
    dict
        ``made_at`` (day), ``gpus`` (number), ``gpu`` (name), ``passed``, ``failed``, ``absent``;
        empty if no passed certificate is of the same processor, GPUs and torch.
    """
    host, torch = trained_on.get("host") or {}, (trained_on.get("versions") or {}).get("torch")
    same = [
        made
        for made in certificates
        if made.passed
        and made.host.get("cpu") == host.get("cpu")
        and list(made.host.get("gpus") or ()) == list(host.get("gpus") or ())
        and made.versions.get("torch") == torch
    ]
    if not same:
        return {}
    made = same[-1]
    return {
        "made_at": made.made_at[:10],
        "gpus": len(made.gpus),
        "gpu": made.gpus[0] if made.gpus else "",
        "passed": made.count("pass"),
        "failed": made.count("fail"),
        "absent": made.count("absent"),
    }
