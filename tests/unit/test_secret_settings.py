"""No setting holds a secret: it would be in records, logs, cards and trackers. One list of names
says what a secret is, for settings, profiles, command lines and masks."""

import io
import json
import logging
import os
import shlex
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flows.cards.reproduction import recipe_text, restated
from flows.cli.main import main
from infra.attempt.stage_io import MaskingFormatter
from infra.host.processes import environment
from infra.host.secrets import mask_keys_of, masked, without_secrets
from infra.slurm.profiles import load_profile
from infra.store.provenance import masked_command
from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import evidence_text
from refiner_core.cards.public import public_body, public_command
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.checks.secrets import assigned_secrets, has_secret, is_secret_name
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import apply_overrides
from tests.support.card_facts import CONFIG, full_facts, published_facts

VALUE = "Zq7opaque9value"
TOKEN = "hf_" + "aB3dE6gH9j" * 3


@pytest.mark.parametrize(
    ("override", "field", "fix"),
    [
        (f'judge.extra_body={{"api_key": "{VALUE}"}}', "judge.extra_body", "judge.api_key_env"),
        (f'judge.extra_body={{"a": {{"authToken": "{VALUE}"}}}}', "judge.extra_body", "export"),
        (f'judge.extra_body={{"user": "{TOKEN}"}}', "judge.extra_body", "judge.api_key_env"),
        (f"judge.base_url=http://h:1/v1?api_key={VALUE}", "judge.base_url", "judge.api_key_env"),
        (f"judge.base_url=http://me:{VALUE}@h:1/v1", "judge.base_url", "judge.api_key_env"),
        (f"judge.base_urls=[http://h/v1?key={VALUE}]", "judge.base_url", "judge.api_key_env"),
        (f"judge.serve.args=[--api-key,{VALUE}]", "judge.serve.args", "REFINER_SERVER_KEY"),
        (f"judge.serve.setup=['export HF_TOKEN={VALUE}']", "judge.serve.setup", "export"),
        (f"judge.serve_command='run --token {VALUE}'", "judge.serve_command", "leave it out"),
        (f"grpo.rollout_server.args=['--api-key {VALUE}']", "grpo.rollout_server.args", "leave"),
        (f"command.run='WANDB_API_KEY={VALUE} python t.py'", "command.run", "export"),
        (f"command.env=[DB_PASS={VALUE}]", "command.env", "export"),
        (f"command.env=[STRIPE_KEY={VALUE}]", "command.env", "export"),
        (f"notify.command='curl -H \"X-Api-Key: {VALUE}\" h'", "notify.command", "export"),
        (f"model.name_or_path=https://u:{VALUE}@hub.example/m", "model.name_or_path", "export"),
        (f"description='mine is {TOKEN}'", "description", "export"),
        (f"disk.probe='quota --password {VALUE}'", "disk.probe", "export"),
    ],
)
def test_a_secret_in_a_setting_is_refused(override: str, field: str, fix: str) -> None:
    config = apply_overrides(RecipeConfig(), [override])
    with pytest.raises(ConfigurationError) as refused:
        check_config(config)
    said = refused.value.paragraph()
    assert field in said
    assert fix in said
    assert VALUE not in said
    assert TOKEN not in said


