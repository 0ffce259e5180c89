"""A job's log can be shared: it holds no secrets."""

from __future__ import annotations

import io
import logging

import pytest

from infra.attempt.stage_io import MaskingFormatter


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> logging.Handler:
    monkeypatch.setenv("MY_JUDGE_API_KEY", "correct-horse-battery")
    monkeypatch.setenv("HF_TOKEN", "not-shaped-like-one")
    monkeypatch.setenv("MAX_TOKEN_LENGTH", "4096-4096")
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(MaskingFormatter("%(message)s"))
    return handler


def said(handler: logging.Handler, text: str, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    return handler.format(logging.LogRecord("x", logging.INFO, __file__, 1, "%s", (text,), info))


def test_lines_and_tracebacks_are_logged_without_secrets(line: logging.Handler) -> None:
    """All known forms: test_hub_errors and test_secret_settings."""
    for secret in ("correct-horse-battery", "not-shaped-like-one", "hf_abcdefghijkl"):
        assert secret not in said(line, f"the key is {secret}.")
        assert "***" in said(line, f"the key is {secret}.")
        assert secret not in said(line, "it failed", RuntimeError(secret))


def test_ordinary_lines_stay_as_they_are(line: logging.Handler) -> None:
    text = "step 12 of 50: 4096-4096 tokens, loss 1.25, see runs/stages/sft-0123456789ab"
    assert said(line, text) == text
