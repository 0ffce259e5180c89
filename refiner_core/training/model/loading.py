"""Loading of a model in one process.

In: a folder or Hub name and the ``model`` section. Out: a live model and tokenizer.

Loading verifies training's assumptions on the model itself: packed sequences do not attend to each
other, and a logit is exactly output head times last hidden state. A model with recurrent layers
gets one sample per row; one with soft-capped logits is refused instead of trained wrongly.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward

from refiner_core.contract.config import ModelConfig
from refiner_core.contract.errors import (
    ConfigurationError,
    DamagedCheckpoint,
    StageFailed,
    UnsupportedError,
    WorkspaceError,
)
from refiner_core.generation.load import load_model as load_bare_model
from refiner_core.generation.load import load_tokenizer
from refiner_core.generation.saving import model_tensors, whole_shape
from refiner_core.training.batches import (
    OWN_ROW,
    Batch,
    Pack,
    Sample,
    build_pack,
    collate,
    to_device,
)
from refiner_core.training.model.logprobs import hidden_states
from refiner_core.training.ranks import Ranks, on_all, on_first

log = logging.getLogger(__name__)


def check_shapes(model: Any, saved: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Refuse weights of another model.

    Raises
    ------
    WorkspaceError
        The message names a differing tensor.
    """
    shapes = {name: whole_shape(tensor) for name, tensor in model_tensors(model).items()}
    found = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    different = sorted(n for n in shapes.keys() | found.keys() if shapes.get(n) != found.get(n))
    if different:
        raise WorkspaceError(
            f"{folder} holds the weights of another model ({different[0]} differs)",
            expected="a checkpoint of this stage",
            fix="remove the checkpoint to start the stage again",
        )


def saved_tensors(*paths: Path) -> dict[str, torch.Tensor]:
    """The tensors of several safetensors files, memory-mapped: each is read on use. A truncated
    file raises :class:`DamagedCheckpoint`."""
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        with reading(path):
            found |= safetensors.torch.load_file(path)
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error of a reading library into :class:`DamagedCheckpoint`."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise DamagedCheckpoint(
            f"{path} cannot be read ({error})",
            expected="a complete checkpoint of this stage",
            fix="remove the checkpoint to resume from the previous one",
        ) from error


def read_pickled(path: Path) -> Any:
    """Content written by torch.save, tensors and plain values only."""
    with reading(path):
        return torch.load(path, map_location="cpu", weights_only=True)


