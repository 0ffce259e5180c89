"""Records of sweeps: what each was launched as, version by version, and which run is which trial.

In: :class:`SweepRecord` values and ids of runs. Out: the same, read from any shell.

    sweeps/<name>/versions/0001.json      one for each time it became something else; exclusive
                  pinned/ diffs/          code that runs were begun with, and where it came from
                  use.json                what done stages have used, by the orchestrator
                  runs/<trial>.json       the run that works on a trial now, by the orchestrator
                  orchestrator.json       the process that works on the sweep, by itself
                  turns/ cancel/          as for a run
                  events.jsonl            what happened, one JSON line each
"""

from __future__ import annotations

from pathlib import Path

from infra.host.reading import make_folder, names_in
from infra.store import atomic
from infra.store.record_files import RecordFiles
from infra.store.room import no_space_guard
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.fields import suggest
from refiner_core.contract.records import to_json
from refiner_core.contract.sweep_records import SweepRecord


class SweepRecords(RecordFiles):
    """The part of a workspace that knows sweeps."""

    def sweep_folder(self, name: str) -> Path:
        """Where a sweep's files lie."""
        return self.layout.sweeps / name

    def sweep_names(self) -> list[str]:
        """All recorded sweeps, by the time of their first version."""
        begun = [(self.sweep_versions(name), name) for name in names_in(self.layout.sweeps)]
        first = {name: self._version(name, v[0]).started_at for v, name in begun if v}
        return sorted(first, key=lambda name: (first[name], name))

    def sweep_versions(self, name: str) -> list[int]:
        """Numbers of a sweep's versions, ascending; none for one that is not recorded."""
        names = names_in(self.sweep_folder(name) / "versions")
        found = (n.removesuffix(".json") for n in names if n[0].isdigit() and n.endswith(".json"))
        return sorted(map(int, found))

    def read_sweep(self, name: str, number: int | None = None) -> SweepRecord:
        """A version of a sweep (default: the newest).

        Raises
        ------
        ConfigurationError
            There is none of that name or number; names the nearest.
        """
        versions = self.sweep_versions(name)
        if not versions:
            known = self.sweep_names()
            raise ConfigurationError(
                f"{self.root} has no sweep {name!r}.{suggest(name, known)}",
                expected=f"one of: {', '.join(known) or '(there are none)'}",
                fix="name one of these, or another `workspace=DIR`",
            )
        if number is not None and number not in versions:
            raise ConfigurationError(
                f"Sweep {name} has no version {number}.",
                expected=f"one of: {', '.join(map(str, versions))}",
                fix="name one of these",
            )
        return self._version(name, number or versions[-1])

    def write_sweep(self, record: SweepRecord) -> bool:
        """Record a version; False if somebody else was faster and it is taken."""
        folder = self.sweep_folder(record.name) / "versions"
        with no_space_guard(self.root, "recording the sweep"):
            make_folder(folder)
            return atomic.create_json(folder / f"{record.number:04d}.json", to_json(record))

    def note_trial(self, sweep: str, trial: str, run_id: str) -> None:
        """Say which run works on a trial (``ARM/seedN``). One writer: the sweep's orchestrator."""
        path = self._trial_path(sweep, trial)
        with no_space_guard(self.root, "recording a trial"):
            make_folder(path.parent)
            atomic.write_json(path, {"trial": trial, "run": run_id})

    def trial_run(self, sweep: str, trial: str) -> str | None:
        """The run that works, or has worked, on a trial; None if it has not begun."""
        found = self.read_control(self._trial_path(sweep, trial))
        return None if found is None else str(found["run"])

    def _trial_path(self, sweep: str, trial: str) -> Path:
        return self.sweep_folder(sweep) / "runs" / f"{trial.replace('/', '--')}.json"

    def _version(self, name: str, number: int) -> SweepRecord:
        path = self.sweep_folder(name) / "versions" / f"{number:04d}.json"
        record = self._load(SweepRecord, path)
        if record is None:
            raise WorkspaceError(
                f"Version {number} of sweep {name} is gone: there is no {path}",
                expected="all versions that the sweep's folder names",
                fix="restore the file, or launch the sweep anew: `refiner sweep SWEEP`",
            )
        return record
