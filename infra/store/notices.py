"""What somebody was to be told, and by which channels it has gone out: one folder of messages.

In: messages by their key, which names what has happened. Out: the same, read from any shell. A key
is recorded once, by whoever comes first, so that one thing that happens is one message, however
many processes see it.

    <folder>/<key>/message.json  delivered-CHANNEL.json  failed-CHANNEL-0001.json
                   sending-CHANNEL.json          the process that sends it now
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.host.processes import ProcessId
from infra.host.reading import exists, make_folder, names_in
from infra.store import atomic
from infra.store.layout import Layout
from infra.store.record_files import RecordFiles, now_text
from infra.store.room import no_space_guard


class Notices(RecordFiles):
    """The messages of a folder; it need not exist.

    Parameters
    ----------
    layout, folder
        The workspace, and the folder in it.
    file
        What a message's own file is called.
    """

    def __init__(self, layout: Layout, folder: Path, file: str = "message.json") -> None:
        super().__init__(layout)
        self.folder, self._file = folder, file

    def record(self, key: str, value: Mapping[str, Any]) -> bool:
        """Record a message; True for the one who did.

        Raises
        ------
        NoSpaceError
            There is no room for it.
        """
        return self._create(self.folder / key / self._file, {"at": now_text(), **value, "id": key})

    def read(self, key: str) -> dict[str, Any] | None:
        """One message; None if it was not recorded."""
        return self.read_control(self.folder / key / self._file)

    def all(self) -> list[dict[str, Any]]:
        """All messages, by the time that their writers' clocks gave."""
        found = [self.read(path.name) for path in self._sorted(self.folder, "*")]
        return sorted((m for m in found if m is not None), key=lambda m: (m["at"], m["id"]))

    def delivered(self, key: str, channel: str) -> bool:
        """Whether a message has gone out by a channel; not as far as can be seen, where the
        workspace cannot be read."""
        try:
            return exists(self.folder / key / f"delivered-{channel}.json")
        except OSError:
            return False

    def note_delivery(self, key: str, channel: str, error: str = "") -> None:
        """A message has gone out by a channel, or not, and why."""
        folder = self.folder / key
        if not error:
            self._create(folder / f"delivered-{channel}.json", {"at": now_text()})
            return
        number = len(self._sorted(folder, f"failed-{channel}-[0-9]*.json")) + 1
        self._create(
            folder / f"failed-{channel}-{number:04d}.json", {"why": error, "at": now_text()}
        )

    def failures(self, key: str) -> dict[str, str]:
        """Channel -> why a message has not gone out by it yet, by the last try."""
        found: dict[str, str] = {}
        for path in self._sorted(self.folder / key, "failed-*.json"):
            channel = path.stem.removeprefix("failed-").rpartition("-")[0]
            if not self.delivered(key, channel):
                found[channel] = str((self.read_control(path) or {}).get("why", ""))
        return found

    def begin_sending(self, key: str, channel: str) -> bool:
        """Say that this process sends a message now; False where another one does."""
        path = self.folder / key / f"sending-{channel}.json"
        who, own = self.read_control(path), ProcessId.of()
        if who is not None:
            other = ProcessId.parse(str(who["process"]))
            if other != own and other.alive:
                return False
        with no_space_guard(self.root, "noting who sends a message"):
            make_folder(path.parent)
            atomic.write_json(path, {"process": str(own)})
        return True

    def _create(self, path: Path, value: Mapping[str, Any]) -> bool:
        with no_space_guard(self.root, "recording what somebody is to be told"):
            make_folder(path.parent)
            return atomic.create_json(path, dict(value))

    @staticmethod
    def _sorted(folder: Path, pattern: str) -> list[Path]:
        return [folder / name for name in fnmatch.filter(names_in(folder), pattern)]
