"""Records of proofs: how a training stage compares with itself interrupted.

In: :class:`ResumeProof` values. Out: the same, read from any shell; the newest of each stage::

    proofs/<stage id>/proof.json          by `refiner prove-resume`, last
    proofs/scratch/<id>/                  workspaces of a proof in progress, or of one that diverged
                        owner.json        the process that works on it

``scratch`` lies with the data. One writer per file; a second proof of a stage replaces the first.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path

from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.record_files import RecordFiles
from infra.store.room import no_space_guard
from refiner_core.contract.proofs import PROOF_VERSION, ResumeProof
from refiner_core.contract.records import to_json

_OWNER, _KEPT = "owner.json", "kept.json"


class ProofRecords(RecordFiles):
    """The part of a workspace that knows proofs."""

    def write_proof(self, proof: ResumeProof) -> None:
        """Record a proof in place of an earlier one of its stage, with its verdict for readers that
        only look.

        Raises
        ------
        NoSpaceError
            It did not fit; the earlier one is still there.
        """
        path = self.layout.proof(proof.stage_id)
        with no_space_guard(self.root, "recording the proof"):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_json(path, {**to_json(proof), "verdict": proof.verdict})

    def read_proof(self, stage_id: str) -> ResumeProof | None:
        """The newest proof of a stage; None without one.

        Raises
        ------
        WorkspaceError
            It is damaged, or of a newer version.
        """
        path = self.layout.proof(stage_id)
        fix = f"delete {path.parent}, and prove it again with `refiner prove-resume`"
        return self.read_versioned(path, ResumeProof, PROOF_VERSION, what="proof", fix=fix)

    # ------------------------------------------------------------ scratch

    def new_scratch(self, name: str) -> Path:
        """A folder for the workspaces of a proof. Those of dead processes go first, but for what
        was kept on purpose."""
        folder = self.layout.proof_scratch
        self._sweep(folder)
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        made = folder / f"{stamp}-{name}-{secrets.token_hex(2)}"
        with no_space_guard(folder, "making room for a proof"):
            made.mkdir(parents=True)
            atomic.write_json(made / _OWNER, {"process": str(ProcessId.of())})
        return made

    def keep_scratch(self, scratch: Path) -> None:
        """Let it stay for somebody to look into, until they delete it."""
        atomic.write_json(scratch / _KEPT, {"why": "kept by `refiner prove-resume`"})

    def _sweep(self, folder: Path) -> None:
        for path in folder.iterdir() if folder.is_dir() else ():
            owner = atomic.read_json(path / _OWNER)
            if owner is None or (path / _KEPT).exists():
                continue
            process = ProcessId.parse(str(owner["process"]))
            if process.here and not process.alive:
                atomic.remove_tree(path)
