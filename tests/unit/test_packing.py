"""Packs hold every token once, in an order that never changes, and ranks share them evenly."""

import itertools
import random
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.training.batches import (
    Sample,
    collate,
    even_out,
    neutral_pack,
    order_hash,
    pack_samples,
    packs_of_ranks,
    permutation,
    prompt_batch,
    seed_random,
    sft_steps,
    share_among,
    share_packs,
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


# ---------------------------------------------------------------- shares of ranks


PACK = 64


def step_of(groups: list[tuple[int, list[int]]]) -> list[Sample]:
    """Samples whose tokens say which group and sample they are of; flat places count up."""
    samples, start = [], 0
    for group, (prompt_length, lengths) in enumerate(groups):
        for length in lengths:
            ids = (3 + group,) * prompt_length
            samples.append(Sample(ids, (start % 40,) * length, (True,) * length, start))
            start += length
    return samples


GROUPS = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.integers(1, 40), min_size=1, max_size=9)), max_size=8
)


@settings(max_examples=60, deadline=None)
@given(
    GROUPS, st.integers(1, 6), st.booleans(), st.sampled_from([None, 8.0, 1000.0]),
    st.integers(1, 3),
)  # fmt: skip
def test_ranks_get_every_sample_once_and_equally_many_passes(groups, world, share, balance, size):
    samples = step_of(groups)
    told = {"pack_length": PACK, "share_prompts": share, "balance": balance}
    shares = share_among(samples, world, **told)
    assert len(shares) == world
    assert sorted((s for mine in shares for s in mine), key=lambda s: s.start) == samples
    assert all(mine == sorted(mine, key=lambda s: s.start) for mine in shares)
    assert shares == share_among(samples, world, **told), "always on the same rank"
    packs = packs_of_ranks(samples, world, **told, multiple_of=size)
    assert len({len(mine) for mine in packs}) == 1
    assert packs[0], "a rank without samples still takes part"
    assert world == 1 or len(packs[0]) % size == 0
    assert all(len(pack) <= PACK for mine in packs for pack in mine)
    trained = sorted(place for mine in packs for pack in mine for place in pack.flat_T)
    unpredicted = {s.start for s in samples if not s.prompt_ids}
    everything = range(sum(len(s.response_ids) for s in samples))
    assert trained == [place for place in everything if place not in unpredicted]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, PACK), max_size=20), st.integers(1, 5))
