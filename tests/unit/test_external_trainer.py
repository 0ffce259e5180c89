"""Another trainer: its command, output, end, checkpoints, exports, and how it is adopted."""

import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.adopting import adopt_run
from infra.external.checkpoints import (
    choose,
    contents_damage,
    damage,
    detect,
    find_checkpoints,
    newest_complete,
    older,
    remove,
    unfinished,
)
from infra.external.exports import copy, find_export, make_model, require_whole
from infra.external.process import (
    LineReader,
    OutputLine,
    TrainerJob,
    TrainerLog,
    TrainerProcess,
    command_text,
    environment,
    error_of,
    kernel_oom_kills,
)
from infra.host.files import link
from infra.jobs.failures import classify
from infra.process.child import MARK, kill_stale_processes
from infra.store.workspace import Workspace
from refiner_core.contract.config import CommandConfig
from refiner_core.contract.errors import ConfigurationError, StageFailed
from refiner_core.contract.types import Progress
from tests.support.command import ROOT

RULE = CommandConfig(checkpoints="checkpoint-*", step_pattern=r"(\d+)(?!.*\d)")


def tensors(size: int = 64) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\x01" * size


def zipped() -> bytes:
    """What `torch.save` writes: a ZIP file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    return buffer.getvalue()


def checkpoint(folder: Path, step: int, *, data: bytes | None = None, **files: str) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(tensors() if data is None else data)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def job_of(config: CommandConfig, output: Path, **more: Any) -> TrainerJob:
    return TrainerJob(config, output, output.parent, 7, "command-1", 2, **more)


# ---------------------------------------------------------------- weights


@settings(max_examples=40)
@given(st.integers(0, len(tensors()) - 1))
def test_safetensors_cut_anywhere_are_damaged(tmp_path_factory: Any, length: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    path.write_bytes(tensors()[:length])
    assert damage(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", tensors(), ""),
        ("model.safetensors", tensors() + b"x", "at its end"),
        ("model.safetensors", b"\xff" * 40, "no safetensors header"),
        ("pytorch_model.bin", b"", "empty"),
        ("pytorch_model.bin", b"PK\x03\x04" + b"x" * 50, "truncated"),
        ("optimizer.pt", b"\x80\x02legacy", ""),
        ("state.pt", b"garbage", "neither"),
        ("config.json", b'{"a": ', "not complete JSON"),
        ("config.json", b"", "empty"),
        ("notes.txt", b"", ""),
        ("pytorch_model.bin", zipped(), ""),
        ("pytorch_model.bin", zipped()[:-30], "truncated"),
    ],
)
def test_damage_is_seen_in_the_file(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert (damage(path) is None) == (says == "")
    assert says in (damage(path) or "")


# ---------------------------------------------------------------- checkpoints


def test_the_newest_complete_one_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 20, data=tensors()[:30])
    assert newest_complete(find_checkpoints(tmp_path, RULE)).step == 10
    assert "checkpoint-20" in caplog.text


def test_a_file_may_mark_a_complete_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10, trainer__json='{"step": 10}')
    checkpoint(tmp_path, 20)
    checkpoint(tmp_path, 30, trainer__json="")
    rule = replace(RULE, complete="file:trainer.json")
    assert [bool(c.damage) for c in find_checkpoints(tmp_path, rule)] == [False, True, True]


def test_quiet_is_measured_by_the_clock_of_the_file_system(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 10)
    rule = replace(RULE, complete="quiet:30")
    assert "less than 30 s" in find_checkpoints(tmp_path, rule)[0].damage
    for each in (path, *path.iterdir()):
        os.utime(each, (time.time() - 60, time.time() - 60))
    assert find_checkpoints(tmp_path, rule)[0].damage == ""
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-10"]


def hf_checkpoint(folder: Path, step: int, *, saved: int = 5, ranks: int = 1) -> Path:
    """As Hugging Face's Trainer leaves one that has got as far as its ``saved``-th file."""
    pickle = b"\x80\x02" + bytes(2000)
    rng = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{i}.pth" for i in range(ranks)]
    files = [("training_args.bin", pickle), ("optimizer.pt", pickle), ("scheduler.pt", pickle)]
    files += [(name, pickle) for name in rng]
    files += [("trainer_state.json", json.dumps({"global_step": step}).encode())]
    path = checkpoint(folder, step)
    (path / f"global_step{step}").mkdir()
    (path / f"global_step{step}" / "states.pt").write_bytes(pickle)
    for name, content in files[:saved]:
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("saved", range(5))
def test_a_save_that_lacks_files_of_its_siblings_is_damaged(tmp_path: Path, saved: int) -> None:
    """The weights come first and are whole, but there is no optimizer state to resume from."""
    hf_checkpoint(tmp_path, 10)
    assert newest_complete(find_checkpoints(tmp_path, RULE)), "the first one has no siblings"
    hf_checkpoint(tmp_path, 20, saved=saved)
    found = find_checkpoints(tmp_path, RULE)
    assert [c.damage == "" for c in found] == [True, False]
    assert remove(unfinished(found)) == 1


