"""Facts of a card, and numbers in texts that are marked with their facts.

In: values that the caller read from records. Out: one frozen value that holds them; texts in
which each number is marked with its fact. Checks that do not need a card (no protocol, no n) run
here, so that no table contains invalid entries.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

from refiner_core.contract.config import PublishConfig, RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.records import Attempt
from refiner_core.report.printing import MISSING as MISSING
from refiner_core.report.printing import finite as finite

_REQUIRED = ("stage", "protocol", "decoding", "metric", "n")
#: Base of a model whose trainer has not named its starting point.
UNKNOWN = "unknown"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class AttemptNote(NamedTuple):
    """End of one attempt at a stage; ``failure`` is a failure class, ``none`` for success.
    ``step`` is its last finished step, ``ended_at`` an ISO 8601 time (UTC)."""

    stage: str
    number: int
    failure: str = "none"
    resumed_from_step: int | None = None
    step: int | None = None
    ended_at: str | None = None


def attempt_notes(stage: str, attempts: Iterable[Attempt]) -> tuple[AttemptNote, ...]:
    """The attempts of one stage's record, reduced to public facts."""
    return tuple(
        AttemptNote(
            stage,
            attempt.number,
            "none" if attempt.outcome is None else attempt.outcome.failure,
            attempt.resumed_from_step,
            None if attempt.outcome is None else attempt.outcome.step,
            attempt.ended_at,
        )
        for attempt in attempts
    )


@dataclass(frozen=True)
class CardFacts:
    """All facts of a card, as plain values.

    Parameters
    ----------
    repo_id
        Repository of the checkpoint; its last part is the title.
    config
        The configuration in effect.
    stage, step, final
        Which model this is (``sft``, ``rft``, ``grpo``, ``command``), its optimiser step, and
        whether it is the recipe's last checkpoint.
    command
        The exact command that made it.
    reports
        Stage reports by stage name (``data``, ``sft``, ``grpo``), as the stages returned them.
    evaluations
        ``{stage, protocol, protocol_name, decoding, metric, value, low, high, n}`` each; ``stage``
        names the model (``base``, ``random_baseline_answers``, ``sft``, ``grpo``, ``grpo-step50``),
        ``protocol`` is a fingerprint. ``numerator``, ``denominator``, ``interval`` and
        ``samples_file`` are kept if known.
    protocols
        The protocols behind the fingerprints of ``evaluations``, as in ``results.json``.
    attempts
        Attempts at the stages behind this checkpoint, in order.
    provenance
        ``commit``, ``dirty``, ``packages`` {name: version}, ``host`` (a kind, not a name),
        ``durations`` {stage: seconds of the successful attempt}; each may be missing.
    base_model
        Hub id of the starting point of training, if it is not ``model.name_or_path``;
        :data:`UNKNOWN` if not recorded.
    static_rubric_titles, static_rubric_weights
        Titles in the static rubric set, if one shaped the reward, and their weights (below 0
        for a negative rubric) in the same order; weights may be missing.
    recorded_fields
        Dotted names of all configuration fields that the run knew; None if it knew today's.
    description
        The recipe's description.
    measured_as
        The model's name in evaluations (``grpo-step50``); None: ``stage``.
    fingerprint
        Of the stage that trained the model: ``command`` was verified to plan it.
    recipe_file
        Text of the ``recipe.yaml`` beside the card, which ``command`` names (facts from an
        evidence file have its SHA-256 here); None for a shipped recipe.
    sources
        Local files that the command reads, by their names in it: SHA-256.
    cost
        ``gpu_hours``, ``core_hours`` (of all attempts), ``lost_gpu_hours``, ``lost_core_hours``
        (of repeated work), ``seconds`` {stage: s of all its attempts}, ``price``
        (of one GPU-hour), ``currency``; each may be missing.
    tracking
        W&B address by stage name, if a run was tracked online.
    revision
        Tag or branch of this step, if steps share the repository; else ``main``.
    template
        Text of the user's own card template; None: the shipped one.
    stopped
        The end of training when an earlier checkpoint was published, if it had ended and
        was not resumed: ``failure``, ``step`` (the last finished one), ``ended_at``.
    proof
        The last result of `refiner prove-resume` for the stage that trained the model (see
        :mod:`refiner_core.cards.build`); empty if there is none.
    certificate
        The result of `refiner certify` for the kind of machine that trained the model (see
        :func:`refiner_core.cards.build.public_certificate`); empty if there is none.
    versions
        Versions of the kinds of the stages behind it, by name, for kinds whose behaviour has
        changed since (:data:`refiner_core.contract.planned.STAGE_CHANGES`).
    records
        The source of each fact: a prefix of its dotted path (``reports.data``,
        ``evaluations.0``, by the position in ``evaluations`` as given) to
        ``stages/data-0123456789ab/result.json#report``, relative to the workspace.
    """

    repo_id: str
    config: RecipeConfig
    stage: str
    step: int
    final: bool
    command: str
    license: str = "apache-2.0"
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, Any]] = ()
    attempts: Sequence[AttemptNote] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    base_model: str | None = None
    static_rubric_titles: tuple[str, ...] = ()
    static_rubric_weights: tuple[float, ...] = ()
    recorded_fields: tuple[str, ...] | None = None
    description: str = ""
    measured_as: str = ""
    fingerprint: str = ""
    recipe_file: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    cost: Mapping[str, Any] = field(default_factory=dict)
    tracking: Mapping[str, str] = field(default_factory=dict)
    revision: str = "main"
    protocols: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    template: str | None = None
    stopped: Mapping[str, Any] = field(default_factory=dict)
    proof: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    records: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = Counter(map(_identity_of, self.evaluations))
        for name in (name for name, count in names.items() if count > 1):
            raise DataError(
                f"Two evaluations claim to be {' / '.join(name)}",
                expected="one number per model, protocol, decoding and metric",
                fix="give each evaluation of a model its own name, or leave one of them out",
            )

    def fact(self, path: str) -> Any:
        """The fact at a dotted path (``reports.data.rl.kept``); None if there is none."""
        value: Any = self
        for part in path.split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            else:
                value = value[int(part)] if part.isdigit() else getattr(value, part, None)
        return value

    def number(self, path: str) -> str:
        """The number at a dotted path, marked."""
        return number(self.fact(path), path)

    def counted(self, path: str, one: str, many: str = "") -> str:
        """The number at a dotted path with its noun; see :func:`counted`."""
        return counted(self.fact(path), path, one, many)

    @property
    def is_agent(self) -> bool:
        """True if the model is an agent of an environment."""
        return bool(self.config.environment.name)

    @property
    def on_prompts(self) -> bool:
        """True if the model's stage trains on prompts, not on demonstrations."""
        return self.stage in KINDS and KINDS[self.stage].on_prompts

    @property
    def own(self) -> str:
        """The model's name in evaluations."""
        return self.measured_as or self.stage

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repo_id.rpartition("/")[2]

    @property
    def base(self) -> str:
        """Public name of the model that training started from."""
        return public_name(self.base_model or self.config.model.name_or_path)


