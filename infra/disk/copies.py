"""Copies of a stage's weights that were published, and whether they can be relied on.

In: records of `publish` stages. Out: :class:`Copy` values by the stage whose weights they are. A
record says what lay there when it was published, verified hash by hash; :class:`FreshLook` says
what lies there now, and is asked right before anything is deleted: a folder is read once more, a
Hub is asked for the files of the commit. Who cannot be asked vouches for nothing.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infra.host.mounts import existing, project_id
from infra.store.published import target_damage
from infra.store.workspace import Workspace
from refiner_core.contract.config import PublishConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import OutputFile, StageRecord

log = logging.getLogger(__name__)
WEIGHTS = ".safetensors"
#: A Hub that did not answer, or has the files no more, is asked again after so long.
_BELIEVED_S = 60.0
_LOOK_S = 10.0


class Copy(NamedTuple):
    """One publication of a stage's weights.

    ``target`` is the folder, or the address of the revision; ``names`` maps the SHA-256 of its
    files to their names there; ``by`` is the stage that published.
    """

    where: Literal["folder", "hub"]
    target: str
    names: Mapping[str, str]
    repo_id: str = ""
    revision: str = ""
    commit: str | None = None
    by: str = ""

    @property
    def text(self) -> str:
        """For people: the folder, or the repository at its commit."""
        if self.where == "folder":
            return self.target
        return f"{self.target} (commit {(self.commit or '')[:12]})"

    @property
    def endpoint(self) -> str:
        """The Hub's address."""
        return self.target.partition(f"/{self.repo_id}")[0]

    def has(self, files: Iterable[OutputFile]) -> bool:
        """Whether all of these files are among what was published, and as far as one can tell
        without reading them still are."""
        return all(self._has(file) for file in files)

    def _has(self, file: OutputFile) -> bool:
        name = self.names.get(file.sha256)
        if name is None or self.where == "hub":
            return name is not None
        try:
            return (Path(self.target) / name).stat().st_size == file.bytes
        except OSError:
            return False

    def is_elsewhere(self, folder: Path) -> bool:
        """Whether it does not lie on the quota or file system that ``folder`` lies on."""
        return self.where == "hub" or _elsewhere(Path(self.target), folder)

    def way_back(self, files: Sequence[OutputFile], folder: Path) -> str:
        """The command that puts ``files`` (relative to ``folder``) back where they were."""
        names = [self.names[f.sha256] for f in files]
        where = folder / Path(files[0].path).parent
        if self.where == "folder":
            sources = [str(Path(self.target) / name) for name in names]
            return shlex.join(["cp", *sources, str(where)])
        words = ["hf", "download", self.repo_id, *names, "--revision", str(self.commit)]
        return f"HF_ENDPOINT={self.endpoint} " + shlex.join([*words, "--local-dir", str(where)])


def _elsewhere(target: Path, folder: Path) -> bool:
    """Whether two do not share a file system, or are accounted to different projects."""
    try:
        if target.stat().st_dev != existing(folder).stat().st_dev:
            return True
    except OSError:
        return False
    return project_id(target) != project_id(folder)


def copies_of(
    workspace: Workspace, records: Mapping[str, StageRecord]
) -> dict[str, tuple[Copy, ...]]:
    """Stage id -> what its weights may have been published to and, as far as this machine can
    tell, still lie in."""
    found: dict[str, tuple[Copy, ...]] = {}
    for stage_id, record in records.items():
        result = record.result
        if record.spec.kind != "publish" or result is None or "target" not in result.report:
            continue
        paths = workspace.layout.attempt(stage_id, result.attempt)
        try:
            inputs = workspace.part(paths, "inputs")
            copy = _copy(stage_id, result.report)
        except (RefinerError, KeyError, TypeError) as error:
            log.warning("the publication %s is not counted: %s", stage_id, error)
            continue
        if copy is None:
            continue
        for role, source in inputs.items():
            if role.partition("-")[0] == "weights":  # `weights-step50`: the best of several
                found[source] = (*found.get(source, ()), copy)
    return found


def _copy(stage_id: str, report: Mapping[str, Any]) -> Copy | None:
    """What a report tells of; None where that is not verified, or known to be gone."""
    names = {f["sha256"]: f["path"] for f in report.get("files", ())}
    target, where = str(report["target"]), report.get("where", "folder")
    if where == "hub":
        if not (report.get("verified") is True and report.get("commit")):
            return None
        repo_id, revision = str(report["repo_id"]), str(report["revision"])
        return Copy("hub", target, names, repo_id, revision, str(report["commit"]), stage_id)
    if target_damage(report) or not Path(target).is_absolute():
        return None
    return Copy("folder", target, names, str(report.get("repo_id", "")), by=stage_id)


class FreshLook:
    """Looks at copies now.

    Parameters
    ----------
    clock
        Seconds, monotonic: a Hub that could not vouch is left alone for a minute, so that a
        trainer that waits for room does not wait for the network, too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doubts: dict[tuple[str, str | None], tuple[float, str]] = {}

    def doubt(self, copy: Copy, files: Sequence[OutputFile]) -> str:
        """Why the copy cannot be relied on for these files now; empty: it can."""
        if copy.where == "folder":
            return _doubt_of_folder(copy, files)
        key = (copy.target, copy.commit)
        if key in self._doubts and self._clock() - self._doubts[key][0] < _BELIEVED_S:
            return self._doubts[key][1]
        doubt = _doubt_of_hub(copy, files)
        if doubt:
            self._doubts[key] = (self._clock(), doubt)
        return doubt


def _doubt_of_folder(copy: Copy, files: Sequence[OutputFile]) -> str:
    for file in files:
        path = Path(copy.target) / copy.names[file.sha256]
        with path.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                return f"{path} is not what was published"
    return ""


def _doubt_of_hub(copy: Copy, files: Sequence[OutputFile]) -> str:
    """Asked in the middle of a trainer's save: answers come within seconds, nothing is tried twice.
    Our token goes to the Hub that this process is set up for and to no other address."""
    from huggingface_hub import constants

    from infra.hub.client import endpoint_now, open_hub

    if constants.HF_HUB_OFFLINE:
        return f"{copy.text} was not looked at: HF_HUB_OFFLINE is set here"
    if copy.endpoint != endpoint_now():
        return f"{copy.text} was not looked at: HF_ENDPOINT is {endpoint_now()} here"
    config = PublishConfig(request_timeout_s=_LOOK_S)
    try:
        with open_hub(copy.repo_id, config, copy.endpoint, patience_s=0.0) as hub:
            there = hub.tree(str(copy.commit))
    except (RefinerError, OSError) as error:
        return f"{copy.text} cannot be relied on: {error}"
    for file in files:
        found = there.get(copy.names[file.sha256])
        if found is None or (found.bytes, found.sha256) != (file.bytes, file.sha256):
            return f"{copy.text} has no {copy.names[file.sha256]} of the hash that was published"
    return ""