def test_files_that_only_some_checkpoints_have_are_not_required(tmp_path: Path) -> None:
    hf_checkpoint(tmp_path, 10, saved=9, ranks=4)
    path = hf_checkpoint(tmp_path, 20, saved=9, ranks=2)
    (tmp_path / "checkpoint-10" / "events.out.tfevents.1700000001.0").write_text("x" * 99)
    (path / "events.out.tfevents.1700000002.1").write_text("x")
    assert [c.damage for c in find_checkpoints(tmp_path, RULE)] == ["", ""]
    path = hf_checkpoint(tmp_path, 30, saved=9, ranks=2)
    (path / "events.out.tfevents.1700000003.1").write_text("x")
    (tmp_path / "checkpoint-10" / "best.json").write_text("{}")
    assert [c.damage for c in find_checkpoints(tmp_path, RULE)] == ["", "", ""]


def test_older_checkpoints_are_deleted_and_the_newest_complete_one_stays(tmp_path: Path) -> None:
    for step in (100, 3, 20, 1):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 200, data=b"")
    (tmp_path / "checkpoint-last").mkdir()
    assert remove(older(find_checkpoints(tmp_path, RULE), keep=2)) == 2
    assert [c.step for c in find_checkpoints(tmp_path, RULE)] == [20, 100, 200]
    remove(older(find_checkpoints(tmp_path, RULE), keep=0))
    assert [c.step for c in find_checkpoints(tmp_path, RULE)] == [100, 200]


# ---------------------------------------------------------------- calling and reading


def test_values_are_quoted_and_braces_of_the_shell_stay(tmp_path: Path) -> None:
    output = tmp_path / "it's; a $HOME folder"
    config = CommandConfig(
        run="train --out {output} --seed {seed} {resume} ${HOME} $(awk '{{print $1}}' x)",
        resume_arguments="--resume {checkpoint}",
    )
    first = command_text(job_of(config, output))
    assert first == (
        f"train --out '{tmp_path}/it'\"'\"'s; a $HOME folder' --seed 7  "
        "${HOME} $(awk '{print $1}' x)"
    )
    second = command_text(job_of(config, output, checkpoint=Path("/c k/1")))
    assert "--resume '/c k/1' ${HOME}" in second


def test_the_trainer_has_the_environment_of_its_user(tmp_path: Path) -> None:
    base = {
        "PATH": "/bin",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}/theirs",
    }
    config = CommandConfig(run="x", env=("OUT={output}/logs", "OMP_NUM_THREADS=8"))
    settings = environment(job_of(config, tmp_path), base)
    assert settings["PYTHONPATH"] == "/theirs"
    assert "PYTHONSAFEPATH" not in settings
    assert settings["OMP_NUM_THREADS"] == "8"
    assert settings["OUT"] == f"{tmp_path}/logs"
    assert (settings["REFINER_OUTPUT"], settings["REFINER_SEED"]) == (str(tmp_path), "7")


def test_lines_become_progress_and_metrics() -> None:
    reader = LineReader(
        r"step (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)", Progress(4, 0, "train")
    )
    assert reader.read("saving") is None
    assert reader.read("step 3/40 loss 1.5") == {}
    assert reader.read("[rank0] step 12/40 loss 1.25") == {"loss": 1.25}
    assert (reader.progress.done, reader.progress.total) == (12, 40)
    assert reader.read("step 13/40 loss none") == {}
    assert reader.progress.done == 13


# ---------------------------------------------------------------- endings


