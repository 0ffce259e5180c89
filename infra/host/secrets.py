"""Texts without credentials.

In: what a library, a server or a person has said. Out: the same with tokens, signed addresses and
passwords in addresses masked, wherever they come from.
"""

from __future__ import annotations

import os
import re

MASK = "***"
_SECRETS = (
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{6,}"),
    re.compile(r"(?i)(?<=bearer )[^\s'\"]+"),
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),
    re.compile(
        r"(?i)(?<=[?&;])(?:x-amz-[a-z-]+|signature|sig|token|policy|key-pair-id)=[^&\s'\"]+"
    ),
)


def masked(text: str) -> str:
    """``text`` without credentials."""
    known = [os.environ.get(n, "") for n in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")]
    for token in (t.strip() for t in known):
        text = text.replace(token, MASK) if len(token) >= 6 else text
    for secret in _SECRETS:
        text = secret.sub(MASK, text)
    return text
