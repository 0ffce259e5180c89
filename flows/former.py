"""Former names that still work, with a warning, for one release: commands and names of `flows.api`.

Former options are declared beside their commands, by :func:`flows.cli.aliases.former_option`; the
former field and JSON key ``mend`` (now ``fix``) of a finding is kept by
:class:`infra.doctor.check.CheckResult` and :func:`flows.doctor.findings_json`.
"""

#: Former command of `refiner` -> command.
COMMANDS = {"recipes": "list recipes", "profiles": "list profiles"}
#: Former name in `flows.api` -> name.
API_NAMES = {
    **{"list_runs": "list_rows", "KnownRun": "RunRow"},
    **{"deploy_nightly": "deploy", "rescore_share": "rescore", "serve_nightly": "serve"},
    **{"Begun": "InitFolder", "Explained": "StageExplanation", "Launch": "LaunchOptions"},
    **{"Pinned": "PinnedStage", "Played": "PlayedTask", "Rescored": "RescoreResult"},
    **{"Stopped": "StoppedServers", "Synced": "SyncResult"},
}