@pytest.mark.parametrize(
    ("code", "lines", "failure"),
    [
        (1, ["OSError: [Errno 122] Disk quota exceeded"], "disk_full"),
        (1, ["OSError: [Errno 28] No space left on device", "[rank1] exiting"], "disk_full"),
        (1, ["torch.OutOfMemoryError: CUDA out of memory."], "gpu_out_of_memory"),
        (1, ["RuntimeError: NCCL error: unhandled system error"], "gpu_error"),
        (1, ["OSError: [Errno 12] Cannot allocate memory"], "out_of_memory"),
        (1, ["ValueError: loss is nan at step 3"], "not_finite"),
        (1, ["Traceback", "KeyError: 'x'"], "bug"),
        (127, ["/bin/sh: 1: trian: not found"], "bad_configuration"),
        (128 + signal.SIGSEGV, ["step 3"], "killed"),
    ],
)
def test_last_lines_give_the_failure_class(
    tmp_path: Path, code: int, lines: list[str], failure: str
) -> None:
    error = error_of(code, lines, tmp_path)
    outcome = classify(error, tmp_path)
    assert outcome.failure == failure
    assert lines[-1].split(": ")[-1][:20] in outcome.message or len(lines) > 1


def test_other_causes(tmp_path: Path) -> None:
    lines = ["warning: CUDA out of memory, retrying", *["step"] * 100, "KeyError: 'x'"]
    assert isinstance(error_of(1, lines, tmp_path), StageFailed), "said long before the end"
    assert isinstance(error_of(137, ["step 3"], tmp_path, oom_kills=1), MemoryError)
    assert classify(error_of(137, ["step 3"], tmp_path)).decision == "resume"


# ---------------------------------------------------------------- the process


def test_output_exit_code_and_environment_are_those_of_the_command(tmp_path: Path) -> None:
    environ = {**os.environ, "NAME": "value"}
    script = "seq 30000; printf 'one\\ntwo\\rthree\\r\\n'; echo $NAME; echo y >&2; exit 3"
    with TrainerProcess(script, environ, tmp_path) as process:
        lines: list[OutputLine] = []
        while process.code is None:
            lines += process.lines(0.1)
        lines += process.last_lines()
    assert process.code == 3
    whole = [line.text for line in lines if not line.redrawn]
    assert len(whole) == 30_004
    assert whole[-4:] == ["one", "three", "value", "y"]
    assert [line.text for line in lines if line.redrawn] == ["two"]


@pytest.mark.slow
def test_endless_output_leaves_time_for_a_stop_and_takes_no_memory(tmp_path: Path) -> None:
    before = psutil.Process().memory_info().rss
    with TrainerProcess("exec yes 'step 1/100'", dict(os.environ), tmp_path) as process:
        for _ in range(3):  # it ends: who takes lines can look at something else
            for line in process.lines(5.0):
                assert line.text == "step 1/100"
                time.sleep(0.001)  # as a log on a slow file system
        time.sleep(1.5)
        assert psutil.Process().memory_info().rss - before < 100 << 20
        process.signal(signal.SIGTERM)
        while process.code is None:
            list(process.lines(0.1))
        assert process.code == 128 + signal.SIGTERM


def test_a_log_keeps_a_share_of_the_output_and_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """What prints 100 MB/s would fill any quota; its checkpoints would no longer fit."""
    now = [0.0]
    log = TrainerLog(clock=lambda: now[0])
    for index in range(300_000):
        log.write(f"{index} {'x' * 100}")
    now[0] = 60.0
    log.write("a minute later")
    log.flush(last=True)
    lines = capsys.readouterr().out.splitlines()
    assert 15 << 20 <= sum(map(len, lines)) <= 18 << 20
    assert lines[0].startswith("0 x")
    assert lines[-1] == "a minute later"
    assert sum("left out" in line for line in lines) == 1


# ---------------------------------------------------------------- exports


def test_an_export_leaves_states_out_and_takes_companions_for_missing_files(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, 10, config__json="{}", optimizer__pt="", scheduler__pt="")
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"):
        (base / name).write_text('{"base": 1}')
    made_bare = make_model(source, tmp_path / "bare", None, within=tmp_path)
    assert made_bare == ["tokenizer_config.json"]
    with pytest.raises(StageFailed, match=r"tokenizer_config.json.*companions"):
        require_whole(tmp_path / "bare", "publishing")
    assert make_model(source, tmp_path / "model", base, within=tmp_path) == []
    made = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}
    assert made.keys() == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert made["config.json"] == b"{}"
    assert made["model.safetensors"] == tensors()


