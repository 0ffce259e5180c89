"""Packs hold every token once, and what is in a pack cannot see its neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from refiner_core.contract.errors import ConfigurationError
from refiner_core.training.batches import (
    Sample,
    collate,
    first_fit,
    pack_samples,
    sharing_pays,
    to_device,
    work_of,
)
from refiner_core.training.model import loading
from refiner_core.training.model.logprobs import token_scores
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
            scores = token_scores(model, to_device(batch, model.device))
            flat[batch.flat_T] = scores.logprob_T.cpu()
    return flat


def alone_logprobs(model, samples) -> torch.Tensor:
    """The same by the plainest way: each sample alone through the whole model."""
    parts = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.response_ids], device=model.device)
            logp = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float(), -1)
            chosen = logp.gather(-1, ids[0, 1:, None])[:, 0].cpu()
            parts.append(chosen[len(sample.prompt_ids) - 1 :])
    return torch.cat(parts)


def test_loss_masks_and_positions_of_the_reference_vector():
    packs = pack_samples(SAMPLES, 8)
    masks = ["".join("FT"[i - 1 in pack.source_T] for i in range(len(pack))) for pack in packs]
    assert masks == ["FFFTFT", "FFFT"]
    assert packs[0].input_ids_L == [1, 2, 3, 10, 11, 12]
    assert [pack.target_T for pack in packs] == [[10, 12], [21]]
    assert [pack.flat_T for pack in packs] == [[0, 2], [4]]
    (pack,) = pack_samples(SAMPLES, 16)
    assert pack.position_ids_L == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert pack.unit_L == [0] * 6 + [1] * 4


def test_a_sample_longer_than_a_pack_is_refused_not_cut():
    with pytest.raises(ConfigurationError, match="pack_length"):
        pack_samples(SAMPLES, 5)


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
    [(13, 1, None), (20, 3, None), (64, 1, 40.0), (13, 9, 1e9)],
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("balance", [None, 40.0])
def test_gradients_of_packed_samples_are_those_of_samples_alone(attention, share_prompts, balance):
    """Also with gradient checkpointing, which is in force in train mode only."""
    model = tiny_model()
    samples = random_samples(SHAPE)
    weight_F = torch.linspace(-1, 1, sum(len(s.response_ids) for s in samples))
    parts = {}
    for kind in ("alone", "packed"):
        model.zero_grad()
        if kind == "packed":
            model.set_attn_implementation(attention)
            model.activation_checkpointing_enable(
                activation_checkpointing_kwargs={"use_reentrant": False}
            )
            model.train()
            batches = [
                collate([pack], balance=balance)
                for pack in pack_samples(samples, 40, share_prompts=share_prompts, balance=balance)
            ]
        else:
            batches = [collate([pack]) for s in samples for pack in pack_samples([s], 40)]
        loss = torch.tensor(0.0)
        for batch in batches:
            part = (weight_F[batch.flat_T] * token_scores(model, batch).logprob_T).sum()
            part.backward()
            loss += part.detach()
        parts[kind] = (loss, torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(parts["packed"][0], parts["alone"][0], atol=1e-4, rtol=1e-5)
    error = (parts["packed"][1] - parts["alone"][1]).norm()
    assert error < 1e-5 * parts["alone"][1].norm()


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and is_flash_attn_2_available()),
    reason="no CUDA device with flash-attn",
)
def test_isolation_holds_with_flash_attention():
    samples = random_samples(SHAPE)
    model = tiny_model(head_dim=64).to("cuda", torch.bfloat16)
    expected = alone_logprobs(model, samples)
    model.set_attn_implementation("flash_attention_2")
    for pack_length in (13, 64):
        packed = flat_logprobs(model, samples, pack_length=pack_length)
        torch.testing.assert_close(packed, expected, atol=0.15, rtol=0)


@pytest.mark.parametrize(
    ("prompt", "response", "shared"),
    [(1600, 500, 179_200), (4000, 500, 256_000), (6000, 800, 396_800)],
)
def test_long_prompts_of_groups_are_shared_beside_flash_attention(prompt, response, shared):
    """Groups of 8 of a 4B model, whose matrices cost as much as 12k tokens of attention."""
    samples = random_samples([(prompt, [response] * 8)] * 2)
    assert work_of([(prompt, [response] * 8)] * 32)[0] == shared
    assert sharing_pays(samples, 20_480, 12_000.0)


@pytest.mark.parametrize("shape", [[(1600, [500])] * 4, [(8, [2000] * 8)], [(0, [50] * 4)]])
def test_nothing_is_shared_where_plain_packs_are_cheaper(shape):
    assert not sharing_pays(random_samples(shape), 20_480, 12_000.0)


@pytest.mark.slow
def test_flex_attention_sees_what_the_dense_mask_shows():
    """Forward only: FlexAttention has no backward pass on a CPU."""
    samples = random_samples([(100, [60, 90, 10]), (300, [200, 40]), (1, [5])])
    model = tiny_model()
    packs = pack_samples(samples, 900, share_prompts=True)
    batch = collate(packs, flex=True)
    assert batch.input_ids_BL.shape[1] % 128 == 0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = token_scores(model, batch).logprob_T
        AttentionInterface.register(loading.FLASH, loading.flash_or_flex)
        model.config._attn_implementation = loading.FLASH
        found = token_scores(model, batch).logprob_T
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and is_flash_attn_2_available()),
    reason="no CUDA device with flash-attn",
)
def test_shared_prompts_train_as_plain_packs_do_beside_flash_attention():
    samples = random_samples([(300, [60, 90, 10, 200]), (40, [100] * 4)])
    model = tiny_model(head_dim=64).to("cuda", torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    assert loading.flex_works(loading.LoadedModel(model, None, False, None))
    found = []
    for share in (False, True):
        model.zero_grad()
        packs = pack_samples(samples, 1200, share_prompts=share)
        for pack in packs:
            batch = to_device(collate([pack], flex=True), "cuda")
            token_scores(model, batch).logprob_T.mean().backward()
        found.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
    assert (found[0] - found[1]).norm() < 0.05 * found[0].norm()


def test_a_prompt_is_shared_only_as_widely_as_attention_is_cheap():
    long_responses = random_samples([(2, [30] * 6)])
    long_prompt = random_samples([(90, [2] * 6)])

    def copies(samples, balance):
        packs = pack_samples(samples, 300, share_prompts=True, balance=balance)
        tokens = sum(map(len, packs)) - sum(len(s.response_ids) for s in samples)
        return tokens // len(samples[0].prompt_ids)

    assert copies(long_responses, None) == copies(long_prompt, None) == 1
    assert copies(long_responses, 50.0) == 6
    assert copies(long_prompt, 50.0) == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.lists(st.integers(1, 6), min_size=1, max_size=5)),
        min_size=1,
        max_size=8,
    ),
    st.integers(14, 60),
    st.booleans(),
    st.none() | st.floats(1.0, 1e6),
)
def test_no_token_is_dropped_or_doubled(shape, pack_length, share_prompts, balance):
    samples = random_samples(shape)
    packs = pack_samples(samples, pack_length, share_prompts=share_prompts, balance=balance)
    assert all(len(pack) <= pack_length for pack in packs)
    batch = collate(packs, balance=balance)
    predicted = {
        s.start + k: token
        for s in samples
        for k, token in enumerate(s.response_ids)
        if k or s.prompt_ids
    }
    assert sorted(predicted.items()) == sorted(
        zip(batch.flat_T.tolist(), batch.target_T.tolist(), strict=True)
    )


def test_shared_prompts_are_computed_once():
    samples = random_samples([(20, [2, 2, 2, 2])])
    plain = sum(map(len, pack_samples(samples, 100)))
    shared = sum(map(len, pack_samples(samples, 100, share_prompts=True)))
    assert (plain, shared) == (88, 28)