def test_finished_packs_are_shared_once_and_evenly(lengths, world):
    packs = [
        pack_samples([Sample((1,), (i % 40,) * (n - 1), (True,) * (n - 1), 100 * i)], PACK)[0]
        for i, n in enumerate(lengths)
    ]
    shares = share_packs(packs, world)
    real = [[pack for pack in mine if pack.target_T] for mine in shares]
    key = [pack.flat_T[0] for mine in real for pack in mine]
    assert sorted(key) == [pack.flat_T[0] for pack in packs]
    assert {len(mine) for mine in shares} == {max(1, -(-len(packs) // world))}
    work = [sum(map(len, mine)) for mine in real]
    assert max(work) - min(work) <= max(lengths, default=0), "within one pack of each other"


def test_groups_stay_whole_where_there_are_enough_and_are_cut_where_there_are_not():
    even = step_of([(10, [4, 4, 4, 4])] * 8)
    told = {"pack_length": 400, "share_prompts": True}
    for mine in share_among(even, 2, **told):
        groups = [list(group) for _, group in groupby(mine, lambda s: s.prompt_ids)]
        assert [len(group) for group in groups] == [4] * 4
    uneven = step_of([(10, [20] * 8), (10, [2] * 4)])
    first, second = share_among(uneven, 2, **told)
    work = [sum(len(s.response_ids) for s in mine) for mine in (first, second)]
    assert abs(work[0] - work[1]) <= 20, "the long group trains on both ranks"


def pack_of(*lengths: int):
    """A pack of samples of such lengths, a token of it the prompt."""
    samples = [Sample((1,), (2,) * (n - 1), (True,) * (n - 1)) for n in lengths]
    (pack,) = pack_samples(samples, 1000)
    return pack


def test_a_single_rank_gets_a_neutral_pack_only_where_it_has_nothing():
    assert even_out([[pack_of(5)]], multiple_of=4) == [[pack_of(5)]]
    assert even_out([[]], multiple_of=1) == [[neutral_pack()]]
    assert even_out([], multiple_of=1) == []
    neutral = neutral_pack()
    assert (len(neutral), neutral.target_T) == (2, [])


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_neutral_pack_runs_through_the_whole_model_and_moves_nothing(gradient_checkpointing):
    model = tiny_model()
    if gradient_checkpointing:
        model.activation_checkpointing_enable(
            activation_checkpointing_kwargs={"use_reentrant": False}
        )
        model.train()
    batch = collate([neutral_pack(), neutral_pack()], balance=10.0)
    scores = token_scores(model, batch, entropy="loss")
    assert len(scores.logprob_T) == 0
    (scores.logprob_T.sum() + scores.entropy_T.sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} takes no part: a rank would wait for it"
        assert not parameter.grad.any()


# ---------------------------------------------------------------- orders


def test_orders_are_those_that_earlier_runs_had() -> None:
    """A run that a newer version resumes keeps its shuffle."""
    assert permutation(8, 17, "prompts", 0) == [5, 6, 2, 1, 7, 4, 0, 3]
    assert permutation(8, 17, "prompts", 1) != [5, 6, 2, 1, 7, 4, 0, 3]
    assert order_hash(["a", "b"]) == "023b8059a924f728"
    assert order_hash(["b", "a"]) != order_hash(["a", "b"]) != order_hash(["ab"])
    assert len(order_hash([])) == 16


def test_global_random_generators_follow_the_seed() -> None:
    seed_random(17)
    drawn = random.random(), float(np.random.random()), float(torch.rand(()))
    assert drawn == pytest.approx(
        (0.020298028841919225, 0.09554442557193887, 0.5678924322128296), abs=1e-7
    )
    seed_random(18)
    assert random.random() != drawn[0]


def test_a_step_takes_the_next_prompts_and_an_epoch_leaves_out_its_tail() -> None:
    shuffles = [permutation(7, 3, "prompts", epoch) for epoch in range(2)]
    for step, (epoch, cursor) in enumerate([(0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4)]):
        chosen = tuple(shuffles[epoch][cursor : cursor + 2])
        assert prompt_batch(3, 7, 2, step) == (epoch, cursor, chosen)
    assert prompt_batch(3, 2, 2, 5)[0] == 5, "as many prompts as a step takes are enough"
    with pytest.raises(DataError, match="There are 1 training prompts, and one step takes 2"):
        prompt_batch(3, 1, 2, 0)


def test_an_epoch_is_packed_in_its_shuffle_and_cut_into_steps() -> None:
    order = [permutation(5, 1, "sft", epoch) for epoch in range(3)]
    steps = sft_steps(1, [10] * 5, pack_length=10, packs_per_step=2, epochs=2.5)
    assert steps == [
        (epoch, [(i,) for i in order[epoch][begin:end]])
        for epoch, cuts in ((0, (0, 2, 4, 5)), (1, (0, 2, 4, 5)), (2, (0, 2, 3)))
        for begin, end in itertools.pairwise(cuts)
    ], "three packs are the half of five"
    for most in (0, 1, 3, 4):
        told = {"pack_length": 10, "packs_per_step": 2, "epochs": 1e6}
        assert sft_steps(1, [10] * 5, **told, max_steps=most) == steps[:most]


def test_sixty_four_packs_stay_open_for_what_fits_in_later() -> None:
    """Fewer pack worse, and another number gives another run for the same seed."""
    lengths = [6] * 200 + [4] * 20
    (step,) = sft_steps(2, lengths, pack_length=10, packs_per_step=10_000, epochs=1.0)
    order = permutation(220, 2, "sft", 0)
    opened: list[list[int]] = []
    packs: list[list[int]] = []
    for i in order:
        room = next((p for p in opened if sum(lengths[j] for j in p) + lengths[i] <= 10), None)
        if room is None:
            room = []
            packs.append(room)
            opened = [*opened, room][-64:]
        room.append(i)
    assert [list(pack) for pack in step[1]] == packs