@pytest.mark.parametrize("what", ["the file", "its folder", "a companion"])
def test_links_out_of_the_folder_are_not_exported(tmp_path: Path, what: str) -> None:
    """Otherwise the writer of a checkpoint could have our files published."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "merges.txt").write_text("hf_secret")
    work, base = tmp_path / "work", tmp_path / "base"
    source = checkpoint(work, 10)
    base.mkdir()
    if what == "its folder":
        (work / "final").symlink_to(tmp_path / "home")
        source = work / "final"
    else:
        folder = source if what == "the file" else base
        (folder / "merges.txt").symlink_to(tmp_path / "home" / "merges.txt")
    with pytest.raises(ConfigurationError, match=r"merges\.txt"):
        make_model(source, tmp_path / "model", base, within=work)


def test_links_inside_a_trainers_folder_and_to_blobs_of_the_hub_are_copied(tmp_path: Path) -> None:
    work, cache = tmp_path / "work", tmp_path / "models--org--base"
    source = checkpoint(work, 10)
    (work / "config.json").write_text("{}")
    (source / "config.json").symlink_to("../config.json")
    (work / "final").symlink_to(source)
    snapshot = cache / "snapshots" / "abc"
    for folder in (snapshot, cache / "blobs"):
        folder.mkdir(parents=True)
    (cache / "blobs" / "01").write_text("words")
    (snapshot / "tokenizer_config.json").symlink_to("../../blobs/01")
    model = tmp_path / "model"
    assert make_model(work / "final", model, snapshot, within=work) == []
    assert {p.name: p.is_symlink() for p in model.iterdir()} == dict.fromkeys(
        ("model.safetensors", "config.json", "tokenizer_config.json"), False
    )
    assert (model / "tokenizer_config.json").read_text() == "words"
    (snapshot / "vocab.json").symlink_to(tmp_path / "work" / "config.json")
    with pytest.raises(ConfigurationError):
        make_model(work / "final", tmp_path / "again", snapshot, within=work)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    """Between looking at a folder and taking its files, its owner may change it."""
    (tmp_path / "token").write_text("hf_secret")
    (tmp_path / "merges.txt").symlink_to(tmp_path / "token")
    assert not link(tmp_path / "merges.txt", tmp_path / "taken")
    with pytest.raises(OSError, match="symbolic links"):
        copy(tmp_path / "merges.txt", tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


def test_a_named_export_is_whole(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="final"):
        find_export(tmp_path, "final", [])
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "model.safetensors").write_bytes(tensors()[:-1])
    with pytest.raises(StageFailed, match="truncated"):
        find_export(tmp_path, "final", [])
    (tmp_path / "final" / "model.safetensors").write_bytes(tensors())
    assert find_export(tmp_path, "final", []) == tmp_path / "final"


# ---------------------------------------------------------------- sightings


def test_layouts_are_recognised_with_their_conversion(tmp_path: Path) -> None:
    checkpoint(tmp_path, 10, config__json="{}")
    checkpoint(tmp_path, 9)
    for name, file in {
        "global_step8": "mp_rank_00_model_states.pt",
        "step_7": "__0_0.distcp",
        "checkpoint-6": "pytorch_model.bin",
        "iter_0000005": "mp_rank_00/model.pt",
    }.items():
        path = tmp_path / name / file
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\x80legacy")
    (tmp_path / "ckpt_11").mkdir()
    found = {s.step: s for s in detect(tmp_path)}
    assert {step: s.layout for step, s in found.items()} == {
        **{10: "hf", 9: "weights", 8: "other", 7: "other", 6: "other", 5: "other"},
        11: "none",
    }
    assert [s.step for s in found.values() if s.usable] == [9, 10]
    assert "zero_to_fp32" in found[8].note
    assert choose(list(found.values()), None).step == 10
    with pytest.raises(ConfigurationError, match="zero_to_fp32"):
        choose(list(found.values()), 8)
    with pytest.raises(ConfigurationError, match=r"(?s)99.*5, 6"):
        choose(list(found.values()), 99)


#: What `setproctitle` leaves of a process's environment: zeros at its beginning, then the rest.
_RENAMES_ITSELF = """
import sys, time
fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
start, end = int(fields[47]), int(fields[48])
with open("/proc/self/mem", "r+b", buffering=0) as memory:
    memory.seek(start)
    memory.write(bytes(64))