def _identity_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    missing = [key for key in _REQUIRED if entry.get(key) in (None, "")]
    if missing:
        raise DataError(
            f"An evaluation of {entry.get('stage')}/{entry.get('metric')} has no "
            f"{', '.join(missing)}, so its number means nothing",
            expected=f"all of {', '.join(_REQUIRED)}",
            fix="evaluate the checkpoint again: `refiner run` with `evaluate` in `stages`",
        )
    return tuple(str(entry[name]) for name in _REQUIRED[:4])


def record_of(facts: CardFacts, path: str) -> str | None:
    """The source record of a fact, by the fact's dotted path (``reports.data.rl.kept``)
    or any prefix of it in ``facts.records``; None if not recorded."""
    while path and path not in facts.records:
        path = path.rpartition(".")[0]
    return facts.records.get(path)


def step_revision(config: PublishConfig, step: int, *, final: bool) -> str:
    """Name of the tag or branch of a step; ``main`` if steps do not share a repository."""
    alone = config.per_step == "repository" or (config.which == "final" and final)
    return "main" if alone else f"step-{step}"


def file_digest(text: str) -> str:
    """SHA-256 of a file's text; a text that already is one stays."""
    return text if _SHA256.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()


def is_local(text: str) -> bool:
    """True if a configured name is a local path and not a public name."""
    return text.startswith(("/", "~", "./", "../")) or "\\" in text


def public_name(text: str) -> str:
    """The public form of a name: paths lose their folders, other names stay."""
    return PurePath(text.replace("\\", "/")).name if is_local(text) else text


def is_hub_id(text: str | None) -> bool:
    """True if a name can be a Hub repository."""
    return text is not None and not is_local(text) and _HUB_ID.fullmatch(text) is not None


_DIGITS = re.compile(r"\d+(?:\.\d+)?")
#: Forbidden in cards: characters that end a line invisibly, change the direction of text, or
#: control a terminal.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


#: A number in a text of a card: its fact, and its printed form. Facts contain none of these marks
#: (CONTROLS), and the marks are removed before the text is shown.
_MARKED = re.compile("\x02([^\x02\x03]*)\x03([^\x04]*)\x04")


def number(text: Any, fact: str) -> str:
    """One number, marked with the dotted path of its fact."""
    return f"\x02{fact}\x03{text}\x04"


def counted(value: Any, fact: str, one: str, many: str = "") -> str:
    """``1 step``, ``8 steps``; ``many`` defaults to ``one`` with an s."""
    return f"{number(value, fact)} {one if value == 1 else many or one + 's'}"


def quoted(text: Any, fact: str) -> str:
    """A fact's text that may contain numbers (the name of a machine)."""
    return _DIGITS.sub(lambda found: number(found.group(), fact), str(text))


def unmarked(text: str) -> str:
    """A text without its marks."""
    return _MARKED.sub(r"\2", text)


def numbers_in(text: str) -> Iterator[tuple[int, int, str]]:
    """Numbers of a marked text, in order: start and end of each in the unmarked text, and its
    fact."""
    hidden = 0
    for found in _MARKED.finditer(text):
        start = found.start() - hidden
        yield start, start + len(found[2]), found[1]
        hidden += len(found.group()) - len(found[2])
