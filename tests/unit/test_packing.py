"""Packs hold every token once, and what is in a pack cannot see its neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.contract.errors import ConfigurationError
from refiner_core.training.batches import (
    Sample,
    cheapest_units,
    collate,
    first_fit,
    pack_samples,
    row_cost,
    row_width,
    to_device,
)
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


def test_loss_masks_of_the_reference_vector():
    packs = pack_samples(SAMPLES, 8)
    masks = ["".join("FT"[i - 1 in pack.source_T] for i in range(len(pack))) for pack in packs]
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("balance", [None, 40.0])
def test_isolation_holds_with_gradient_checkpointing(attention, share_prompts, balance):
    """Values and gradients; checkpointing is in force in train mode only."""
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("wrong", [{"use_cache": True}, {"attention_mask": "ones"}])
def test_the_settings_that_would_leak_are_seen_to_leak(attention, wrong):
    """Why `hidden_states` says use_cache=False and gives no mask: with either default of
    transformers a sample sees its neighbour, and the tests above would fail."""
    model = tiny_model()
    model.set_attn_implementation(attention)
    (pack,) = pack_samples(random_samples([(5, [6]), (4, [7])]), 64)
    batch = collate([pack])
    told = {"use_cache": False} | wrong
    if "attention_mask" in told:
        told["attention_mask"] = torch.ones_like(batch.input_ids_BL)
    with torch.no_grad():
        sound = token_scores(model, batch).logprob_T
        leaky = model(
            input_ids=batch.input_ids_BL, position_ids=batch.position_ids_BL, **told
        ).logits[0]
    logp = torch.log_softmax(leaky[batch.source_T], -1)
    leaked = logp.gather(-1, batch.target_T[:, None])[:, 0]
    assert (leaked - sound).abs().max() > 0.1


def flash_or_none() -> str | None:
    """The name of a FlashAttention kernel that this machine has."""
    from transformers.utils import is_flash_attn_2_available

    usable = torch.cuda.is_available() and is_flash_attn_2_available()
    return "flash_attention_2" if usable else None


@pytest.mark.gpu
@pytest.mark.skipif(flash_or_none() is None, reason="no CUDA device with flash-attn")
def test_isolation_holds_with_flash_attention():
    samples = random_samples(SHAPE)
    model = tiny_model(head_dim=64).to("cuda", torch.bfloat16)
    expected = alone_logprobs(model, samples)
    model.set_attn_implementation("flash_attention_2")
    for pack_length in (13, 64):
        packed = flat_logprobs(model, samples, pack_length=pack_length)
        torch.testing.assert_close(packed, expected, atol=0.15, rtol=0)


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
    st.floats(1.0, 1e6),
)
def test_layout_for_dense_attention_neither_drops_nor_doubles(
    shape, pack_length, share_prompts, balance
):
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


def test_rollouts_in_dense_rows_pad_little():
    """Lengths of any spread: like stands beside like."""
    rng = torch.Generator().manual_seed(0)
    shape = [
        (int(torch.randint(60, 200, (), generator=rng)),
         torch.randint(10, 120, (8,), generator=rng).tolist())
        for _ in range(32)
    ]  # fmt: skip
    samples = random_samples(shape)
    for balance in (50.0, 450.0, 12_000.0):
        packs = pack_samples(samples, 1024, share_prompts=True, balance=balance)
        laid = [collate([pack], balance=balance) for pack in packs]
        positions = sum(batch.input_ids_BL.numel() for batch in laid)
        assert 1 - sum(batch.tokens for batch in laid) / positions <= 0.02


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
    monkeypatch.setattr("refiner_core.training.model.logprobs.CHUNK_ELEMENTS", VOCABULARY * 3)
    chunked = token_scores(model, batch, temperature=0.7, entropy="loss")
    torch.testing.assert_close(chunked.logprob_T, whole.logprob_T)
    torch.testing.assert_close(chunked.entropy_T, whole.entropy_T)
    chunked.logprob_T.sum().backward()
    assert model.lm_head.weight.grad.isfinite().all()


def test_first_fit_by_hand():
    """The oldest pack is closed and not the newest, which would leave packs almost empty."""
    assert first_fit([6, 6, 6, 4, 4, 4], 10) == [[0, 3], [1, 4], [2, 5]]
    assert first_fit([4, 6, 6], 10) == [[0, 1], [2]], "in the order given"
    assert first_fit([6, 6, 6, 4, 4, 4], 10, max_open=2) == [[0], [1, 3], [2, 4], [5]]
    assert first_fit([6, 6, 4, 4], 10, max_open=1) == [[0], [1, 2], [3]]
    assert first_fit([3, 5, 3, 5], 8, decreasing=True) == [[1, 0], [3, 2]]
    assert first_fit([8, 1], 8) == [[0], [1]], "as long as a pack is not too long"
    with pytest.raises(ConfigurationError, match="A sequence of 9 tokens does not fit in a pack"):
        first_fit([1, 9], 8)


SHARED = [
    Sample((1, 2), (7, 8), (True, True), start=10),
    Sample((1, 2), (9,), (True,), start=12),
    Sample((3,), (4, 5), (False, True), start=13),
    Sample((), (6, 11), (True, True), start=20),
]


def test_a_pack_of_shared_prompts_by_hand():
    (pack,) = pack_samples(SHARED, 64, share_prompts=True)
    assert pack.input_ids_L == [1, 2, 7, 8, 9, 3, 4, 5, 6, 11]
    assert pack.position_ids_L == [0, 1, 2, 3, 2, 0, 1, 2, 0, 1]
    assert pack.unit_L == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert pack.branch_L == [0, 0, 1, 1, 2, 0, 1, 1, 1, 1]
    # The first token after a prompt is predicted at the prompt's last one, in every branch; the
    # first token of a sample without a prompt by nothing.
    assert pack.source_T == [1, 2, 1, 6, 8]
    assert pack.target_T == [7, 8, 9, 5, 11]
    assert pack.flat_T == [10, 11, 12, 14, 21]
    assert pack.shared
    assert pack_samples([Sample((1,), (2,), (True,))], 8)[0].flat_T == [0], "by default the first"
    assert not pack_samples(SHARED[1:], 64, share_prompts=True)[0].shared


def test_packs_in_one_row_by_hand():
    first, second = pack_samples(SHARED[:2], 5, share_prompts=True)[0], pack_samples(SHARED[2:], 5)
    batch = collate([first, *second], pad_id=99)
    assert (batch.packs, batch.tokens) == (2, 10)
    assert batch.input_ids_BL.tolist() == [[1, 2, 7, 8, 9, 3, 4, 5, 6, 11]]
    assert batch.position_ids_BL.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 0, 1]]
    assert batch.source_T.tolist() == [1, 2, 1, 6, 8]
    assert batch.attention_mask is not None
    seen = [
        [k for k, visible in enumerate(row) if visible]
        for row in batch.attention_mask[0, 0].tolist()
    ]
    assert seen == [
        *([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4]),
        *([5], [5, 6], [5, 6, 7], [8], [8, 9]),
    ]


def test_packs_in_padded_rows_by_hand():
    packs = pack_samples(SHARED, 64, share_prompts=True)
    batch = collate(packs, pad_id=99, balance=1.0)  # attention so dear that no row holds two units
    assert (batch.packs, batch.tokens) == (1, 10)
    assert batch.input_ids_BL.tolist() == [[1, 2, 7, 8, 9], [3, 4, 5, 6, 11]]
    assert batch.position_ids_BL.tolist() == [[0, 1, 2, 3, 2], [0, 1, 2, 0, 1]]
    assert batch.source_T.tolist() == [1, 2, 1, 6, 8]
    plain = collate(pack_samples(SHARED[2:3] + SHARED[:1], 64), pad_id=99, balance=1.0)
    assert plain.input_ids_BL.tolist() == [[1, 2, 7, 8], [3, 4, 5, 99]]
    assert plain.position_ids_BL.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]], "padding counts on"
    assert plain.attention_mask is None
    assert plain.source_T.tolist() == [1, 2, 5]
    unsaid = collate(pack_samples(SHARED[2:3] + SHARED[:1], 64), balance=1.0)
    assert unsaid.input_ids_BL.tolist() == [[1, 2, 7, 8], [3, 4, 5, 0]]
    assert plain.flat_T.tolist() == [10, 11, 14]
    padded = collate(pack_samples(SHARED[:3], 64, share_prompts=True), pad_id=99, balance=1.0)
    mask = padded.attention_mask
    assert mask is not None
    assert padded.input_ids_BL[1].tolist() == [3, 4, 5, 99, 99]
    assert not mask[1, 0, :3, 3:].any(), "nothing sees padding"
    assert not mask[1, 0, 3:, :3].any(), "and padding sees nothing of a sample"


@pytest.mark.parametrize(
    ("width", "balance", "lengths"),
    [
        (100, 1e3, [100, 90, 80, 70, 60, 35, 30, 25, 25, 20, 20, 20]),
        (125, 1e4, [100, 90, 90, 70, 70, 50, 50, 50, 40, 35, 30, 30, 30, 30, 25, 25]),
        (150, 1e3, [100, 90, 90, 80, 80, 70, 60, 60, 35, 25, 20]),
        (200, 1e3, [100, 90, 80, 80, 70, 70, 70, 60, 60, 50, 40, 35, 35, 35, 35, 30, 20]),
        (300, 1e4, [100, 80, 80, 80, 60, 40, 40, 35, 30, 30, 25]),
        (400, 1e4, [100, 90, 80, 80, 70, 60, 60, 50, 50, 40, 35, 30, 25, 20]),
        (
            *(800, 1e5),
            [100, 90, 90, 90, 80, 80, 80, 80, 70, 70, 70, 70, 60, 60, 60, 60, 60, 50, 40, 40, 40]
            + [30] * 5,
        ),
        (70, 1e9, [30, 20, 20]),
    ],
)
def test_the_cheapest_width_of_rows_is_taken(width, balance, lengths):
    assert row_width(lengths, balance) == row_width(lengths[::-1], balance) == width
    packs = [pack_samples([Sample((1,), (2,) * (n - 1), (True,) * (n - 1))], 999)[0]
             for n in lengths[::-1]]  # fmt: skip
    rows = len(first_fit(lengths, width, decreasing=True))
    assert len(collate(packs, balance=balance).input_ids_BL) == rows

    def cost(row: int) -> float:
        rows = len(first_fit(lengths, row, decreasing=True))
        return rows * row * (1 + row / balance)

    for factor in (1, 1.25, 1.5, 2, 3, 4, 8):
        assert cost(width) <= cost(min(sum(lengths), int(factor * max(lengths))))


def test_what_a_row_costs():
    assert row_cost(10, None) == 10
    assert row_cost(10, 5.0) == 30, "attention doubles what 5 tokens cost, and is 2/3 of 10"


def test_a_group_is_cut_into_as_many_units_as_cost_least():
    """Responses of 6, 6, 6 and 6 to a prompt of 4; a unit of n tokens costs n (1 + n / balance)."""
    group = random_samples([(4, [6, 6, 6, 6])])

    def units(pack_length, balance):
        return [len(unit) for unit in cheapest_units(group, pack_length, balance)]

    assert units(64, None) == [4]
    assert units(64, 100.0) == [4]  # 28 x 1.28 = 35.8; two of 16: 37.1
    assert units(64, 60.0) == [2, 2]  # 28 x 1.47 = 41.1; two of 16: 40.5; four of 10: 46.7
    assert units(64, 10.0) == [1, 1, 1, 1]  # two of 16: 83.2; four of 10: 80
    assert units(22, None) == [3, 1]
    assert units(21, None) == [2, 2]
    assert units(10, None) == [1, 1, 1, 1]
    uneven = random_samples([(4, [9, 1, 1, 1])])
    assert [len(u) for u in cheapest_units(uneven, 64, 5.0)] == [1, 3]


def test_packs_for_dense_attention_hold_units_of_like_length():
    samples = random_samples([(1, [n]) for n in (9, 2, 8, 3, 4)])
    packs = pack_samples(samples, 15, balance=100.0)
    assert [len(pack) for pack in packs] == [10, 14, 7]
    assert [len(pack) for pack in pack_samples(samples, 15)] == [15, 13, 3]
