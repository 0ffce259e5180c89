"""`refiner card`: a card is checked against its evidence, files and records."""

import shutil
import sys
from pathlib import Path

import pytest

from refiner_core.cards.build import shipped_template
from tests.support.command import called, finished, refiner
from tests.support.git_hub import LoopbackHub
from tests.support.recorded_run import RecordedRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A run that has published its last checkpoint, with its numbers."""
    root = tmp_path_factory.mktemp("card") / "runs"
    run = RecordedRun(root, "evaluate.models=[base,grpo]")
    run.data()
    run.train("sft")
    run.train("grpo")
    run.evaluate("evaluate-base", quality=0.5)
    run.evaluate("evaluate-grpo")
    run.carry_out("publish")
    run.carry_out("card")
    return run


@pytest.fixture
def folder(run: RecordedRun, tmp_path: Path) -> Path:
    """A copy of what was published, to change."""
    copy = tmp_path / "publication"
    shutil.copytree(run.published("publish"), copy)
    return copy


def change(path: Path, old: str, new: str) -> int:
    """Replace the first ``old``; the line in which it stood."""
    text = path.read_text()
    assert old in text, f"{old!r} is not in {path.name}"
    path.write_text(text.replace(old, new, 1))
    return text.count("\n", 0, text.index(old)) + 1


def first_number(card: Path) -> str:
    """The first value of the table of results, as it is printed."""
    row = next(x for x in card.read_text().splitlines() if x.startswith("| `reward`"))
    return row.split("|")[2].split()[0]


# ---------------------------------------------------------------- check


def test_a_published_card_passes_the_check(folder: Path) -> None:
    done = refiner("card", "check", str(folder))
    assert done.code == 0, done.stdout + done.stderr
    assert "matches its evidence, number by number" in done.stdout


def test_a_changed_number_is_traced_to_its_record(folder: Path) -> None:
    card = folder / "README.md"
    number = first_number(card)
    line = change(card, f"| {number} ", "| 9.999 ")
    done = called("card", "check", str(card))
    assert done.code == 3
    (told,) = [x for x in done.stdout.splitlines() if "9.999" in x and ": evidence: " in x]
    assert told.startswith(f"{card}:{line}: evidence: ")
    assert f"the evidence gives {number!r}" in told
    assert "(fact evaluations." in told
    assert "from stages/evaluate-" in told
    assert f"refiner card check {card}" in done.stderr


def test_findings_for_scripts_are_json(folder: Path) -> None:
    line = change(folder / "README.md", "# ", "# not ")
    done = called("card", "check", str(folder), "--json")
    assert done.code == 3
    value = done.json
    assert (value["version"], value["errors"], value["warnings"]) == (1, 1, 0)
    (found,) = value["findings"]
    assert set(found) == {"line", "rule", "severity", "message", "fix"}
    assert (found["line"], found["rule"], found["severity"]) == (line, "evidence", "error")


def test_weights_that_are_not_those_of_the_evidence_are_found(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    done = called("card", "check", str(folder))
    assert done.code == 3
    assert "file-differs: config.json is missing" in done.stdout
    assert "file-differs: tokenizer.json has 2 bytes, its evidence says" in done.stdout
    assert "file-differs: model.safetensors has SHA-256" in done.stdout
    only_card = called("card", "check", str(folder / "README.md"))
    assert only_card.code == 0, "of a card alone, only the card is looked at"


# ---------------------------------------------------------------- on a Hub


def test_a_card_on_a_hub_is_checked(folder: Path, tmp_path, monkeypatch) -> None:
    with LoopbackHub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        monkeypatch.chdir(tmp_path)
        first = hub.add_folder("me/refiner", folder)
        good = called("card", "check", "me/refiner")
        assert good.code == 0, good.stdout + good.stderr
        assert not any("safetensors" in request.path for request in hub.log)
        line = change(folder / "README.md", "| 0.", "| 7.")
        hub.add("me/refiner", {"README.md": (folder / "README.md").read_bytes()})
        wrong = called("card", "check", "me/refiner")
        assert wrong.code == 3
        assert f"me/refiner/README.md:{line}: evidence: " in wrong.stdout
        at_first = called("card", "check", f"me/refiner@{first}")
        assert at_first.code == 0
        assert at_first.stdout.startswith(f"me/refiner@{first}/README.md: ")
        missing = called("card", "check", "me/another")
        assert missing.code == 9
        assert "me/another" in missing.stderr


# ---------------------------------------------------------------- show, template


def test_the_same_records_give_the_same_card(run: RecordedRun) -> None:
    where = f"workspace={run.workspace.root}"
    published = (run.published("publish") / "README.md").read_text()
    done = called("card", "show", where)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == published
    assert called("card", "show", run.run.run, "card", where).stdout == published
    before = called("card", "show", "publish", where).stdout
    assert "No evaluation of this checkpoint is recorded." in before
    assert called("card", "show", where, "--json").json["as_published"] is True


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["check", "nothing.md"], "There is no nothing.md."),
        (["check", "."], "has no README.md"),
        (["show", "publish-best"], "Expected one of: card, publish"),
        (["show", "nothing"], "has no run 'nothing'"),
    ],
)
def test_a_missing_card(words, told, run: RecordedRun, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = [f"workspace={run.workspace.root}"] if words[0] == "show" else []
    done = called("card", *words, *where)
    assert done.code == 2
    assert told in done.stderr


def test_the_template_is_printed_as_it_is_shipped() -> None:
    assert called("card", "template").stdout == shipped_template()


def test_a_check_imports_nothing_heavy(folder: Path) -> None:
    heavy = ["torch", "transformers", "prefect", "submitit", "wandb", "huggingface_hub", "pandas"]
    script = (
        "import sys\nfrom flows.cli.main import main\nmain(sys.argv[1:])\n"
        f"print('HEAVY', sorted(set({heavy!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    words = ["card", "check", str(folder / "README.md")]
    done = finished([sys.executable, "-c", script, *words])
    assert "HEAVY []" in done.stderr, done.stderr