print("renamed", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_a_renamed_process_is_known_by_its_mark(tmp_path: Path) -> None:
    """vLLM's engines do; one that was left would hold its GPU for ever."""
    first = {"AAAA_FIRST": "x" * 100}  # what is written over
    process = subprocess.Popen(
        [sys.executable, "-c", _RENAMES_ITSELF],
        env={**first, "PATH": os.environ["PATH"], MARK: str(tmp_path / "servers" / "0")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "renamed\n"
        assert kill_stale_processes(tmp_path / "serve") == 0, (
            "another folder whose name begins alike"
        )
        assert kill_stale_processes(tmp_path / "servers") == 1
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("groups", "counts", "expected"),
    [
        ("0::/job_7/step_0\n", {"job_7/step_0/memory.events": "oom 3\noom_kill 2\n"}, 2),
        (
            "4:memory:/slurm/job_7\n1:cpu:/\n0::/\n",
            {"memory/slurm/job_7/memory.oom_control": "under_oom 0\noom_kill 0\n"},
            0,
        ),
        ("0::/\n", {}, 5),
        ("0::/not/seen/from/here\n", {}, 5),
    ],
)
def test_an_oom_kill_of_a_neighbour(
    tmp_path: Path, groups: str, counts: dict[str, str], expected: int
) -> None:
    files = {"proc/self/cgroup": groups, "proc/vmstat": "pgfault 1\noom_kill 5\n"}
    files |= {f"sys/fs/cgroup/{name}": text for name, text in counts.items()}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert kernel_oom_kills(tmp_path) == expected


# ---------------------------------------------------------------- adopting


PAGES = np.arange(1, 64 * 1024 + 1, dtype=np.float32).reshape(256, 256)


def safetensors(path: Path, **tensors: tuple[str, np.ndarray]) -> Path:
    """A file with arrays under the names of types that NumPy need not know."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        begin, data = len(data), data + array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def whole_checkpoint(run: Path, step: int) -> Path:
    folder = run / f"checkpoint-{step}"
    safetensors(folder / "model.safetensors", w=("F32", PAGES), b=("F32", np.zeros(4096, "<f4")))
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def make_hole(path: Path) -> None:
    """As a file system leaves a file that was being written when its node died."""
    size = path.stat().st_size
    os.truncate(path, size // 4)
    os.truncate(path, size)


def make_nan(path: Path) -> None:
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    data[8 + length + 400 : 8 + length + 404] = struct.pack("<f", float("nan"))
    path.write_bytes(data)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(("harm", "says"), [(make_hole, "is empty"), (make_nan, "holds NaN")])
def test_a_checkpoint_without_numbers_is_skipped(tmp_path: Path, harm: object, says: str) -> None:
    """Its header is whole, so it would be published and evaluated."""
    run = tmp_path / "run"
    whole_checkpoint(run, 10)
    harm(whole_checkpoint(run, 20) / "model.safetensors")
    where = [f"workspace={tmp_path / 'ws'}"]
    for dry_run in (True, False):
        report = adopt_run(run, where, dry_run=dry_run)
        assert report["step"] == 10
        assert [c["complete"] for c in report["checkpoints"]] == [True, False]
        assert says in report["checkpoints"][1]["note"]
    with pytest.raises(ConfigurationError, match=rf"model\.safetensors: .*{says}"):
        adopt_run(run, where, step=20)


def test_zeros_of_trained_models_are_no_damage(tmp_path: Path) -> None:
    """Biases, rows of words that never came, and most of a pruned matrix."""
    words = PAGES.copy()
    words[150:] = 0
    pruned = np.where(PAGES % 10 == 0, PAGES, 0).astype("<f4")
    zeros = np.zeros((1, 8192), "<f4")
    path = safetensors(
        tmp_path / "model.safetensors",
        words=("F32", words),
        pruned=("F32", pruned),
        bias=("F32", zeros),
    )
    assert contents_damage(path) is None


@pytest.mark.parametrize("offsets", [[0, 7], [-9, 11], [16, 0], "no", None])
def test_a_wrong_header_is_damage(tmp_path: Path, offsets: object) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": offsets}})
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\1" * 16)
    assert contents_damage(path)


# ---------------------------------------------------------------- links


def test_a_workspace_of_refiner_is_not_adopted(tmp_path: Path) -> None:
    theirs = Workspace.open(tmp_path / "theirs")
    with pytest.raises(ConfigurationError, match=f"refiner resume workspace={theirs.root}"):
        adopt_run(theirs.root, [f"workspace={tmp_path / 'ws'}"])
