"""Models and tokenizers by reference: the shipped one, a folder, or a Hub repository.

In: a reference (``builtin:tiny``, a folder, a Hub id) and the model configuration. Out: a
tokenizer, or a causal model with the configured type and attention kernel, in evaluation mode on
the CPU.

A reference may differ from ``config.name_or_path``: a stage loads the output of an earlier stage.
The configured revision applies to ``config.name_or_path`` alone. Folders are read without the
network. torch and transformers are imported on the first load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refiner_core.contract.config import ModelConfig, Resources
from refiner_core.contract.errors import ConfigurationError, RefinerError, UnsupportedError

BUILTIN_PREFIX = "builtin:"


def set_threads(config: ModelConfig) -> None:
    """Use the configured number of threads: sums depend on it."""
    import torch

    torch.set_num_threads(config.cpu_threads)


def device_for(resources: Resources) -> Any:
    """The GPU if one is requested, else the CPU, whatever the machine has.

    Raises
    ------
    UnsupportedError
        A GPU is requested and torch sees none.
    """
    import torch

    if resources.gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"resources.gpus={resources.gpus}, but torch sees no CUDA device",
            expected="a visible GPU and a CUDA build of torch",
            fix="set resources.gpus=0, or run on a machine with a GPU",
        )
    return torch.device("cuda", 0)


def resolve_ref(ref: str) -> str:
    """The folder or Hub id of a reference.

    Raises
    ------
    ConfigurationError
        There is no such built-in model, or no folder for a reference that can only be one.
    """
    if ref.startswith(BUILTIN_PREFIX):
        from refiner_core.models import BUILTIN_MODELS, builtin_model_dir

        name = ref.removeprefix(BUILTIN_PREFIX)
        if name not in BUILTIN_MODELS:
            shipped = ", ".join(f"`{BUILTIN_PREFIX}{known}`" for known in BUILTIN_MODELS)
            raise ConfigurationError(
                f"There is no built-in model {name!r}",
                expected=f"one of {shipped}, a folder or a Hub id",
                fix="change model.name_or_path",
            )
        return str(builtin_model_dir(name))
    path = Path(ref).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_absolute() or ref.startswith((".", "~")) or ref.count("/") > 1:
        raise ConfigurationError(
            f"There is no model folder {ref}",
            expected="`builtin:tiny`, an existing folder or a Hub id (`owner/name`)",
            fix="change model.name_or_path",
        )
    return ref


def _source(ref: str, config: ModelConfig) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for its source, with remote code off: by default it would
    prompt at the terminal."""
    resolved = resolve_ref(ref)
    source = {"pretrained_model_name_or_path": resolved, "trust_remote_code": False}
    if ref.startswith(BUILTIN_PREFIX) or Path(resolved).is_dir():
        return {**source, "local_files_only": True}
    revision = config.revision if ref == config.name_or_path else "main"
    return {**source, "revision": revision}


@contextmanager
def _loading(what: str, ref: str) -> Iterator[None]:
    """Translate the errors of many libraries about damaged files."""
    try:
        yield
    except (MemoryError, RefinerError):
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        if not isinstance(error, OSError | ValueError | RuntimeError):  # "'added_tokens'"
            reason = ": ".join(filter(None, [type(error).__name__, reason]))
        raise ConfigurationError(
            f"The {what} of {ref} cannot be loaded ({reason})",
            expected="a folder in Hugging Face layout, or a Hub repository that this machine can "
            "reach",
            fix="check model.name_or_path and model.revision; without a network, fetch it "
            "beforehand (`hf download`)",
        ) from error


def load_tokenizer(ref: str, config: ModelConfig) -> Any:
    """The tokenizer of ``config.tokenizer_name_or_path`` if set, else of ``ref``.

    ``config.chat_template`` replaces the tokenizer's own.

    Raises
    ------
    ConfigurationError
        It cannot be found or read.
    """
    from transformers import AutoTokenizer

    ref = config.tokenizer_name_or_path or ref
    source = _source(ref, config)
    with _loading("tokenizer", ref):
        tokenizer = AutoTokenizer.from_pretrained(**source)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return tokenizer


def load_model(ref: str, config: ModelConfig) -> Any:
    """A causal language model with the configured type and attention kernel.

    Raises
    ------
    ConfigurationError
        It cannot be found or read, or lacks weights: transformers would fill them with random
        numbers and continue.
    UnsupportedError
        The attention kernel is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    source = _source(ref, config)
    with _loading("model", ref):
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                **source,
                dtype=getattr(torch, config.dtype),
                attn_implementation=config.attn_implementation,
                output_loading_info=True,
            )
        except ImportError as error:
            raise UnsupportedError(
                f"Attention kernel {config.attn_implementation} cannot be used here ({error})",
                expected="an installed kernel",
                fix="install the `gpu` extra, or set model.attn_implementation=sdpa",
            ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigurationError(
            f"The checkpoint {ref} lacks {len(missing)} of the model's weights, {missing[0]} first",
            expected="a complete checkpoint",
            fix="fetch or export it again; it may have been cut short",
        )
    return model.eval()
