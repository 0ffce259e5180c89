"""Who trains on what: a step's samples or packs, shared out over the ranks that train together.

In: samples (or packs) of one optimiser step and the number of ranks. Out: one list per rank, every
sample in exactly one of them. Computed alike by every rank, from values alone: the same step gives
the same shares.

The rule for samples. A group (samples of one prompt) goes whole to one rank where prompts are
shared, because every rank that holds a part of it computes its prompt again. Groups are dealt out
dearest first, each to the rank with least work so far, which leaves the ranks within one group of
each other. While the busiest rank would then have more than :data:`UNEVEN` times the average, the
dearest group that it holds is cut in two, and all are dealt out again, as long as that takes work
off the busiest rank: a cut costs another copy of a prompt, and waiting ranks cost more.

A rank that gets nothing, or fewer packs than the others, gets neutral packs: under ZeRO-3 every
forward pass is one that all ranks make together. What is "work" is :func:`row_cost`: tokens, plus
attention where it is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from refiner_core.training.batches.packing import (
    Pack,
    Sample,
    build_pack,
    cheapest_units,
    pack_samples,
    row_cost,
    unit_length,
)

#: How much more than the average the busiest rank may have before a group is cut.
UNEVEN = 1.05


@dataclass(frozen=True)
class _Piece:
    """Some samples of one prompt, by their places in the step, and what training on them costs."""

    places: tuple[int, ...]
    cost: float


def share_among(
    samples: Sequence[Sample],
    world: int,
    *,
    pack_length: int,
    share_prompts: bool,
    balance: float | None = None,
) -> list[list[Sample]]:
    """The samples of each of ``world`` ranks, in the order given; a rank's list may be empty.

    The arguments are those of :func:`pack_samples`.
    """

    def piece(places: Sequence[int]) -> _Piece:
        members = [samples[i] for i in places]
        units = [[sample] for sample in members]
        if share_prompts:
            units = cheapest_units(members, pack_length, balance)
        return _Piece(tuple(places), sum(row_cost(unit_length(u), balance) for u in units))

    pieces: list[_Piece] = []
    for _, group in groupby(range(len(samples)), key=lambda i: samples[i].prompt_ids):
        places = list(group)
        together = share_prompts and samples[places[0]].prompt_ids
        pieces += [piece(places)] if together else [piece([i]) for i in places]
    dealt = _deal(pieces, world)
    while _uneven(dealt):
        busiest = max(dealt, key=_work)
        large = max(busiest, key=lambda p: (len(p.places) > 1, p.cost, -p.places[0]))
        if len(large.places) == 1:
            break
        middle = len(large.places) // 2
        halves = [piece(large.places[:middle]), piece(large.places[middle:])]
        cut = [p for p in pieces if p is not large] + halves
        again = _deal(cut, world)
        if max(map(_work, again)) >= max(map(_work, dealt)):
            break
        pieces, dealt = cut, again
    return [[samples[i] for i in sorted(i for p in mine for i in p.places)] for mine in dealt]


def packs_of_ranks(
    samples: Sequence[Sample],
    world: int,
    *,
    pack_length: int,
    share_prompts: bool,
    balance: float | None,
    multiple_of: int,
) -> list[list[Pack]]:
    """Packs for every rank, equally many: what is missing is made up with neutral packs.

    ``multiple_of``: packs in a forward pass; with more than one rank, their number is a multiple.
    """
    shares = share_among(
        *(samples, world),
        pack_length=pack_length,
        share_prompts=share_prompts,
        balance=balance,
    )
    packs = [
        pack_samples(share, pack_length, share_prompts=share_prompts, balance=balance)
        for share in shares
    ]
    return even_out(packs, multiple_of=multiple_of)


def share_packs(
    packs: Sequence[Pack], world: int, *, balance: float | None = None, multiple_of: int = 1
) -> list[list[Pack]]:
    """Finished packs over ranks, equally many each and nearly equal work; neutral ones at the end.

    The dearest pack goes first, to the rank with least work among those with room; on each rank
    packs stand in the order given.
    """
    most = -(-len(packs) // world)
    costs = [_pack_cost(pack, balance) for pack in packs]
    shares: list[list[int]] = [[] for _ in range(world)]
    work = [0.0] * world
    for i in sorted(range(len(packs)), key=lambda i: (-costs[i], i)):
        rank = min((r for r in range(world) if len(shares[r]) < most), key=lambda r: (work[r], r))
        shares[rank].append(i)
        work[rank] += costs[i]
    return even_out(
        [[packs[i] for i in sorted(share)] for share in shares], multiple_of=multiple_of
    )


def even_out(shares: Sequence[Sequence[Pack]], *, multiple_of: int) -> list[list[Pack]]:
    """The same packs, and neutral ones until every rank has as many as the others.

    A single rank waits for nobody: it gets a neutral pack only where it has nothing at all.
    """
    most = max([1, *map(len, shares)])
    if len(shares) > 1:
        most = -(-most // multiple_of) * multiple_of
    return [[*share, *(neutral_pack() for _ in range(most - len(share)))] for share in shares]


def neutral_pack() -> Pack:
    """A pack without targets: it goes through the model, and its loss and gradients are zero."""
    return build_pack([[Sample((), (0, 0), (False, False))]])


def _deal(pieces: Sequence[_Piece], world: int) -> list[list[_Piece]]:
    """Dearest first, each to the rank with least work (ties: earlier piece, lower rank)."""
    dealt: list[list[_Piece]] = [[] for _ in range(world)]
    work = [0.0] * world
    for piece in sorted(pieces, key=lambda p: (-p.cost, p.places)):
        rank = min(range(world), key=lambda r: (work[r], r))
        dealt[rank].append(piece)
        work[rank] += piece.cost
    return dealt


def _work(share: Sequence[_Piece]) -> float:
    return sum(piece.cost for piece in share)


def _uneven(dealt: Sequence[Sequence[_Piece]]) -> bool:
    work = [_work(share) for share in dealt]
    return max(work) > UNEVEN * sum(work) / len(work)


def _pack_cost(pack: Pack, balance: float | None) -> float:
    """Each unit as a row of its own, which is about what :func:`collate` makes of it."""
    return sum(row_cost(len(list(unit)), balance) for _, unit in groupby(pack.unit_L))
