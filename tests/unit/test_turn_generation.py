"""Turns of conversations on one model sample what single calls sample."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from refiner_core.contract.errors import ConfigurationError, StageFailed
from refiner_core.contract.types import (
    GenerationRequest,
    Generator,
    SamplingParams,
    TurnGenerator,
    Turns,
)
from refiner_core.generation import turns as turns_module
from refiner_core.generation.completions import LockstepTurns, turn_generator
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.generation.turns import _SlotCache
from refiner_core.training.rollouts.policies import CopyPolicy
from tests.support.tiny_training import tiny_model, tiny_tokenizer
from tests.support.turn_script import Script

PARAMS = SamplingParams(max_new_tokens=9)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=7)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return tiny_model()


def continuous(model: Any, batch_size: int = 64, **settings: Any) -> TransformersGenerator:
    return TransformersGenerator(model, tiny_tokenizer(), batch_size=batch_size, **settings)


def agrees(model: Any, script: Script, conversations: int = 7) -> None:
    """Each turn is what a call of its own samples, and all turns were sampled."""
    assert len(script.done) == conversations * script.turns
    alone = TransformersGenerator(model, tiny_tokenizer())
    for request, completion in script.done.values():
        (expected,) = alone.generate(
            [GenerationRequest(request.context_ids, request.seed)], request.params
        )
        assert completion.token_ids == expected.token_ids
        assert completion.finish_reason == expected.finish_reason
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-4)


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Tokens of each pass through the model while it lasts, padding included."""
    passes: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _, given, out: passes.append(given[0].numel())
    )
    try:
        yield passes
    finally:
        hook.remove()


# ---------------------------------------------------------------- what is sampled


KINDS = (
    PARAMS,
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.8, max_new_tokens=14),
    SamplingParams(temperature=1.2, top_k=5, max_new_tokens=1),
    SamplingParams(max_new_tokens=30, stop_strings=("w7", "w1 ")),
)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_turns_are_what_single_calls_sample(model: Any, batch_size: int) -> None:
    """Every turn has its own parameters; caches that live on, joins, copies of prefixes and slots
    that move change no number."""
    script = Script(10, params=lambda c, t: KINDS[(c + t) % 5], slow=lambda c, t: (3 * c + t) % 4)
    continuous(model, batch_size).turns(script)
    agrees(model, script, 10)
    assert script.most <= batch_size
    stopped = [c.finish_reason for r, c in script.done.values() if r.params.stop_strings]
    assert "stop" in stopped


def test_a_repaired_turn_rolls_its_cache_back(model: Any) -> None:
    script = Script(repaired=lambda c, t: (c + t) % 2 == 0, slow=lambda c, t: c % 3)
    continuous(model, 4).turns(script)
    agrees(model, script)


def test_the_same_answers_of_the_desk_give_the_same_bits(model: Any) -> None:
    """A run that is resumed exactly samples the turns again that it had sampled."""

    def once() -> Script:
        script = Script(9, slow=lambda c, t: (c * t) % 3)
        continuous(model, 4).turns(script)
        return script

    torch.manual_seed(1)
    first = once()
    torch.manual_seed(2)
    second = once()
    assert second.done == first.done
    assert second.finish_order == first.finish_order
    assert second.asked == first.asked


def test_little_memory_makes_fewer_slots_and_changes_no_sample(model: Any, monkeypatch) -> None:
    """Parked conversations lose their keys, and live ones wait, before memory runs out."""
    widest = []
    resize = _SlotCache.resize

    def watched(cache: Any, kept: Sequence[int], count: int, columns: int) -> None:
        widest.append((count, columns))
        resize(cache, kept, count, columns)

    monkeypatch.setattr(_SlotCache, "resize", watched)
    monkeypatch.setattr(turns_module, "max_cache_entries", lambda _: 3 * 64)
    script = Script(3, 6, params=lambda *_: SamplingParams(max_new_tokens=24), prompt=20, told=24)
    continuous(model).turns(script)
    agrees(model, script, 3)
    assert widest[0] == (3, 64)
    assert all(count * columns <= 3 * 64 or count == 1 for count, columns in widest)
    assert widest[-1][1] > 192  # a conversation larger than the memory runs alone