_LEAK_TOLERANCE = 1e-3
_NO = (False,) * 5
_HEAD_TOLERANCE = 1e-2
_KERNEL_TOLERANCE = 3e-2  # two kernels in bfloat16
FLASH = "flash_attention_2"
#: Kernels that skip masked blocks.
_SKIPPING = (FLASH, "flex_attention")
_GIB = 2**30
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # unit of `ru_maxrss` in bytes


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to train, its tokenizer, and the layout of its packs.

    ``share_prompts`` and ``balance`` are arguments of :mod:`refiner_core.training.batches`. With a
    ``flex_balance`` prompts are shared by FlexAttention, in batches where that costs less than
    plain packs (:func:`~refiner_core.training.batches.sharing_pays`).
    """

    model: Any
    tokenizer: Any
    share_prompts: bool
    balance: float | None
    flex_balance: float | None = None

    @property
    def device(self) -> Any:
        """Device of the model."""
        return self.model.device

    @property
    def pad_id(self) -> int:
        """Padding token; any token works, since it is masked."""
        return int(self.tokenizer.pad_token_id or 0)


def load_for_training(
    model_ref: str, config: ModelConfig, device: Any, *, reentrant: bool = False
) -> LoadedModel:
    """Load a model and its tokenizer for training, and check that it can be packed.

    ``model_ref`` is a folder or Hub id; the revision applies to Hub ids only. ``reentrant`` chooses
    the older kind of activation checkpointing, needed by ZeRO-3: the newer one compares properties
    of saved weights that change when they are gathered and freed.
    """
    model = load_model(model_ref, config, device)
    loaded = _laid_out(model, load_tokenizer(model_ref, config))
    check_model(loaded)
    _set_checkpointing(loaded.model, config, reentrant=reentrant)
    return loaded


def load_on_first(model_ref: str, config: ModelConfig, device: Any, ranks: Ranks) -> LoadedModel:
    """Load a model for sharding: whole on rank 0, where it is checked. On other ranks it has the
    same structure and buffers, and parameters whose memory was never touched, so that it takes
    none on a host. All ranks call it together; an error of rank 0 is raised on all.

    Raises
    ------
    StageFailed
        The model of another rank has other parameters, e.g. by another version of transformers.
    """
    loaded: LoadedModel | None = None

    def load() -> tuple[Any, ...]:
        nonlocal loaded
        loaded = load_for_training(model_ref, config, device, reentrant=True)
        model = loaded.model
        packs = loaded.share_prompts, loaded.balance, loaded.flex_balance
        return type(model), model.config, model.generation_config, _layout(model), packs

    kind, architecture, generation, layout, packs = on_first(ranks, load)

    def copy() -> LoadedModel:
        model = _untouched(kind, architecture, device)
        model.generation_config = generation
        _require_layout(model, layout)
        _set_checkpointing(model, config, reentrant=True)
        return LoadedModel(model, load_tokenizer(model_ref, config), *packs)

    made = on_all(ranks, lambda: loaded or copy())
    if ranks.world > 1:
        for _, buffer in sorted(made.model.named_buffers()):
            torch.distributed.broadcast(buffer, 0)
    return made


def _untouched(kind: Any, architecture: Any, device: Any) -> Any:
    """A model of a class and configuration with memory of unknown content."""
    with torch.device("meta"):
        model = kind._from_config(architecture, dtype=architecture.dtype)
    model.to_empty(device=device)
    model.tie_weights()  # moved one by one, tied weights have parted
    disable_dropout(model)
    return model.eval()


def _layout(model: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}


def _require_layout(model: Any, expected: Mapping[str, Any]) -> None:
    found = _layout(model)
    different = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
    if different:
        raise StageFailed(
            f"The model of this rank differs from rank 0's in {different[0]}: "
            f"{found.get(different[0])} instead of {expected.get(different[0])}",
            expected="the same versions of torch and transformers on all nodes",
            fix="use one environment for all nodes; if they have one, please report it",
        )


def _set_checkpointing(model: Any, config: ModelConfig, *, reentrant: bool) -> None:
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        model.train()  # transformers recomputes in train mode only; dropout is off


def _laid_out(model: Any, tokenizer: Any) -> LoadedModel:
    """The model with the layout of its packs."""
    kernel = model.config.get_text_config()._attn_implementation
    loaded = LoadedModel(model, tokenizer, share_prompts=False, balance=None)
    if leaks(loaded):
        log.warning(
            "%s carries a state along a row: each sample has a row of its own, which costs "
            "padding, and prompts are not shared",
            type(model).__name__,
        )
        return replace(loaded, balance=OWN_ROW)
    full = _attends_fully(model)
    if kernel not in _SKIPPING:
        return replace(loaded, share_prompts=full, balance=_attention_balance(model))
    if full and kernel == FLASH and flex_works(loaded):
        return replace(loaded, share_prompts=True, flex_balance=_attention_balance(model))
    return loaded


def load_model(model_ref: str, config: ModelConfig, device: Any) -> Any:
    """The bare model in evaluation mode, dropout off, on ``device``."""
    model = load_bare_model(model_ref, config)
    disable_dropout(model)
    return model.to(device)


def memory_metrics(device: Any) -> dict[str, float]:
    """Peak memory of this process so far, GiB: of the host, and of its GPU if it has one. Logged
    by a step as measurements."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / _GIB
    found = {"memory/host_peak_gib": most}
    if device.type == "cuda":
        found["memory/gpu_peak_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
    return found


def disable_dropout(model: Any) -> None:
    """Set every dropout to 0: log-probabilities must be those of the sampling model."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def check_window(model: Any, longest: int) -> None:
    """Refuse sequences of ``longest`` tokens if the model has fewer positions.

    Raises
    ------
    ConfigurationError
        The message has both numbers.
    """
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if window is not None and longest > window:
        raise ConfigurationError(
            f"The longest demonstration has {longest} tokens, and the model's window has {window}",
            expected=f"at most {window} tokens of prompt and answer together",
            fix=f"set sft.pack_length={window}: longer demonstrations are dropped and counted",
        )


def check_model(loaded: LoadedModel) -> None:
    """Refuse a model whose packed sequences attend to each other, or whose logits need more than
    the head's weight (a bias, a cap).

    Raises
    ------
    UnsupportedError
        Either condition fails.
    """
    model, device = loaded.model, loaded.device
    if leaks(loaded):
        raise _cannot_train(model, "packed sequences see each other", "block-isolated attention")
    with torch.no_grad():
        alone = torch.tensor([_probe(model).response_ids], device=device)
        logits = model(input_ids=alone, use_cache=False).logits[0, :-1].float()
        last = model.base_model(input_ids=alone, use_cache=False).last_hidden_state[0, :-1]
        head = model.get_output_embeddings()
        by_hand = (last @ head.weight.mT).float()
    if (logits - by_hand).norm() > _HEAD_TOLERANCE * logits.norm():
        raise _cannot_train(
            model, "logits are more than head x hidden state", "a plain output head"
        )


def leaks(loaded: LoadedModel) -> bool:
    """Whether a sequence sees the one before it: in the same row, unless each has its own.

    Two packs differ only in their first sequence; with isolated blocks the second one's hidden
    states cannot differ.
    """
    model, second = loaded.model, _probe(loaded.model)
    one_row = replace(loaded, balance=OWN_ROW if loaded.balance == OWN_ROW else None)
    hidden = []
    with torch.no_grad():
        for token in (1, 2):
            first = Sample((), (token % int(model.config.get_text_config().vocab_size),) * 5, _NO)
            batch = _placed(build_pack([[first], [second]]), one_row)
            hidden.append(hidden_states(model, batch).float())
    return bool((hidden[0] - hidden[1]).norm() > _LEAK_TOLERANCE * hidden[0].norm())


def _probe(model: Any) -> Sample:
    """A short sequence that every model has words for."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return Sample((), tuple(i % vocabulary for i in range(3, 9)), (True,) * 6)


def _attends_fully(model: Any) -> bool:
    """Whether all layers use full attention: a custom mask reaches every layer alike."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    full = all(kind == "full_attention" for kind in kinds)
    windowed = getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
    return full and not windowed


def flash_or_flex(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Attention of a FlashAttention model: FlexAttention where the mask has blocks. A forward pass
    that is recomputed has the same mask, and so the same kernel."""
    kernel = flex_attention_forward if isinstance(mask, BlockMask) else flash_attention_forward
    return kernel(module, query, key, value, mask, **options)


def flex_works(loaded: LoadedModel) -> bool:
    """Whether FlexAttention runs here, forward and backward, and agrees with the model's own kernel
    on a shared prompt; a warning says why not."""
    AttentionInterface.register(FLASH, flash_or_flex)
    model = loaded.model
    vocabulary = int(model.config.get_text_config().vocab_size)
    prompt = tuple(i % vocabulary for i in range(3, 150))
    samples = [Sample(prompt, tuple(ids[:70]), (True,) * 70) for ids in (prompt, prompt[7:])]
    try:
        flex = hidden_states(model, _placed(build_pack([samples]), loaded, flex=True))
        flex.float().sum().backward()
        plain = _placed(build_pack([[sample] for sample in samples]), loaded)
        with torch.no_grad():
            gap = (flex - hidden_states(model, plain)).float().norm() / flex.float().norm()
        if gap <= _KERNEL_TOLERANCE:
            return True
        why = f"it differs from {FLASH} by {float(gap):.2g}"
    except Exception as error:  # a compiler's: of any kind
        why = next(iter(f"{type(error).__name__}: {error}".splitlines()))
    finally:
        model.zero_grad()
    log.warning("Prompts are not shared: FlexAttention cannot be used here (%s)", why)
    return False


def _placed(pack: Pack, loaded: LoadedModel, *, flex: bool = False) -> Batch:
    """One pack as a batch on the model's device."""
    return to_device(collate([pack], balance=loaded.balance, flex=flex), loaded.device)


def _attention_balance(model: Any) -> float:
    """The row length at which dense attention costs as much as a layer's matrices.

    Forward floating-point operations per token and layer: 2 x parameters for the matrices,
    4 x length x attention width for attention.
    """
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    embeddings = sum(p.numel() for p in {*_embeddings(model)})
    per_layer = (sum(p.numel() for p in model.parameters()) - embeddings) / layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(per_layer / (2 * config.num_attention_heads * head_dim))


def _embeddings(model: Any) -> list[Any]:
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return [layer.weight for layer in layers if layer is not None]


def _cannot_train(model: Any, what: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} cannot be trained here: {what}",
        expected=expected,
        fix="use another model.attn_implementation or another model",
    )
