"""Ranks get every sample once, nearly equal work, and as many forward passes as each other."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.training.batches import (
    Sample,
    collate,
    even_out,
    neutral_pack,
    pack_samples,
    packs_of_ranks,
    share_among,
    share_packs,
)
from refiner_core.training.model.logprobs import token_scores
from tests.support.tiny_training import tiny_model

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
