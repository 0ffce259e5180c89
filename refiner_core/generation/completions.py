"""Checks and ends of completions, shared by all samplers. Torch-free.

In: sampling parameters, a model and its tokenizer. Out: an error of three parts, or the tokens that
end a text. Sharing ensures that changing the backend changes no sample's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from refiner_core.contract.errors import ConfigurationError, UnsupportedError
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Generator,
    SamplingParams,
    TurnGenerator,
    TurnRequest,
    TurnScheduler,
)


def check_window(
    requests: Sequence[GenerationRequest], params: SamplingParams, window: int | None
) -> int:
    """Refuse samples that may not fit; returns the longest possible length.

    Raises
    ------
    ConfigurationError
        The message has the numbers and the fields.
    """
    prompt = max(len(request.prompt_ids) for request in requests)
    longest = prompt + params.max_new_tokens
    if window is not None and longest > window:
        raise ConfigurationError(
            f"A prompt of {prompt} tokens and up to {params.max_new_tokens} new ones "
            f"make {longest}, and the model's window has {window}",
            expected=f"at most {window} tokens together",
            fix="lower data.max_prompt_token_length or grpo.response_length",
        )
    return longest


#: Kinds of layers with a recurrent state, as configurations name them.
RECURRENT = frozenset(
    {
        "linear_attention",
        "mamba",
        "mamba2",
        "recurrent",
        "conv",
        "rwkv",
        "hybrid",
        "mamba_attention",
    }
)


def recurrent_layers(config: Mapping[str, Any]) -> list[str]:
    """Kinds of recurrent layers that the content of a ``config.json`` names."""
    found = config.get("layer_types") or config.get("layers_block_type")
    kinds = set(map(str, found if isinstance(found, list) else ()))
    return sorted(kinds & RECURRENT)


def check_layers(config: Any, longest: int) -> None:
    """Refuse layers whose cache is neither a recurrent state nor simply all earlier keys and
    values, and positions that depend on the batch (:func:`check_positions`).

    Raises
    ------
    UnsupportedError
        The message names the kinds of layers or positions.
    """
    check_positions(config.get_text_config().to_dict(), longest)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds & RECURRENT:  # such models also have layers without a cache
        kinds -= {*RECURRENT, "mlp", "moe"}
    sliding = getattr(config, "sliding_window", None)
    # A window that no sample exceeds is full attention.
    if sliding is None or longest <= sliding:
        kinds -= {"sliding_attention"}
        sliding = None
    others = sorted(kinds - {"full_attention"}) or (["sliding_attention"] if sliding else [])
    if others:
        raise UnsupportedError(
            f"The transformers backend cannot decode layers of kind {', '.join(others)} at "
            f"{longest} tokens",
            expected="layers that attend to all earlier tokens",
            fix="use grpo.generation_backend=vllm for this model",
        )


def check_positions(text: Mapping[str, Any], longest: int) -> None:
    """Refuse rotary positions that depend on the rest of the batch.

    Beyond the model's original window, these kinds choose the frequencies of all sequences by the
    longest one, so that a short sequence is encoded differently next to a long one. ``text`` holds
    the fields of the language model's configuration, or of its file (``su``: former ``longrope``).

    Raises
    ------
    UnsupportedError
        The message names the kind and both lengths.
    """
    ropes, name = text.get("rope_parameters") or text.get("rope_scaling") or {}, "rope_type"
    parts = [ropes] if {name, "type"} & {*ropes} else ropes.values()  # or one per kind of layer
    for rope in (part for part in parts if isinstance(part, Mapping)):
        kind = rope.get(name) or rope.get("type") or "default"
        first = text.get("max_position_embeddings")
        if kind in ("longrope", "su"):
            of_rope, whole = (of.get("original_max_position_embeddings") for of in (rope, text))
            first = of_rope or whole or first
        elif "dynamic" not in kind:
            continue
        if first is not None and longest > first:
            raise UnsupportedError(
                f"The model's rotary positions are of the kind {kind!r}: in a batch with more than "
                f"{first} tokens in a row they depend on its longest sequence, and there may be "
                f"{longest}",
                expected="positions of a sequence that depend on it alone",
                fix=f"keep sequences within {first} tokens (data.max_prompt_token_length, "
                "grpo.response_length, sft.pack_length), or use another model",
            )


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a text, by the generation configuration or by the tokenizer."""
    declared = (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    found: set[int] = set()
    for value in declared:
        found.update(
            value if isinstance(value, list | tuple) else () if value is None else (value,)
        )
    return frozenset(found)


def stop_string_window(strings: Sequence[str]) -> int:
    """Number of last tokens to search for a stop string: a token adds at least one byte, so the
    longest string's length in bytes suffices; a few more absorb decoding effects at the edge."""
    return max(len(text.encode()) for text in strings) + 8


def with_stop_string(tokenizer: Any, tails: list[list[int]], strings: Sequence[str]) -> list[bool]:
    """Whether each text, given by its last tokens, contains one of the stop strings."""
    texts = tokenizer.batch_decode(
        tails, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return [any(string in text for string in strings) for text in texts]


def completion_text(tokenizer: Any, completion: Completion) -> str:
    """The text of a completion.

    Only the final stop token is dropped. Other special tokens stay visible: a policy that opens a
    new turn inside its answer violated the format, and a decoder that skips them would hide it.
    """
    ids = list(completion.token_ids)
    if _ended_by_token(tokenizer, completion):
        ids.pop()
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def closing_ids(tokenizer: Any, completion: Completion) -> tuple[int, ...]:
    """The end-of-text token if a completion stopped at a stop string without one; else nothing.

    Training appends it, as the reference trainer does: a model that is always cut off at a stop
    string never learns to end.
    """
    stopped = completion.finish_reason == "stop"
    if not stopped or _ended_by_token(tokenizer, completion) or tokenizer.eos_token_id is None:
        return ()
    return (int(tokenizer.eos_token_id),)


def _ended_by_token(tokenizer: Any, completion: Completion) -> bool:
    ids = completion.token_ids
    stopped = completion.finish_reason == "stop"
    return stopped and bool(ids) and ids[-1] in tokenizer.all_special_ids


#: Running conversations at a time, if the generator has no batch size.
ROOM = 256


class LockstepTurns:
    """A :class:`~refiner_core.contract.types.TurnGenerator` over any generator.

    Parameters
    ----------
    generator
        Samples the rounds.
    room
        Maximum number of running conversations; None: as many as the generator decodes together
        (``batch_size``), else :data:`ROOM`.
    """

    def __init__(self, generator: Generator, *, room: int | None = None) -> None:
        self._generator = generator
        self._space = room or int(getattr(generator, "batch_size", ROOM))

    def turns(self, desk: TurnScheduler) -> None:
        """Sample rounds until the desk has no more turns. Raises errors of ``generate`` and the
        desk."""
        known: set[int] = set()
        while True:
            turns = desk.take(max(0, self._space - len(known)), wait=True)
            known.difference_update(turns.ended)
            known.update(request.conversation for request in turns.begin)
            if not turns.begin and not turns.more:
                return
            by_params: dict[SamplingParams, list[TurnRequest]] = {}
            for request in turns.begin:
                by_params.setdefault(request.params, []).append(request)
            for params, requests in by_params.items():
                samples = [GenerationRequest(r.context_ids, r.seed) for r in requests]
                finished = partial(_finish, desk, requests)
                self._generator.generate(samples, params, finished)


def _finish(
    desk: TurnScheduler, requests: Sequence[TurnRequest], index: int, completion: Completion
) -> None:
    desk.finished(requests[index], completion)


def turn_generator(generator: Generator | TurnGenerator) -> TurnGenerator:
    """The generator itself if it samples turns, else a lockstep wrapper."""
    return generator if isinstance(generator, TurnGenerator) else LockstepTurns(generator)
