"""Single-line mutants of the code that numbers and data hang on, each against its nearest tests.

    make prove                                              # 200 of them
    python -m tests.prove.mutants --count 40 --seed 7       # others, and fewer
    python -m tests.prove.mutants --only infra/store        # of some files

A mutant is one changed operator, constant, condition or dropped call in one line. It is killed if
its tests fail, or do not end within a minute. A survivor is a behaviour that no test holds,
unless no input can tell it from the original: such ones stand, with the reason, in
:data:`EQUIVALENT`. Which are tried is drawn by the seed, from all areas alike. Ends with exit code
1 if less than 95 % of the others are killed, or more than 10 % are called equivalent.
"""

import argparse
import ast
import itertools
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.command import ROOT

#: Area -> file -> names of its nearest test files, quickest first (``test_NAME.py``).
NEAREST: dict[str, dict[str, str]] = {
    "stores": {
        "infra/store/atomic.py": "workspace every_write failures disk_manager folder_target",
        "infra/store/checkpoints.py": "checkpoints async_saves damaged_checkpoints disk_manager "
        "disk_copies publications",
        "infra/store/orchestrators.py": "serving",
        "infra/store/provenance.py": "workspace",
        "infra/store/stage_records.py": "checkpoints reconcile restart workspace",
    },
    "garbage collection": {
        "infra/disk/manager.py": "disk_manager disk_copies",
        "infra/disk/garbage_collection.py": "disk_policy disk_manager disk_copies "
        "damaged_checkpoints",
        "infra/disk/inventory.py": "disk_policy disk_manager disk_copies damaged_checkpoints",
    },
    "hub": {
        "infra/hub/errors.py": "hub_errors",
        "infra/hub/target.py": "hub hub_faults",
        "infra/hub/client.py": "hub_errors hub hub_faults",
    },
    "packing": {"refiner_core/training/batches.py": "batch_order packing shares"},
    "rewards": {
        "refiner_core/rewards/combine.py": "rewards rewards_composition",
        "refiner_core/rewards/compute.py": "rewards reward_stream rewards_composition",
        "refiner_core/rewards/course.py": "rewards_composition reward_attacks",
    },
    "statistics": {
        "refiner_core/evaluation/results.py": "compare_results",
        "refiner_core/evaluation/statistics.py": "statistics statistics_truth",
        "refiner_core/evaluation/metric_names.py": "pass_at_k",
    },
    "power": {"refiner_core/evaluation/power.py": "power", "sweeps/power.py": "sweep_power"},
    "dispatch": {
        "infra/orchestrator/reconcile.py": "reconcile",
        "infra/jobs/dispatch.py": "campaign_rounds status cancelling processes",
        "infra/jobs/failures.py": "failures reconcile campaign_rounds",
        "infra/jobs/signals.py": "restart",
        "infra/slurm/scheduler.py": "slurm_dispatcher slurm_query",
        "infra/slurm/dispatcher.py": "slurm_dispatcher",
        "infra/slurm/states.py": "slurm_states",
        "infra/slurm/submission.py": "slurm_dispatcher",
    },
}
#: File -> its mutants that no input tells from the original, as :attr:`Mutant.change` writes them.
EQUIVALENT: dict[str, set[str]] = {
    "refiner_core/evaluation/statistics.py": {
        # How finely a table is drawn; ends of intervals move by less than 1e-7.
        "_POINTS = [4096 -> 4097]",
        # No place among random numbers is exactly that.
        "level = np.where(place [< -> <=] _LOWEST, _AT_LEVEL * place / _LOWEST, 1.0)",
        # A level between 0 and 1 is no round number.
        "critical = np.where(alpha [>= -> >] spread.level, np.minimum(critical, both), both)",
        # How many resamples are drawn at once changes none of them.
        "[batch=max(1, -> batch=max(2,] 4_000_000 // len(sums)),",
        "batch=max(1, [4_000_000 -> 4000001] // len(sums)),",
        # They are equal there, and there are two at least.
        "return [sorted(sets[0]) -> sorted(sets[1])]",
        # In the place of 0 where the result is not used.
        "safe = spread._replace(variance=np.where(flat, [1.0, -> 2.0,] spread.variance))",
    },
    "refiner_core/evaluation/power.py": {
        # A power, a mean over draws, is no round number.
        "while _power(high, half, error) [< -> <=] power:"
    },
    "refiner_core/training/batches.py": {
        # The list is cut to max_steps in the end.
        "if max_steps is not None and len(steps) [>= -> >] max_steps:",
        # The list of steps is cut in the end; of parts that cost the same, the first is taken.
        "[break -> continue]",
        # One part more than samples is one for each sample again.
        "for parts in range(1, len(group) + [1): -> 2):]",
        # Padding sees itself alone, and nothing sees it.
        "branch_L=row.branch_L + [[0] -> [1]] * missing,",
        # The rank with least work is the same.
        "work = [[0.0] -> [1.0]] * world",
        # Nothing predicts the first token of a sample without a prompt.
        "return build_pack([[Sample((), (0, 0), [(False, -> (True,] False))]])",
        # Nothing depends on tokens without a target.
        "return build_pack([[Sample((), [(0, -> (1,] 0), (False, False))]])",
        "return build_pack([[Sample((), (0, [0), -> 1),] (False, False))]])",
    },
    "infra/store/orchestrators.py": {
        # The block that starts the thread ends it.
        'self._thread = threading.Thread(target=self._run, name="lease", [daemon=True) '
        "-> daemon=False)]",
        # A counter that a power cut loses is never read again.
        'atomic.write_json(self._path, {"counter": self._counter}, [sync=False) -> sync=True)]',
    },
    "sweeps/power.py": {
        # A power, a mean over draws, is no round number.
        "if found [< -> <=] POWER:",
        "return power_of(known, s, p, wanted, alpha) [>= -> >] POWER",
        "if wanted is not None and power is not None and power [< -> <=] POWER:",
    },
    "infra/disk/manager.py": {
        # The bytes of one parameter are far fewer than FLOOR_BYTES, which is asked for at least.
        "parameters = model_size(Path(name).expanduser(), name).parameters or [0 -> 1]",
        # Both are known or neither is.
        "elif room.used_bytes is None [or -> and] room.limit_bytes is None:",
        # Workspaces differ in eight digits of a hash, and in nine.
        "root = [hashlib.sha256(str(self.workspace.layout.control).encode()).hexdigest()[:8] "
        "-> hashlib.sha256(str(self.workspace.layout.control).encode()).hexdigest()[:9]]",
    },
    "infra/hub/errors.py": {
        # Both are far beyond LONGEST_S.
        "backoff = min(FIRST_S * 2 ** min(failures - 1, [16), "
        "-> 17),] LONGEST_S) * (0.5 + self.draw())"
    },
}

