"""Records of what was found of a stage (proofs) and of a machine (certificates).

In: :class:`ResumeProof` and :class:`Certificate` values. Out: the same, read from any shell; the
newest of each::

    proofs/<stage id>/proof.json          by `refiner prove-resume`, last
    proofs/scratch/<id>/                  workspaces of a proof in progress, or of one that diverged
                        owner.json        the process that works on it
    certificates/<node>.json              by `refiner certify`

``scratch`` lies with the data. One writer per file; a second proof of a stage, or certificate of a
node, replaces the first.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from pathlib import Path

from infra.host.processes import ProcessId, host_name
from infra.store import atomic
from infra.store.room import no_space_guard
from infra.store.workspace import Workspace
from refiner_core.contract.certificates import CERTIFICATE_VERSION, Certificate
from refiner_core.contract.proofs import PROOF_VERSION, ResumeProof
from refiner_core.contract.records import to_json

_OWNER, _KEPT = "owner.json", "kept.json"


def write_proof(workspace: Workspace, proof: ResumeProof) -> None:
    """Record a proof, with its verdict for readers that only look.

    Raises
    ------
    NoSpaceError
        It did not fit; the earlier one is still there.
    """
    path = workspace.layout.proof(proof.stage_id)
    with no_space_guard(workspace.root, "recording the proof"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, {**to_json(proof), "verdict": proof.verdict})


def read_proof(workspace: Workspace, stage_id: str) -> ResumeProof | None:
    """The newest proof of a stage; None without one.

    Raises
    ------
    WorkspaceError
        It is damaged, or of a newer version.
    """
    path = workspace.layout.proof(stage_id)
    fix = f"delete {path.parent}, and prove it again with `refiner prove-resume`"
    return workspace.load(ResumeProof, path, newest=PROOF_VERSION, fix=fix)


def new_scratch(workspace: Workspace, name: str) -> Path:
    """A folder for the workspaces of a proof. Those of dead processes go first, but for what was
    kept on purpose."""
    folder = workspace.layout.proof_scratch
    _remove_abandoned(folder)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    made = folder / f"{stamp}-{name}-{secrets.token_hex(2)}"
    with no_space_guard(folder, "making room for a proof"):
        made.mkdir(parents=True)
        atomic.write_json(made / _OWNER, {"process": str(ProcessId.of())})
    return made


def keep_scratch(scratch: Path) -> None:
    """Let it stay for somebody to look into, until they delete it."""
    atomic.write_json(scratch / _KEPT, {"why": "kept by `refiner prove-resume`"})


def _remove_abandoned(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        owner = atomic.read_json(path / _OWNER)
        if owner is None or (path / _KEPT).exists():
            continue
        process = ProcessId.parse(str(owner["process"]))
        if process.here and not process.alive:
            atomic.remove_tree(path)


def write_certificate(workspace: Workspace, certificate: Certificate) -> None:
    """Record the certificate of a node.

    Raises
    ------
    NoSpaceError
        It did not fit; the earlier one is still there.
    """
    path = workspace.layout.certificate(_file_name(str(certificate.host["name"])))
    with no_space_guard(workspace.root, "recording the certificate"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, to_json(certificate))


def read_certificate(workspace: Workspace, host: str | None = None) -> Certificate | None:
    """The certificate of a node, by default of this one; None without one.

    Raises
    ------
    WorkspaceError
        It is damaged, or of a newer version.
    """
    path = workspace.layout.certificate(_file_name(host or host_name()))
    fix = f"delete {path}, and certify the node again with `refiner certify`"
    return workspace.load(Certificate, path, newest=CERTIFICATE_VERSION, fix=fix)


def read_certificates(workspace: Workspace) -> list[Certificate]:
    """The certificates of all nodes, oldest first.

    Raises
    ------
    WorkspaceError
        One of them is damaged, or of a newer version.
    """
    folder = workspace.layout.certificate("").parent
    names = sorted(p.stem for p in folder.glob("*.json")) if folder.is_dir() else []
    found = [one for name in names if (one := read_certificate(workspace, name)) is not None]
    return sorted(found, key=lambda one: one.made_at)


def _file_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", host)