@pytest.mark.parametrize("command", ["plan", "run"])
def test_commands_refuse(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = f"judge.serve.args=[--api-key,{VALUE}]"
    judge = ("judge.kind=openai", "judge.model=x", "judge.base_url=http://127.0.0.1:9/v1")
    assert main([command, "tiny", f"workspace={tmp_path / 'runs'}", *judge, override]) == 2
    printed = capsys.readouterr()
    assert "`judge.serve.args`" in printed.err
    assert VALUE not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override",
    [
        'judge.extra_body={"chat_template_kwargs": {"enable_thinking": false}}',
        'judge.extra_body={"max_token": 5, "reasoning_effort": "high"}',
        "judge.serve_command='vllm serve {model} --api-key $REFINER_SERVER_KEY'",
        "judge.serve.args=['--tokenizer org/tokenizer-4b --max-num-batched-tokens 8192']",
        "command.run='python t.py --input_key question --pad_token <pad> --token_length 5'",
        "command.run='HF_TOKEN= python t.py --api-key $KEY --sort-key loss'",
        "command.run='TOKEN=$(cat t) python -c \"token=f(x)\"'",
        "command.env=[MAX_TOKEN_LENGTH=9,DB_PASS=]",
        "data.sft_path=hf_datasets/rows.jsonl",
    ],
)
def test_what_only_sounds_like_a_secret_is_taken(override: str) -> None:
    check_config(apply_overrides(RecipeConfig(), [override]))


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "apiKey", "--db-pass", "WANDBAPIKEY", "X-Api-Key", "STRIPE_KEY"),
        *("AWS_SECRET_ACCESS_KEY", "PREFECT_SERVER_API_AUTH_STRING", "judge.api_key"),
    ],
)
def test_names_can_be_secrets(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert is_secret_name(name)
    monkeypatch.setenv(name, VALUE)
    assert VALUE not in masked(f"it says {VALUE}")
    assert VALUE not in without_secrets(f"{name}={VALUE}")
    assert VALUE not in " ".join(masked_command([f"{name}={VALUE}"]))
    profile = tmp_path / "p.yaml"
    profile.write_text(json.dumps({"env": {name: VALUE}}))
    with pytest.raises(ConfigurationError, match="looks like a secret"):
        load_profile(str(profile))


def test_what_else_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key that a configuration names, and the longer of two secrets; no folder of a shell."""
    for name in ("PWD", "OLDPWD"):
        monkeypatch.setenv(name, "/home/ann/project")
    assert masked("/home/ann/project/.venv") == "/home/ann/project/.venv"
    monkeypatch.setenv("A_TOKEN", "opaque1")
    monkeypatch.setenv("B_TOKEN", "opaque1-and-more")
    assert masked("opaque1-and-more") == "***"
    monkeypatch.setenv("MY_JUDGE", VALUE)
    assert masked(VALUE) == VALUE
    config = apply_overrides(RecipeConfig(), ["judge.api_key_env=MY_JUDGE"])
    mask_keys_of(config)
    assert masked(f"HTTP 401: {VALUE} is wrong") == "HTTP 401: *** is wrong"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece",
    ["token", "a-", "sk-", "token ", "://a@", "eyJ-", "max_token", "password ", "_", "key-"],
)
def test_masking_is_linear_whatever_the_text(piece: str) -> None:
    """A quadratic pattern takes minutes for each of these."""
    text = piece * (400_000 // len(piece))
    masked(text)
    without_secrets(text)
    has_secret(text)
    list(assigned_secrets(text))


def test_the_environment_is_read_while_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitting takes a job's own settings out of it for a moment, in a thread."""
    monkeypatch.setenv("SOME_TOKEN", VALUE)
    stop = threading.Event()

    def edit() -> None:
        names = [f"EDITED_{number}_TOKEN" for number in range(50)]
        while not stop.is_set():
            os.environ.update(dict.fromkeys(names, "another-value"))
            for name in names:
                del os.environ[name]

    thread = threading.Thread(target=edit)
    thread.start()
    try:
        for _ in range(1000):
            assert masked(VALUE) == "***"
            assert environment()["SOME_TOKEN"] == VALUE
    finally:
        stop.set()
        thread.join()


# ---------------------------------------------------------------- what is published

BODY = json.dumps({"x": {"user": "hunter2", "effort": "high"}, "n": 3, "password": "plain"})


def test_texts_that_could_be_secrets_are_published_as_digests() -> None:
    shown = json.loads(public_body(BODY))
    assert shown["n"] == 3
    assert shown["x"]["effort"] == "high"
    assert shown["x"]["user"].startswith("(text with SHA-256 ")
    assert shown["password"].startswith("(text with SHA-256 ")
    assert public_body(public_body(BODY)) == public_body(BODY)
    harmless = '{"chat_template_kwargs": {"enable_thinking": false}}'
    assert public_body(harmless) == harmless


def test_no_card_recipe_or_evidence_has_such_a_text() -> None:
    config = replace(CONFIG, judge=replace(CONFIG.judge, extra_body=BODY))
    words = restated([f"judge.extra_body={BODY}"], config, CONFIG)
    command = public_command(shlex.join(["refiner", "run", "tiny", *words]))
    told = published_facts(full_facts(config=config, command=command))
    for text in (build_card(told), evidence_text(told, []), recipe_text(config), *words):
        assert "hunter2" not in text
        assert '"plain"' not in text
    assert "(text with SHA-256" in build_card(told)


# ---------------------------------------------------------------- logs


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> logging.Handler:
    monkeypatch.setenv("MY_JUDGE_API_KEY", "correct-horse-battery")
    monkeypatch.setenv("HF_TOKEN", "not-shaped-like-one")
    monkeypatch.setenv("MY_WEBHOOK", "https://chat.example/hooks/T01/abc")
    monkeypatch.setenv("MAX_TOKEN_LENGTH", "4096-4096")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsehood")
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(MaskingFormatter("%(message)s"))
    return handler


def said(handler: logging.Handler, text: str, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    return handler.format(logging.LogRecord("x", logging.INFO, __file__, 1, "%s", (text,), info))


def test_lines_and_tracebacks_are_logged_without_secrets(line: logging.Handler) -> None:
    """All known forms: test_hub_errors and test_secret_settings."""
    opaque = ("correct-horse-battery", "not-shaped-like-one", "https://chat.example/hooks/T01/abc")
    for secret in (*opaque, "hf_abcdefghijkl", "sk-abcdefgh1"):
        assert secret not in said(line, f"the key is {secret}.")
        assert "***" in said(line, f"the key is {secret}.")
        assert secret not in said(line, "it failed", RuntimeError(secret))
    text = "step 12 of 50: 4096-4096 tokens, falsehood, loss 1.25, see runs/stages/sft-0123456789ab"
    assert said(line, text) == text
