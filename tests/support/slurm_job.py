"""A job that tells what reaches it: ``slurm_job.py --workspace DIR STAGE_ID ATTEMPT``.

``behaviour.json`` in the workspace says how long it works (``work_s``), how long it saves after
SIGTERM (``save_s``; none: it takes no notice), how much memory it takes (``take_mb``) and how it
ends (``exit_code``), for all or by stage id. What happens is a line each in ``said.txt`` beside the
attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import infra  # where it comes from is told, too


def main() -> int:
    """Work, until it is done or asked to save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("stage")
    parser.add_argument("attempt", type=int)
    args = parser.parse_args()
    told = json.loads((args.workspace / "behaviour.json").read_text())
    told |= told.get(args.stage, {})
    folder = args.workspace / "stages" / args.stage / "attempts" / f"{args.attempt:04d}"
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append("TERM"))

    def print_line(what: str) -> None:
        with (folder / "said.txt").open("a") as file:
            print(time.monotonic(), what, file=file)

    started = {"process": "x:1:1.0", "node": os.environ.get("SLURMD_NODENAME", "")}
    (folder / "started.json").write_text(json.dumps(started))
    settings = ("SLURM_RESTART_COUNT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "HF_TOKEN")
    print_line("begin " + json.dumps({k: os.environ.get(k) for k in settings}))
    print_line(f"infra {infra.__file__}")
    taken = bytearray(int(told.get("take_mb", 0)) << 20)
    until = time.monotonic() + float(told.get("work_s", 0))
    while time.monotonic() < until:
        time.sleep(0.02)
        if asked and told.get("save_s") is not None:
            print_line("asked")
            time.sleep(float(told["save_s"]))
            print_line("saved")
            return 6
    print_line(f"end {len(taken)}")
    return int(told.get("exit_code", 0))


if __name__ == "__main__":
    sys.exit(main())
