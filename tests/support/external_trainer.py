"""A trainer as one finds it: knows nothing of refiner, saves straight into place, own layout.

    python external_trainer.py --out out --steps 40 [--resume_from out/ckpt_12]

It "trains" one matrix by a rule that depends on the seed and the step alone, so that a run that was
cut off and resumed ends with the bytes of one that was not. A checkpoint is ``ckpt_12/`` with
``model.safetensors`` (written in several writes, no temporary name) and then ``trainer.json``.
SIGTERM and SIGINT make it save and exit with 0. Any error ends it with a traceback.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import struct
import sys
import time
from pathlib import Path

STOP = []


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--save_every", type=int, default=4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--resume_from")
    p.add_argument("--step_s", type=float, default=0.01)
    p.add_argument("--kib", type=int, default=64, help="size of the weights")
    p.add_argument("--like", help="take names and shapes of tensors from this model.safetensors")
    p.add_argument("--write_s", type=float, default=0.0, help="pause between the writes of a save")
    p.add_argument("--die_at", type=int, help="raise at this step")
    p.add_argument("--leave_at", type=int, help="end with 0 there, once or always")
    p.add_argument("--always", action="store_true")
    p.add_argument("--hang_at", type=int)
    p.add_argument("--until", type=Path, help="wait after step 8 until this file exists")
    p.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    p.add_argument("--child", action="store_true", help="start a background process, as tools do")
    return p.parse_args()


def layout(args):
    if args.like:
        whole = Path(args.like).read_bytes()
        (n,) = struct.unpack("<Q", whole[:8])
        return whole[8 : 8 + n], whole[8 + n :]
    size = args.kib * 1024
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    ).encode()
    return header, struct.pack("<f", 1.0) * (size // 4)


def train(state, step, seed):
    """One 'optimiser step' on a number that the weights are made of."""
    return math.sin(state * 1.7 + step * 0.13 + seed) * 0.5 + state * 0.5


def save(args, step, state, header, body):
    folder = Path(args.out) / f"ckpt_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    mark = struct.pack("<d", state)
    scaled = body[: -len(mark)] + mark if not args.like else body
    with (folder / "model.safetensors").open("wb", buffering=0) as f:
        f.write(struct.pack("<Q", len(header)) + header)
        piece = max(1, len(scaled) // 8)
        for i in range(0, len(scaled), piece):
            written = f.write(scaled[i : i + piece])
            if written < len(scaled[i : i + piece]):  # near the limit only a part may go in
                f.write(scaled[i + written : i + piece])
            time.sleep(args.write_s)
        os.fsync(f.fileno())
    (folder / "trainer.json").write_text(json.dumps({"step": step, "state": state.hex()}))
    print(f"saved {folder}")


def main():
    args = parse()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if args.deaf else lambda n, f: STOP.append(n))
    if args.child and os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    header, body = layout(args)
    step, state = 0, 0.25
    if args.resume_from:
        saved = json.loads((Path(args.resume_from) / "trainer.json").read_text())
        step, state = saved["step"], float.fromhex(saved["state"])
        print(f"resuming from {args.resume_from}")
    while step < args.steps:
        step += 1
        time.sleep(args.step_s)
        for _ in range(30_000 if step > 8 and args.until else 0):  # ten minutes at most
            if args.until.exists() or STOP:
                break
            time.sleep(0.02)
        if step == args.hang_at and not args.resume_from:
            time.sleep(600)
        if step == args.die_at and not args.resume_from:
            raise RuntimeError("told to die")
        if step == args.leave_at and (args.always or not args.resume_from):
            return 0
        state = train(state, step, args.seed)
        print(f"step {step}/{args.steps} loss {abs(state):.4f}")
        if step % args.save_every == 0 or step == args.steps or STOP:
            save(args, step, state, header, body)
        if STOP:
            print("stopping")
            return 0
    print("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
