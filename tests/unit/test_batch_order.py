"""Which row when: orders that are the same in every process, version and after every resume."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from refiner_core.contract.errors import DataError
from refiner_core.training.batches import (
    order_hash,
    permutation,
    prompt_batch,
    seed_random,
    sft_steps,
)


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
