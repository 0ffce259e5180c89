"""Cards as files, folders, repositories and records: the work of `refiner card`.

In: a README.md from any place, or a finished publication of a workspace. Out: errors of the card
(by :mod:`refiner_core.cards.lint`), or the card rendered again from records. Executes nothing on
the card, and writes nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from infra.store.checkpoints import hash_of
from infra.store.stage_records import CARD, EVIDENCE
from infra.store.workspace import Workspace
from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import load_evidence
from refiner_core.cards.lint import LARGEST_EVIDENCE, CardFinding
from refiner_core.cards.lint import check_card as findings_of
from refiner_core.contract.config import PublishConfig, RecipeConfig
from refiner_core.contract.errors import (
    ConfigurationError,
    DataError,
    HubRefused,
    RefinerError,
    no_such,
)
from refiner_core.contract.records import RunRecord

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@(?P<revision>[^\s@]+))?")
_HUB_PATIENCE_S = 20.0
_PUBLICATIONS = ("publish", "card")


class _Source(NamedTuple):
    """A card: its name in findings (``README.md``, ``OWNER/NAME/README.md``), its text, the text of
    its ``refiner.json`` (None without one), and the folder of a complete publication, so that the
    other files can be checked, too."""

    name: str
    text: str
    evidence: str | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class CardCheck:
    """Findings of a check."""

    name: str
    findings: tuple[CardFinding, ...]
    has_evidence: bool

    @property
    def errors(self) -> int:
        """Number of findings that make the card invalid."""
        return sum(f.is_error for f in self.findings)

    @property
    def warnings(self) -> int:
        """Number of other findings."""
        return len(self.findings) - self.errors


def check_card(
    target: str, evidence: str | Path | None = None, *, template: str | Path | None = None
) -> CardCheck:
    """Check a model card: numbers, licence, leaks. Changes nothing.

    Parameters
    ----------
    target
        A README.md, the folder of a publication, ``OWNER/NAME[@revision]`` on the Hub, or ``-`` for
        stdin.
    evidence
        The ``refiner.json`` of the card (default: the one beside it).
    template
        Your own template of the card; no other one is run.

    Returns
    -------
    Checked
        Findings, each with its line and the fix.

    Raises
    ------
    ConfigurationError
        There is no such card.
    DataError
        It cannot be read as text.
    HubRefused, HubOutage
        The Hub does not return it.
    """
    name, text, told, folder = _find_card(target)
    if evidence is not None:
        told = _read(Path(evidence))
    own = None if template is None else _read(Path(template))
    findings = findings_of(text, told, template=own)
    if folder is not None and told is not None:
        findings += _files(folder, told)
    return CardCheck(name, tuple(sorted(findings)), told is not None)


def _find_card(target: str) -> _Source:
    """The card named on the command line; see :func:`check_card`."""
    if target == "-":
        return _Source("<stdin>", _text(sys.stdin.buffer.read(4 * LARGEST_EVIDENCE + 1), "stdin"))
    path = Path(target).expanduser()
    if path.is_dir():
        card = path / CARD
        if not card.is_file():
            raise ConfigurationError(
                f"{target} has no {CARD}.",
                expected=f"the folder of a publication, with {CARD} and {EVIDENCE} in it",
                fix="name the folder below OWNER/NAME, or the card itself",
            )
        return _Source(str(card), _read(card), _read_evidence_file(path), path)
    if path.is_file():
        beside = _read_evidence_file(path.parent) if path.name == CARD else None
        return _Source(str(path), _read(path), beside)
    found = _HUB_ID.fullmatch(target)
    if found is None or target.endswith((".md", ".txt", ".json")):
        raise ConfigurationError(
            f"There is no {target}.",
            expected="a README.md, the folder of a publication, OWNER/NAME[@revision] on the Hub, "
            "or - for stdin",
            fix="check the path",
        )
    return _from_hub(found["id"], found["revision"] or "main")


def _from_hub(repo_id: str, revision: str) -> _Source:
    """Card and evidence of a repository on the Hub; downloads nothing else."""
    from infra.hub.target import open_hub

    with open_hub(repo_id, PublishConfig(), patience_s=_HUB_PATIENCE_S) as hub:
        card = hub.text(revision, CARD)
        if card is None:
            raise HubRefused(
                f"The Hub shows no {CARD} of {repo_id} at {revision}, and there is no folder "
                f"{repo_id} here.",
                expected="a repository with a card that this token may see",
                fix="check name and revision; private ones need a token (`hf auth login`)",
            )
        named = repo_id if revision == "main" else f"{repo_id}@{revision}"
        return _Source(f"{named}/{CARD}", card, hub.text(revision, EVIDENCE))


def _read_evidence_file(folder: Path) -> str | None:
    path = folder / EVIDENCE
    return _read(path) if path.is_file() else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:  # enough for the check of its size
            return _text(file.read(4 * LARGEST_EVIDENCE + 1), str(path))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"There is no file {path}.",
            expected=f"the {EVIDENCE} that was published with the card",
            fix="check the path",
        ) from error


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not text in UTF-8 (byte {error.start})",
            expected=f"a card in Markdown, or the {EVIDENCE} of a card, in JSON",
            fix="name such a file as it was published, or save it as UTF-8",
        ) from error


def _files(folder: Path, evidence: str) -> Iterator[CardFinding]:
    """Findings for files beside the card that differ from its evidence."""
    try:
        listed = load_evidence(evidence).files
    except RefinerError:
        return  # already reported as unusable
    for file in listed:
        path, differs = folder / file.path, ""
        leaves = file.path.startswith("/") or ".." in PurePosixPath(file.path).parts
        if leaves or not path.is_file():
            differs = "is missing"
        elif (size := path.stat().st_size) != file.bytes:
            differs = f"has {size} bytes, its evidence says {file.bytes}"
        elif (digest := hash_of(path)) != file.sha256:
            differs = f"has SHA-256 {digest[:12]}…, its evidence says {file.sha256[:12]}…"
        if differs:
            fix = "publish again; existing files are not sent again"
            yield CardFinding(1, "file-differs", f"{file.path} {differs}", fix)


# ---------------------------------------------------------------- from records


@dataclass(frozen=True)
class CardPreview:
    """A card rendered from records now, and the published one (None if it is not recorded);
    ``folder`` is the record of its stage."""

    run: str
    stage: str
    card: str
    published: str | None
    folder: Path

    @property
    def differs(self) -> bool:
        """True if it differs from the published card."""
        return self.published is not None and self.published != self.card

    @property
    def again(self) -> list[str]:
        """Words of the command that repeats the stage."""
        if self.stage == "publish-best":  # by hand, steps are named
            return ["resume", self.run]
        step = self.stage.partition("-step")[2]
        return ["publish", self.run, *(["--step", step] if step else [])]

    def difference(self, most: int = 20) -> list[str]:
        """The first lines of the difference."""
        before, now = (self.published or "").splitlines(), self.card.splitlines()
        names = ("published", "from records now")
        found = list(unified_diff(before, now, *names, lineterm="", n=0))
        more = [f"… {len(found) - most} more lines"] if len(found) > most else []
        return found[:most] + more


def show_card(
    words: Sequence[str] = (), workspace: str | Path = RecipeConfig.workspace
) -> CardPreview:
    """The card of a finished publication, rendered again from its records.

    Parameters
    ----------
    words
        A run (default: the newest) and one of its ``publish`` or ``card`` stages (default: the
        last).
    workspace
        The folder that has its records.

    Returns
    -------
    CardPreview
        ``differs`` is True if the published card was different.

    Raises
    ------
    ConfigurationError
        There is no such run or publication.
    """
    from flows.publishing.facts import facts_of_stage

    ws = Workspace.read_only(workspace)
    run, wanted = _run_and_stage(ws, words)
    done = _finished(ws, run)
    here = f"{run.run} workspace={ws.root}"
    if wanted is None:
        if not done:
            raise ConfigurationError(
                f"No publication of {run.run} is done.",
                expected="a `publish` or `card` stage that is done",
                fix=f"see `refiner status {here}`, or publish it: `refiner publish {here}`",
            )
        wanted = _latest(done)
    elif wanted not in done:
        fix = f"name one of these; see `refiner status {here}`"
        raise no_such(f"{run.run} has no finished publication", wanted, done, fix)
    facts = facts_of_stage(ws, run.stages[wanted])
    result = ws.read_result(run.stages[wanted])
    published = result.report.get("card") if result is not None else None
    folder = ws.layout.stage(run.stages[wanted]).control
    return CardPreview(run.run, wanted, build_card(facts), published, folder)


def _run_and_stage(workspace: Workspace, words: Sequence[str]) -> tuple[RunRecord, str | None]:
    from flows.running.status import newest_runs, required_run

    if len(words) > 2:
        raise ConfigurationError(
            f"card show was given {len(words)} words: {' '.join(words)}.",
            expected="a run and a stage, or one of them, or none",
            fix="remove the extra words",
        )
    published = (run for run in newest_runs(workspace, models=True) if _finished(workspace, run))
    what = "a workspace with a run that has published"
    newest = next(published, None) or required_run(workspace, None, what)
    if len(words) == 1 and words[0].partition("-")[0] in _PUBLICATIONS:
        return newest, words[0]
    run = required_run(workspace, words[0], what) if words else newest
    return run, words[1] if len(words) == 2 else None


def _finished(workspace: Workspace, run: RunRecord) -> dict[str, str]:
    """Name -> id of the finished publications of a run."""
    return {
        name: stage_id
        for name, stage_id in run.stages.items()
        if name.partition("-")[0] in _PUBLICATIONS and workspace.read_result(stage_id) is not None
    }


def _latest(done: Mapping[str, str]) -> str:
    """Name of the last checkpoint's publication, with its metrics if they exist."""
    names = [n for n in ("card-progression", "card", "publish", "publish-best") if n in done]
    steps = {name: int(re.sub(r"\D", "", name) or 0) for name in done}
    return names[0] if names else max(done, key=lambda name: (steps[name], name.startswith("card")))
