"""A protocol with all that is said of it: its file, what it fixes, its fingerprint.

In: a shipped name or a YAML file. Out: a :class:`ProtocolFacts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.checking.sources import protocol_sources
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.protocols import ProtocolFile, protocol_fingerprint, refused_under
from refiner_core.contract.recipes.protocol_files import (
    description_of,
    find_protocol,
    load_protocol,
)


@dataclass(frozen=True)
class ProtocolFacts:
    """A protocol, the file that it stands in, and the fingerprint of what it fixes in effect."""

    path: Path
    protocol: ProtocolFile
    description: str
    fingerprint: str

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "name": self.protocol.name,
            "file": str(self.path),
            "fingerprint": self.fingerprint,
            "description": self.description,
            "sections": list(self.protocol.sections),
            "fixed": self.protocol.values(),
            "text": self.protocol.text,
        }


def facts_of_protocol(name: str) -> ProtocolFacts:
    """The facts of a shipped protocol, or of a file.

    Raises
    ------
    ConfigurationError
        There is none of that name, or it is no protocol.
    """
    path, protocol = find_protocol(name), load_protocol(name)
    with refused_under(protocol.name):
        sources = protocol_sources(protocol.over(RecipeConfig()))
    fingerprint = protocol_fingerprint(protocol, sources)
    return ProtocolFacts(path, protocol, description_of(path), fingerprint)