# ---------------------------------------------------------------- what is computed


def test_what_conversations_share_is_computed_once(model: Any) -> None:
    """Policy and tools of a domain are most of an episode's first tokens."""
    script = Script(12, 1, params=lambda *_: SamplingParams(max_new_tokens=1), prompt=200)
    with counted(model) as passes:
        continuous(model).turns(script)
    # Two domains of 200 tokens, three tasks of 20 in each, and a few tokens of each conversation.
    assert sum(passes) < 2 * 200 + 6 * 20 + 12 * 8


def test_what_is_cached_is_not_computed_again(model: Any) -> None:
    """A later turn costs what is new to it, a later conversation of a domain what it does not share
    with those before, also once these have ended."""
    script = Script(6, 4, params=lambda *_: replace(GREEDY, max_new_tokens=1), prompt=200)
    with counted(model) as passes:
        continuous(model, 2).turns(script)
    agrees(model, script, 6)
    told = 6 * 3 * (12 + 1)  # what tools said, and the token sampled before
    assert sum(passes) < 2 * 200 + 6 * (20 + 4) + told


def test_a_slow_tool_delays_no_other_conversation(model: Any) -> None:
    """The others are decoded until an answer is there."""
    script = Script(
        4, 2,
        params=lambda c, t: replace(GREEDY, max_new_tokens=40 if c else 2),
        slow=lambda c, t: 3,
    )  # fmt: skip
    continuous(model).turns(script)
    order = script.finish_order
    assert order[:2] == [(0, 0), (0, 1)]  # its second turn began and ended beside the first of all
    waits = [begun for _, wait, begun in script.asked if wait]
    assert len(waits) < len(script.asked) / 2


# ---------------------------------------------------------------- errors, and how a call ends


def test_logits_that_are_not_finite_end_the_call() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(StageFailed, match="not finite"):
        continuous(model).turns(Script())


def test_a_turn_that_does_not_fit_into_the_window_is_refused(model: Any) -> None:
    script = Script(1, 1, params=lambda *_: SamplingParams(max_new_tokens=500))
    with pytest.raises(ConfigurationError, match="window"):
        continuous(model).turns(script)


# ---------------------------------------------------------------- round by round


def test_lockstep_samples_the_same(model: Any) -> None:
    """Backends without turns of their own serve the same episodes."""

    class Plain:
        def __init__(self) -> None:
            self.generate = continuous(model).generate

    plain = Plain()
    assert not isinstance(plain, TurnGenerator)
    generator: Generator = plain
    script = Script(params=lambda c, t: GREEDY if c % 2 else PARAMS, repaired=lambda c, t: c == 3)
    turn_generator(generator).turns(script)
    agrees(model, script)
    few = Script()
    LockstepTurns(generator, room=2).turns(few)
    agrees(model, few)
    assert few.most == 2


# ---------------------------------------------------------------- policies of training


def test_a_copy_of_the_model_samples_turns_until_it_is_cancelled(model: Any) -> None:
    """A stage that ends does not wait for episodes in another thread."""

    def make(copied: Any, on_step: Callable[[int, int], None]) -> TransformersGenerator:
        return continuous(copied, on_step=on_step)

    policy = CopyPolicy(tiny_model(), make)
    script = Script()
    policy.turns(script)
    agrees(model, script)
    assert not policy.cancelled()

    class Cancelling(Script):
        def take(self, room: int, *, wait: bool) -> Turns:
            if len(self.asked) == 2:
                policy.cancel()
            return super().take(room, wait=wait)

    with pytest.raises(CancelledError):
        policy.turns(Cancelling())
    assert policy.cancelled()
