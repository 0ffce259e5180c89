"""A model's tensors, and those of files that are read one at a time.

In: a model, or paths of safetensors files. Out: tensors by the model's names (a tied one once), and
refusals that say what is wrong with a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from refiner_core.contract.errors import DamagedCheckpoint, WorkspaceError

WEIGHTS = "model.safetensors"


def load_weights(folder: Path, model: Any) -> None:
    """Put the saved parameters and buffers into ``model``.

    Raises
    ------
    WorkspaceError
        If they are those of another model, or cannot be read.
    """
    with ExitStack() as files:
        tensors, saved = model_tensors(model), SavedTensors([folder / WEIGHTS], files)
        check_shapes(shapes_of(tensors), saved)
        copy_weights(tensors, saved)


def copy_weights(tensors: Mapping[str, torch.Tensor], saved: SavedTensors) -> None:
    """Copy saved tensors into those of the same names."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])


def check_shapes(shapes: Mapping[str, tuple[int, ...]], saved: SavedTensors) -> None:
    """Refuse weights of another model.

    Raises
    ------
    WorkspaceError
        Names one that differs.
    """
    found = saved.shapes()
    different = sorted(n for n in shapes.keys() | found.keys() if shapes.get(n) != found.get(n))
    if different:
        raise WorkspaceError(
            f"{saved.paths[0].parent} holds the weights of another model ({different[0]} differs)",
            expected="a checkpoint of this stage",
            fix="remove the checkpoint to start the stage again",
        )


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters (a tied one under its first name) and persistent buffers."""
    named = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True).keys()
    named.update((name, b) for name, b in model.named_buffers() if name in persistent)
    return {name: tensor.detach() for name, tensor in named.items()}


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Names and shapes."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class SavedTensors(Mapping[str, torch.Tensor]):
    """The tensors of several safetensors files, each read when it is asked for.

    Opening one shows whether it is cut short, as a :class:`DamagedCheckpoint`. A read that fails
    later, when something may have been changed already, is a :class:`WorkspaceError`.
    """

    def __init__(self, paths: Sequence[Path], opened: ExitStack) -> None:
        self.paths = list(paths)
        self._at: dict[str, tuple[Any, Path]] = {}
        for path in paths:
            with reading(path):
                file = opened.enter_context(safetensors.safe_open(path, framework="pt"))
                self._at.update((name, (file, path)) for name in file.keys())  # noqa: SIM118

    def __getitem__(self, name: str) -> torch.Tensor:
        file, path = self._at[name]
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise WorkspaceError(
                f"{path} cannot be read any more ({error})",
                expected="a complete checkpoint of this stage",
                fix="look at the file system, then run the same command again",
            ) from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes, from the files' headers."""
        return {n: tuple(f.get_slice(n).get_shape()) for n, (f, _) in self._at.items()}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a reading library makes of a damaged file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise DamagedCheckpoint(
            f"{path} cannot be read ({error})",
            expected="a complete checkpoint of this stage",
            fix="remove the checkpoint to go on from the one before it",
        ) from error


def read_pickled(path: Path) -> Any:
    """What torch.save wrote, tensors and plain values only."""
    with reading(path):
        return torch.load(path, map_location="cpu", weights_only=True)