LIMIT_S = 60.0
PASS, FAIL, LATE = "pass", "fail", "run out of time"
KILLED, EQUIVALENT_AT_MOST = 0.95, 0.10
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """Line ``line`` of ``path``, changed."""

    area: str
    path: str
    line: int
    before: str
    after: str

    @property
    def change(self) -> str:
        """The line with the words that differ as ``[before -> after]``."""
        before, after = self.before.split(), self.after.split()
        start = _alike(before, after)
        end = _alike(before[start:][::-1], after[start:][::-1])
        old, new = before[start : len(before) - end], after[start : len(after) - end]
        told = f"[{' '.join(old)} -> {' '.join(new)}]"
        return " ".join([*before[:start], told, *before[len(before) - end :]])

    @property
    def equivalent(self) -> bool:
        """Whether :data:`EQUIVALENT` has it; lines may move."""
        return self.change in EQUIVALENT.get(self.path, ())

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n    - {self.before.strip()}\n    + {self.after.strip()}"


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    """How many words at the beginning are the same."""
    return sum(
        1
        for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )


# ---------------------------------------------------------------- making them


def mutants_of(area: str, path: str, text: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    lines = text.splitlines()
    found = set[Mutant]()
    for node in _code(ast.parse(text)):
        for line, start, end, new in _changes(node, lines):
            before = lines[line - 1]
            raw = before.encode()
            after = (raw[:start] + new.encode() + raw[end:]).decode()
            if after != before and _is_code("\n".join([*lines[: line - 1], after, *lines[line:]])):
                found.add(Mutant(area, path, line, before, after))
    return sorted(found, key=lambda m: (m.line, m.after))


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, messages of errors or logs, docstrings."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.JoinedStr):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, ast.Expr) and ast.unparse(node).startswith("log."):
                continue
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                continue  # -1 is a sentinel or an index from the end
            if isinstance(tree, ast.keyword) and ast.unparse(tree) == "strict=True":
                continue  # of zip: a check of the code on itself
            yield node
            yield from _code(node)


def _changes(node: ast.AST, lines: Sequence[str]) -> Iterator[tuple[int, int, int, str]]:
    """(line, from, to, instead), in bytes of that line."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            yield from _between(left, right, f" {_COMPARE[type(op)]} ")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            yield from _between(left, right, f" {_ARITHMETIC[type(op)]} ")
        case ast.BoolOp(op=op, values=[*_, left, right]):
            yield from _between(left, right, " or " if isinstance(op, ast.And) else " and ")
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            if node.lineno == inner.lineno:
                yield node.lineno, node.col_offset, inner.col_offset, ""
        case ast.Constant(value=bool() as value):
            yield node.lineno, node.col_offset, _end(node), str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node.lineno, node.col_offset, _end(node), repr(value + 1)
        case ast.Expr(value=ast.Call()) if node.lineno == node.end_lineno:
            yield node.lineno, node.col_offset, _end(node), "pass"
        case ast.If(test=test) | ast.While(test=test) if test.lineno == test.end_lineno:
            text = lines[test.lineno - 1].encode()[test.col_offset : _end(test)].decode()
            yield test.lineno, test.col_offset, _end(test), f"not ({text})"
        case ast.Continue():
            yield node.lineno, node.col_offset, _end(node), "break"
        case ast.Break():
            yield node.lineno, node.col_offset, _end(node), "continue"


def _end(node: ast.expr | ast.stmt) -> int:
    assert node.end_col_offset is not None
    return node.end_col_offset


def _between(left: ast.expr, right: ast.expr, new: str) -> Iterator[tuple[int, int, int, str]]:
    """The operator between two operands without brackets around them, on one line."""
    if left.end_lineno == right.lineno:
        yield right.lineno, _end(left), right.col_offset, new


def _is_code(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def drawn(count: int, seed: int, only: str = "") -> list[Mutant]:
    """``count`` mutants: areas alike often, then lines alike often."""
    generator = random.Random(seed)
    areas: list[list[Mutant]] = []
    for area, files in NEAREST.items():
        made = [
            mutant
            for path in files
            if path.startswith(only)
            for mutant in mutants_of(area, path, (ROOT / path).read_text())
        ]
        generator.shuffle(made)
        areas += [made] if made else []
    chosen: list[Mutant] = []
    while len(chosen) < count and any(areas):
        for made in areas:
            if made and len(chosen) < count:
                chosen.append(made.pop())
    return chosen


# ---------------------------------------------------------------- trying them


def test_files(path: str) -> list[str]:
    """The test files that are nearest to a file."""
    (names,) = [files[path] for files in NEAREST.values() if path in files]
    found = []
    for name in names.split():
        places = [ROOT / "tests" / kind / f"test_{name}.py" for kind in ("unit", "integration")]
        (place,) = [place for place in places if place.exists()]
        found.append(str(place.relative_to(ROOT)))
    return found


def ends(copy: Path, path: str, limit_s: float) -> str:
    """How the nearest tests of ``path`` end in a copy of the tree: pass, fail, run out of time."""
    line = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *test_files(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(copy / "tmp")}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        line, cwd=copy, env=environment, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        return FAIL if process.wait(limit_s) else PASS
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return LATE


def try_mutant(copies: Path, mutant: Mutant) -> tuple[Mutant, str, float]:
    """The mutant, how its tests end, and after how many seconds; in this process's own copy."""
    copy, began = copies / str(os.getpid()), time.monotonic()
    if not copy.exists():
        for folder in ("flows", "sweeps", "refiner_core", "infra", "tests"):
            shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.pyc"))
        for file in ROOT.glob("*.*"):
            if file.is_file():
                shutil.copy(file, copy)
        (copy / "tmp").mkdir()
    file = copy / mutant.path
    original = file.read_text()
    lines = original.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.after + "\n"
    file.write_text("".join(lines))
    try:
        end = ends(copy, mutant.path, LIMIT_S)
    finally:
        file.write_text(original)
        shutil.rmtree(copy / "tmp", ignore_errors=True)
        (copy / "tmp").mkdir()
    return mutant, end, time.monotonic() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Try mutants; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--only", default="", help="files whose path begins so")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    mutants = drawn(args.count, args.seed, args.only)
    equal = [m for m in mutants if m.equivalent]
    tried = [m for m in mutants if not m.equivalent]
    survivors: list[Mutant] = []
    late = 0
    with tempfile.TemporaryDirectory() as folder:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            results = pool.imap_unordered(partial(try_mutant, Path(folder)), tried)
            for number, (mutant, end, seconds) in enumerate(results, 1):
                word = {PASS: "SURVIVES", FAIL: "killed", LATE: "killed (out of time)"}[end]
                print(f"{number}/{len(tried)} {word} after {seconds:.0f} s: {mutant}", flush=True)
                survivors += [mutant] if end == PASS else []
                late += end == LATE
        whole = {m.path for m in tried if m not in survivors}
        copies = list(Path(folder).iterdir())
        plain = {path: ends(copies[0], path, LIMIT_S) for path in sorted(whole)}
    broken = {path: end for path, end in plain.items() if end != PASS}
    for path, end in broken.items():
        print(f"{path}: without a mutant its tests {end} (they have {LIMIT_S:g} s)")
    for mutant in equal:
        print(f"equivalent: {mutant}")
    for mutant in sorted(survivors, key=str):
        print(f"survives: {mutant}")
    rate = 1 - len(survivors) / max(1, len(tried))
    print(
        f"{len(mutants)} mutants (seed {args.seed}): {len(tried) - len(survivors)} of {len(tried)} "
        f"killed ({rate:.1%}; {late} of them out of time), {len(equal)} equivalent"
    )
    good = rate >= KILLED and len(equal) <= EQUIVALENT_AT_MOST * len(mutants)
    return 0 if good and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
