"""Models that need no download: a tokenizer, random models of any size, a small pre-trained base.

:func:`tiny_model_dir` is the packaged base model of the recipe `tiny`. Nothing here imports torch
until :mod:`refiner_core.models.random_model` or :mod:`refiner_core.models.pretrain` is imported.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["tiny_model_dir"]


def tiny_model_dir() -> Path:
    """The folder of the packaged base model (weights, tokenizer, card)."""
    return Path(str(files("refiner_core.models").joinpath("tiny")))
