"""Models that need no download: tokenizers, random models of any size, small pre-trained bases.

:func:`builtin_model_dir` is where the packaged base models of the recipes `tiny` and `tiny-tools`
are. Nothing here imports torch until :mod:`refiner_core.models.random_model`,
:mod:`refiner_core.models.pretrain` or :mod:`refiner_core.models.tools` is imported.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["BUILTIN_MODELS", "builtin_model_dir", "tiny_model_dir"]

#: Folders of the packaged models, by the name behind ``builtin:``.
BUILTIN_MODELS = {"tiny": "tiny", "tiny-tools": "tiny_tools"}


def builtin_model_dir(name: str) -> Path:
    """The folder of a packaged base model (weights, tokenizer, card); KeyError if there is none."""
    return Path(str(files("refiner_core.models").joinpath(BUILTIN_MODELS[name])))


def tiny_model_dir() -> Path:
    """The folder of the packaged base model of the recipe `tiny`."""
    return builtin_model_dir("tiny")
