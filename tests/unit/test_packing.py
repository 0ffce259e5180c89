"""Packs hold every token once, and what is in a pack cannot see its neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.contract.errors import ConfigurationError
from refiner_core.training.logprobs import token_scores
from refiner_core.training.packing import (
    Sample,
    collate,
    first_fit,
    pack_samples,
    row_width,
)
from tests.support.tiny_training import VOCABULARY, tiny_model

SAMPLES = [
    Sample((1, 2, 3), (10, 11, 12), (True, False, True), start=0),
    Sample((4, 5), (20, 21), (False, True), start=3),
]


def random_samples(shape: list[tuple[int, list[int]]], seed: int = 0) -> list[Sample]:
    """Prompts of the given lengths with responses of the given lengths."""
    rng = torch.Generator().manual_seed(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY, (n,), generator=rng).tolist())

    samples, start = [], 0
    for prompt_length, response_lengths in shape:
        prompt = ids(prompt_length)
        for length in response_lengths:
            samples.append(Sample(prompt, ids(length), (True,) * length, start))
            start += length
    return samples


def flat_logprobs(model, samples, *, pack_length, batch_size=1, **layout) -> torch.Tensor:
    """(F,) log-probabilities of all response tokens, packed as told."""
    balance = layout.pop("balance", None)
    packs = pack_samples(samples, pack_length, **layout)
    flat = torch.full((sum(len(s.response_ids) for s in samples),), torch.nan)
    with torch.no_grad():
        for i in range(0, len(packs), batch_size):
            batch = collate(packs[i : i + batch_size], pad_id=5, balance=balance)
            flat[batch.flat_T] = token_scores(model, batch).logprob_T
    return flat


def alone_logprobs(model, samples) -> torch.Tensor:
    """The same by the plainest way: each sample alone through the whole model."""
    parts = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.response_ids])
            logp = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1], -1)
            chosen = logp.gather(-1, ids[0, 1:, None])[:, 0]
            parts.append(chosen[len(sample.prompt_ids) - 1 :])
    return torch.cat(parts)


def test_loss_masks_of_the_reference_vector():
    packs = pack_samples(SAMPLES, 8)
    masks = ["".join("FT"[m] for m in pack.loss_mask_L) for pack in packs]
    assert masks == ["FFFTFT", "FFFT"]
    assert packs[0].input_ids_L == [1, 2, 3, 10, 11, 12]
    assert [pack.target_T for pack in packs] == [[10, 12], [21]]
    assert [pack.flat_T for pack in packs] == [[0, 2], [4]]


def test_positions_restart_with_every_sample():
    (pack,) = pack_samples(SAMPLES, 16)
    assert pack.position_ids_L == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert pack.unit_L == [0] * 6 + [1] * 4


def test_a_sample_longer_than_a_pack_is_refused_not_cut():
    with pytest.raises(ConfigurationError, match="pack_length"):
        pack_samples(SAMPLES, 5)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.lists(st.integers(1, 6), min_size=1, max_size=5)),
        min_size=1,
        max_size=8,
    ),
    st.integers(14, 60),
    st.booleans(),
)
def test_no_token_is_dropped_or_doubled(shape, pack_length, share_prompts):
    samples = random_samples(shape)
    packs = pack_samples(samples, pack_length, share_prompts=share_prompts)
    targets = sorted(pair for p in packs for pair in zip(p.flat_T, p.target_T, strict=True))
    assert targets == list(enumerate(t for s in samples for t in s.response_ids))
    assert all(len(pack) <= pack_length for pack in packs)


@given(st.lists(st.integers(1, 20), max_size=40), st.booleans(), st.sampled_from([None, 1, 3]))
def test_first_fit_places_everything_once(lengths, decreasing, max_open):
    bins = first_fit(lengths, 20, decreasing=decreasing, max_open=max_open)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= 20 for members in bins)


SHAPE = [(5, [3, 1, 6]), (2, [4]), (7, [2, 2, 5, 3]), (1, [1, 6])]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize(
    ("pack_length", "batch_size", "balance"),
    [
        (13, 1, None),
        (64, 1, None),
        (20, 3, None),
        (64, 1, 1.0),
        (64, 1, 40.0),
        (20, 3, 10.0),
        (13, 9, 1e9),
    ],
)
def test_a_packed_sample_has_the_logprobs_it_has_alone(
    attention, share_prompts, pack_length, batch_size, balance
):
    model = tiny_model()
    samples = random_samples(SHAPE)
    expected = alone_logprobs(model, samples)
    model.set_attn_implementation(attention)
    packed = flat_logprobs(
        model,
        samples,
        pack_length=pack_length,
        batch_size=batch_size,
        balance=balance,
        share_prompts=share_prompts,
    )
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)


def test_gradients_of_packed_samples_are_those_of_samples_alone():
    model = tiny_model()
    samples = random_samples(SHAPE)

    def gradients(**layout) -> torch.Tensor:
        model.zero_grad()
        for pack in pack_samples(samples, 40, **layout):
            token_scores(model, collate([pack])).logprob_T.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    model.zero_grad()
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        logp = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1], -1)
        logp.gather(-1, ids[0, 1:, None])[len(sample.prompt_ids) - 1 :].sum().backward()
    alone = torch.cat([p.grad.flatten() for p in model.parameters()])
    for share_prompts in (False, True):
        together = gradients(share_prompts=share_prompts)
        assert (together - alone).norm() < 1e-5 * alone.norm()


def test_shared_prompts_are_computed_once():
    samples = random_samples([(20, [2, 2, 2, 2])])
    plain = sum(map(len, pack_samples(samples, 100)))
    shared = sum(map(len, pack_samples(samples, 100, share_prompts=True)))
    assert (plain, shared) == (88, 28)


def test_rows_are_short_where_attention_is_dear_and_full_where_it_is_cheap():
    lengths = [10, 3, 3, 3]
    assert row_width(lengths, balance=1.0) == 10
    assert row_width(lengths, balance=1e9) == 19
    samples = random_samples([(2, [4])] * 6)
    (pack,) = pack_samples(samples, 64)
    short = collate([pack], balance=1.0)
    assert short.input_ids_BL.shape == (6, 6)
    assert short.attention_mask is None
    assert collate([pack]).input_ids_BL.shape == (1, 36)


def test_chunked_logprobs_are_the_same(monkeypatch):
    model = tiny_model()
    (pack,) = pack_samples(random_samples(SHAPE), 200)
    batch = collate([pack])
    whole = token_scores(model, batch, temperature=0.7, entropy="loss")
    monkeypatch.setattr("refiner_core.training.logprobs.CHUNK_ELEMENTS", VOCABULARY * 3)
    chunked = token_scores(model, batch, temperature=0.7, entropy="loss")
    torch.testing.assert_close(chunked.logprob_T, whole.logprob_T)
    torch.testing.assert_close(chunked.entropy_T, whole.entropy_T)
    chunked.logprob_T.sum().backward()
    assert model.lm_head.weight.grad.isfinite().all()
