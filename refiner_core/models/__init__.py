"""Models without downloads: small pre-trained bases as folders, random models of any size.

:func:`builtin_model_dir` returns the packaged base models of the recipes `tiny` and `tiny-tools`;
their cards describe their training. torch is imported only by
:mod:`refiner_core.models.random_model`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

#: Folders of the packaged models, by the name behind ``builtin:``.
BUILTIN_MODELS = {"tiny": "tiny", "tiny-tools": "tiny_tools"}


def builtin_model_dir(name: str) -> Path:
    """The folder of a packaged base model (weights, tokenizer, card); KeyError if there is none."""
    return Path(str(files("refiner_core.models").joinpath(BUILTIN_MODELS[name])))


def tiny_model_dir() -> Path:
    """The folder of the packaged base model of the recipe `tiny`."""
    return builtin_model_dir("tiny")


def tiny_tokenizer() -> Any:
    """The tokenizer of the synthetic data: whole words for its own vocabulary, bytes for the rest,
    so that decoding restores any text exactly."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir(), local_files_only=True)
