"""The values of nightly evaluations. Data only.

:class:`Nightly` is what a person has written, checked for form; :class:`Row` is one line of the
history: one checkpoint under one protocol in one night.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from refiner_core.contract.alarms import Alarm as Alarm

#: Version of the rows of a history.
ROW_VERSION = 1
SourceKind = Literal["hub", "folder", "stage", "newest"]
When = Literal["any", "drop", "rise"]


@dataclass(frozen=True)
class Source:
    """Where a checkpoint comes from.

    Attributes
    ----------
    kind
        ``hub``: ``ref`` is a repository, ``revision`` a commit, branch or tag. ``folder``: a folder
        with weights, or ``builtin:tiny``. ``stage``: the id of a stage that has trained or
        exported. ``newest``: ``ref`` is ``run ID``, ``recipe NAME``, ``sweep NAME`` or
        ``sweep NAME/ARM``.
    digest
        SHA-256 of the weights' folder that is expected; empty: any.
    """

    kind: SourceKind
    ref: str
    revision: str = ""
    digest: str = ""

    @property
    def frozen(self) -> bool:
        """Whether it is the same weights in every night."""
        return bool(self.digest) or self.kind == "stage" or self.is_commit

    @property
    def is_commit(self) -> bool:
        """Whether ``revision`` names one commit for good."""
        hexadecimal = all(c in "0123456789abcdef" for c in self.revision)
        return self.kind == "hub" and len(self.revision) == 40 and hexadecimal

    @property
    def text(self) -> str:
        """For people."""
        if self.kind == "hub":
            return f"{self.ref}@{self.revision}"
        return f"newest of {self.ref}" if self.kind == "newest" else self.ref


@dataclass(frozen=True)
class Checkpoint:
    """One model that is evaluated every night; ``name`` is for people, tables and paths."""

    name: str
    source: Source


@dataclass(frozen=True)
class Alerts:
    """What is worth an alert.

    Attributes
    ----------
    metrics
        These are watched, under every protocol and decoding.
    when
        In which direction a model's change matters. Drift is told in both.
    smallest
        Changes below it are left alone, in units of the metric.
    """

    metrics: tuple[str, ...] = ("reward",)
    when: When = "any"
    smallest: float = 0.0
    alarms: tuple[Alarm, ...] = ()


@dataclass(frozen=True)
class Nightly:
    """A nightly evaluation as it was written.

    Attributes
    ----------
    schedule, timezone
        A cron line of five fields, and the zone that it is meant in (IANA).
    recipe, overrides
        Data, judge and evaluation settings; its model and its training are not used.
    canary
        The frozen checkpoint. It is evaluated afresh every night.
    catch_up
        How many missed nights are looked after at most when one comes late.
    text, origin, folder
        The file, word for word; where it lies; the folder that its paths are relative to.
    """

    name: str
    schedule: str
    timezone: str
    recipe: str
    overrides: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    canary: Checkpoint
    alerts: Alerts = Alerts()
    catch_up: int = 3
    text: str = ""
    origin: str = ""
    folder: str = "."

    @property
    def everybody(self) -> tuple[Checkpoint, ...]:
        """The canary first: should time be short, it has the most to say."""
        return (self.canary, *self.checkpoints)


@dataclass(frozen=True)
class Row:
    """One checkpoint under one protocol in one night.

    Attributes
    ----------
    night
        Date (ISO) in the schedule's time zone.
    protocol, protocol_name, protocol_set, decoding
        Fingerprint; name for people; name of the protocol file (empty: the recipe's own).
    digest, source
        Of the weights, and what they were, in words.
    stage, samples
        Id of the evaluation, and its file of per-sample results, relative to the stage's output.
    fresh
        Whether it was measured for this night; else the numbers of an earlier one still hold,
        because neither the weights nor the protocol have changed.
    late
        Whether the row was written when a later night had already begun.
    measured_in
        The night whose conditions the numbers were made under; empty where they were made outside
        of this nightly evaluation.
    numbers
        Metric -> ``value``, ``low``, ``high``, ``n``, ``protocol`` (that of ``reward`` covers how
        it is combined, too).
    facts
        What may have changed beside the weights, as text by name: ``judge.model``,
        ``judge.revision``, ``judge.served``, ``code``, ``versions.torch``, ``host.name`` …
    """

    version: int
    nightly: str
    night: str
    checkpoint: str
    canary: bool
    protocol: str
    protocol_name: str
    protocol_set: str
    decoding: str
    digest: str
    source: str
    stage: str
    samples: str
    run: str
    fresh: bool
    late: bool
    measured_in: str
    evaluated_at: str
    numbers: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Unique in its history; also the name of its file."""
        return f"{self.night}--{self.checkpoint}--{self.protocol}"
