"""Records of certificates: one file per node in a workspace.

In: a :class:`Certificate`. Out: the same, read from any shell::

    certificates/<name of the node>.json        by `refiner certify`; a newer one replaces it
"""

from __future__ import annotations

import re

from infra.host.processes import host_name
from infra.store import atomic
from infra.store.record_files import RecordFiles
from infra.store.room import no_space_guard
from refiner_core.contract.certificates import CERTIFICATE_VERSION, Certificate
from refiner_core.contract.records import to_json


class CertificateRecords(RecordFiles):
    """The part of a workspace that knows certificates of machines."""

    def write_certificate(self, certificate: Certificate) -> None:
        """Record a certificate in place of an earlier one of its node.

        Raises
        ------
        NoSpaceError
            It did not fit; the earlier one is still there.
        """
        path = self.layout.certificate(_file_name(str(certificate.host["name"])))
        with no_space_guard(self.root, "recording the certificate"):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_json(path, to_json(certificate))

    def read_certificate(self, host: str | None = None) -> Certificate | None:
        """The certificate of a node, by default of this one; None without one.

        Raises
        ------
        WorkspaceError
            It is damaged, or of a newer version.
        """
        path = self.layout.certificate(_file_name(host or host_name()))
        fix = f"delete {path}, and certify the node again with `refiner certify`"
        return self.read_versioned(
            path, Certificate, CERTIFICATE_VERSION, what="certificate", fix=fix
        )

    def read_certificates(self) -> list[Certificate]:
        """The certificates of all nodes, oldest first.

        Raises
        ------
        WorkspaceError
            One of them is damaged, or of a newer version.
        """
        folder = self.layout.certificate("").parent
        names = sorted(p.stem for p in folder.glob("*.json")) if folder.is_dir() else []
        found = [one for name in names if (one := self.read_certificate(name)) is not None]
        return sorted(found, key=lambda one: one.made_at)


def _file_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", host)
