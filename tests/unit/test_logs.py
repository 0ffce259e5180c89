"""A job's log can be shared: what lets somebody in is not in it, whoever has logged it."""

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


def said(handler: logging.Handler, *args: object, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.INFO, __file__, 1, str(args[0]), args[1:], info)
    return handler.format(record)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("the key is correct-horse-battery.", "correct-horse-battery"),
        ("headers: {'authorization': 'Bearer not-shaped-like-one'}", "not-shaped-like-one"),
        ("PUT https://s3.example/lfs/ab?X-Amz-Signature=0a1b2c3d&x=1 200", "0a1b2c3d"),
        ("somebody else's hf_abcdefghijkl", "hf_abcdefghijkl"),
        ("http://me:opensesame@hub.example/api", "opensesame"),
    ],
)
def test_a_line_is_logged_without_the_secret(line: logging.Handler, text: str, secret: str) -> None:
    assert secret not in said(line, "%s", text)
    assert "***" in said(line, "%s", text)
    assert secret not in said(line, "it failed", error=RuntimeError(text)), "nor its traceback"


def test_ordinary_lines_stay_as_they_are(line: logging.Handler) -> None:
    text = "step 12 of 50: 4096-4096 tokens, loss 1.25, see runs/stages/sft-0123456789ab"
    assert said(line, text) == text
