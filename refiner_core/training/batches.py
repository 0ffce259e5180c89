"""Rows to tensors: packing, the order of rows, and the split over ranks.

In order of reading: packing (sequences into rows of tokens, isolated from each other), order
(a function of seed and step), shares (the split of a step over ranks).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fingerprint import derive_seed

#: Candidate row lengths, as multiples of the longest unit.
_ROW_FACTORS = (1, 1.25, 1.5, 2, 3, 4, 8)
#: The balance of a model with recurrent layers: every sample needs a row of its own.
OWN_ROW = 0.0
#: Side of the blocks that FlexAttention computes or skips as a whole.
FLEX_BLOCK = 128
#: Assumed cost of a pair of positions in FlexAttention; 1 is a pair in FlashAttention.
FLEX_PAIR = 1.3
#: Queries whose dense masks exist at once while a block mask is made.
_MASK_ROWS = 2048


@dataclass(frozen=True)
class Sample:
    """One sequence to train on.

    ``start`` is the offset of the response's first token in the caller's flat per-token buffers
    (advantages, weights, old log-probabilities). ``loss_mask`` has one value per response token;
    tool output inside a response is False. Without a prompt the first token cannot be predicted
    and never carries loss.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    start: int = 0

    @property
    def length(self) -> int:
        """Tokens of the sample, prompt included."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Pack:
    """One row of L tokens with T targets. All lists are plain integers, ready for tensors.

    ``units`` are its samples; those of a unit share their prompt.
    ``unit_L`` numbers the units; ``branch_L`` is 0 on a prompt and 1, 2, ... on its responses.
    Target t is token ``target_T[t]``, predicted at position ``source_T[t]``; ``flat_T`` is its
    offset in the caller's flat buffers.
    """

    input_ids_L: list[int]
    position_ids_L: list[int]
    unit_L: list[int]
    branch_L: list[int]
    source_T: list[int]
    target_T: list[int]
    flat_T: list[int]
    units: list[Sequence[Sample]]

    def __len__(self) -> int:
        return len(self.input_ids_L)

    @property
    def shared(self) -> bool:
        """True if a prompt is followed by more than one response."""
        return any(branch > 1 for branch in self.branch_L)


@dataclass(frozen=True)
class Batch:
    """``packs`` packs of ``tokens`` tokens, laid out as B rows of L positions; T targets.

    ``segments_2BL`` has units and branches, for :func:`block_mask` or :func:`flex_mask`; None if no
    prompt is shared: positions separate the blocks. ``source_T`` indexes the flattened positions.
    """

    input_ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor
    segments_2BL: torch.Tensor | None
    source_T: torch.Tensor
    target_T: torch.Tensor
    flat_T: torch.Tensor
    packs: int
    tokens: int


def first_fit(
    lengths: Sequence[int], capacity: int, *, decreasing: bool = False, max_open: int | None = None
) -> list[list[int]]:
    """Indices of ``lengths`` in bins of at most ``capacity``; every index appears exactly once.

    ``decreasing`` places the longest first (ties by index), which wastes least. Otherwise the given
    order is kept as far as possible, as a shuffled epoch needs; ``max_open`` then bounds the number
    of open bins (the oldest is closed), and the time: O(n * max_open).

    Raises
    ------
    ConfigurationError
        An item is longer than ``capacity``.
    """
    order = range(len(lengths))
    chosen = sorted(order, key=lambda i: (-lengths[i], i)) if decreasing else order
    bins: list[list[int]] = []
    open_bins: list[list[int]] = []  # [index of the bin, space left]
    for i in chosen:
        if lengths[i] > capacity:
            raise ConfigurationError(
                f"A sequence of {lengths[i]} tokens does not fit in a pack of {capacity}",
                expected="packs as long as the longest sequence",
                fix="raise pack_length, or lower data.max_prompt_token_length",
            )
        slot = next((s for s in open_bins if s[1] >= lengths[i]), None)
        if slot is None:
            slot = [len(bins), capacity]
            bins.append([])
            open_bins.append(slot)
            if max_open is not None and len(open_bins) > max_open:
                open_bins.pop(0)
        bins[slot[0]].append(i)
        slot[1] -= lengths[i]
    return bins


def pack_samples(
    samples: Sequence[Sample],
    pack_length: int,
    *,
    share_prompts: bool = False,
    balance: float | None = None,
) -> list[Pack]:
    """Packs of at most ``pack_length`` tokens with every sample once, in a deterministic order.

    With ``share_prompts``, consecutive samples of one prompt share it. ``balance`` (see
    :func:`row_width`) is None for FlashAttention: packs are filled as far as possible. Dense
    attention also computes masked positions, and :func:`collate` splits a pack into rows. So
    a long row of responses is cut where a second copy of the prompt is cheaper, and a pack holds
    units of similar length, which need little padding. With :data:`OWN_ROW` the padding counts too.
    """
    units = list(_units(samples, pack_length, share_prompts, balance))
    lengths = [unit_length(unit) for unit in units]
    if balance == OWN_ROW:
        bins = _padded_bins(lengths, pack_length)
    else:
        most = None if balance is None else 1
        bins = first_fit(lengths, pack_length, decreasing=True, max_open=most)
    return [build_pack([units[i] for i in indices]) for indices in bins]


def _padded_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` in bins, the longest first: rows padded to the longest fit."""
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= capacity:
            bins[-1].append(i)
        else:
            bins.append([i])
    return bins


def build_pack(units: Sequence[Sequence[Sample]]) -> Pack:
    """One pack of the given units; the samples of a unit share their prompt."""
    pack = Pack([], [], [], [], [], [], [], [*units])
    for number, unit in enumerate(units):
        prompt = unit[0].prompt_ids
        _append(pack, prompt, range(len(prompt)), number, 0)
        last_of_prompt = len(pack) - 1 if prompt else None
        for branch, sample in enumerate(unit, start=1):
            _append_response(pack, sample, number, branch, last_of_prompt)
    return pack


def collate(
    packs: Sequence[Pack], *, pad_id: int = 0, balance: float | None = None, flex: bool = False
) -> Batch:
    """Tensors of several packs, in one row or several.

    The layout affects cost only. ``balance`` None puts everything in one row: FlashAttention skips
    masked blocks and separates blocks within one row only. With dense attention, whose cost grows
    with the square of a row, units go to several rows, padded on the right; ``balance`` is the row
    length at which attention costs as much as everything else (see :func:`row_width`). With
    ``flex``, rows with shared prompts consist of whole blocks.
    """
    units = [unit for pack in packs for unit in pack.units]
    rows = [build_pack(row) for row in ([units] if balance is None else _rows(units, balance))]
    shared = any(row.shared for row in rows)
    width = max(len(row) for row in rows)
    if flex and shared:
        width = -(-width // FLEX_BLOCK) * FLEX_BLOCK
    padded = [_padded(row, width, pad_id) for row in rows]
    source = [i * width + s for i, row in enumerate(rows) for s in row.source_T]
    segments = None
    if shared:
        rows_of = [[row.unit_L for row in padded], [row.branch_L for row in padded]]
        segments = torch.tensor(rows_of)
    return Batch(
        input_ids_BL=torch.tensor([row.input_ids_L for row in padded]),
        position_ids_BL=torch.tensor([row.position_ids_L for row in padded]),
        segments_2BL=segments,
        source_T=torch.tensor(source, dtype=torch.long),
        target_T=torch.tensor([t for row in rows for t in row.target_T], dtype=torch.long),
        flat_T=torch.tensor([f for row in rows for f in row.flat_T], dtype=torch.long),
        packs=len(packs),
        tokens=sum(map(len, packs)),
    )


def row_width(lengths: Sequence[int], balance: float) -> int:
    """The cheapest row length for these units: short rows attend to less, long rows pad less.

    The cost of R rows of W tokens is taken as R * W * (1 + W / balance).
    """
    longest, total = max(lengths), sum(lengths)
    widths = sorted({min(total, int(longest * factor)) for factor in _ROW_FACTORS})
    return min(
        widths, key=lambda w: len(first_fit(lengths, w, decreasing=True)) * row_cost(w, balance)
    )


def row_cost(width: int, balance: float | None) -> float:
    """Cost of a row of ``width`` tokens, in tokens of a row without attention."""
    return width * (1 + width / balance) if balance else width


def work_of(units: Iterable[tuple[int, Sequence[int]]]) -> tuple[int, float]:
    """Work of units, each given by the length of its prompt and the lengths of its responses:
    tokens through the matrices, and pairs of a query and a key that it sees."""
    tokens, pairs = 0, 0.0
    for prompt, responses in units:
        tokens += prompt + sum(responses)
        pairs += prompt * prompt / 2 + sum(r * (prompt + r / 2) for r in responses)
    return tokens, pairs


def sharing_pays(samples: Sequence[Sample], pack_length: int, balance: float) -> bool:
    """Whether shared prompts under FlexAttention cost less than plain packs under FlashAttention.

    A function of the lengths alone, so that every rank and a resumed run choose the same. A token
    costs 1, a pair in FlashAttention 1 / ``balance``, and a pair in FlexAttention
    :data:`FLEX_PAIR` times as much; each token also has :data:`FLEX_BLOCK` masked pairs in
    blocks that are computed in part.
    """
    tokens, pairs = work_of(
        (len(unit[0].prompt_ids), [len(sample.response_ids) for sample in unit])
        for unit in _units(samples, pack_length, share_prompts=True, balance=None)
    )
    alone, plain_pairs = work_of((len(s.prompt_ids), [len(s.response_ids)]) for s in samples)
    flex_pairs = FLEX_PAIR * (pairs + FLEX_BLOCK * tokens)
    return tokens + flex_pairs / balance < alone + plain_pairs / balance


def block_mask(segments_2BL: torch.Tensor) -> torch.Tensor:
    """Boolean (B, 1, L, L): a query sees what precedes it in its unit's prompt and own branch."""
    return _visible(segments_2BL, slice(None))[:, None]


def _visible(segments_2BL: torch.Tensor, rows: slice) -> torch.Tensor:
    """The same for some queries, boolean (B, Q, L)."""
    unit_BL, branch_BL = segments_2BL
    same_unit = unit_BL[:, rows, None] == unit_BL[:, None, :]
    own = branch_BL[:, rows, None] == branch_BL[:, None, :]
    places = torch.arange(unit_BL.shape[1], device=unit_BL.device)
    causal = places[rows, None] >= places[None, :]
    return same_unit & ((branch_BL[:, None, :] == 0) | own) & causal


def flex_mask(segments_2BL: torch.Tensor) -> BlockMask:
    """The mask of :func:`block_mask` for FlexAttention: which blocks of queries and keys are
    skipped, computed in part, or computed whole. The length is a multiple of
    :data:`FLEX_BLOCK`."""
    unit_BL, branch_BL = segments_2BL
    length = unit_BL.shape[1]
    some, every = [], []
    for first in range(0, length, _MASK_ROWS):
        seen = _visible(segments_2BL, slice(first, first + _MASK_ROWS))
        blocks = seen.unflatten(2, (-1, FLEX_BLOCK)).unflatten(1, (-1, FLEX_BLOCK))
        some.append(blocks.any(-1).any(2))
        every.append(blocks.all(-1).all(2))
    some_BQK, every_BQK = torch.cat(some, 1), torch.cat(every, 1)

    def visible(b: Any, _head: Any, query: Any, key: Any) -> Any:
        same_unit = unit_BL[b, query] == unit_BL[b, key]
        own = (branch_BL[b, key] == 0) | (branch_BL[b, query] == branch_BL[b, key])
        return same_unit & own & (query >= key)

    return BlockMask.from_kv_blocks(
        *_listed(some_BQK & ~every_BQK),
        *_listed(every_BQK),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _listed(chosen_BQK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of chosen blocks of keys (B, 1, Q), and the blocks, chosen ones first (B, 1, Q, K)."""
    order = chosen_BQK.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_BQK.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def to_device(batch: Batch, device: Any) -> Batch:
    """The same batch on another device."""
    tensors = {k: v for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return replace(batch, **{name: tensor.to(device) for name, tensor in tensors.items()})


def _units(
    samples: Sequence[Sample], pack_length: int, share_prompts: bool, balance: float | None
) -> Iterator[list[Sample]]:
    if not share_prompts:
        yield from ([sample] for sample in samples)
        return
    for prompt, members in groupby(samples, key=lambda sample: sample.prompt_ids):
        group = list(members)
        if not prompt:
            # Nothing to share, and a first token that cannot be predicted.
            yield from ([sample] for sample in group)
            continue
        yield from cheapest_units(group, pack_length, balance)


def cheapest_units(
    group: Sequence[Sample], pack_length: int, balance: float | None
) -> list[list[Sample]]:
    """Samples of one prompt in as few units as fit, or in more where that is cheaper.

    Tries 1, 2, ... nearly equal units, each filled in the given order.
    """
    prompt = len(group[0].prompt_ids)
    lengths = [len(sample.response_ids) for sample in group]
    tried = []
    for parts in range(1, len(group) + 1):
        length = min(pack_length - prompt, max(*lengths, -(-sum(lengths) // parts)))
        tried.append(_filled(group, length))
        if balance is None:
            break
    return min(tried, key=lambda units: sum(row_cost(unit_length(u), balance) for u in units))


def _filled(group: Sequence[Sample], length: int) -> list[list[Sample]]:
    """The samples in order, at most ``length`` response tokens in a unit (or a single sample)."""
    units: list[list[Sample]] = []
    left = -1
    for sample in group:
        if len(sample.response_ids) > left:
            units.append([])
            left = length
        units[-1].append(sample)
        left -= len(sample.response_ids)
    return units


def unit_length(unit: Sequence[Sample]) -> int:
    """Tokens of a prompt and its responses."""
    return len(unit[0].prompt_ids) + sum(len(sample.response_ids) for sample in unit)


def _append(pack: Pack, ids: Sequence[int], positions: range, unit: int, branch: int) -> None:
    pack.input_ids_L.extend(ids)
    pack.position_ids_L.extend(positions)
    pack.unit_L.extend([unit] * len(ids))
    pack.branch_L.extend([branch] * len(ids))


def _append_response(
    pack: Pack, sample: Sample, unit: int, branch: int, last_of_prompt: int | None
) -> None:
    first = len(pack)
    begin = len(sample.prompt_ids)
    _append(pack, sample.response_ids, range(begin, sample.length), unit, branch)
    for offset, (token, counts) in enumerate(
        zip(sample.response_ids, sample.loss_mask, strict=True)
    ):
        source = first + offset - 1 if offset else last_of_prompt
        if not counts or source is None:
            continue
        pack.source_T.append(source)
        pack.target_T.append(token)
        pack.flat_T.append(sample.start + offset)


def _rows(units: Sequence[Sequence[Sample]], balance: float) -> list[list[Sequence[Sample]]]:
    """The units, distributed over rows of the best common length."""
    if balance == OWN_ROW:
        return [[unit] for unit in units]
    lengths = [unit_length(unit) for unit in units]
    bins = first_fit(lengths, row_width(lengths, balance), decreasing=True)
    return [[units[i] for i in indices] for indices in bins]


def _padded(row: Pack, width: int, pad_id: int) -> Pack:
    missing = width - len(row)
    if not missing:
        return row
    position = row.position_ids_L[-1] + 1
    return replace(
        row,
        input_ids_L=row.input_ids_L + [pad_id] * missing,
        position_ids_L=row.position_ids_L + list(range(position, position + missing)),
        unit_L=row.unit_L + [-1] * missing,
        branch_L=row.branch_L + [0] * missing,
    )


#: Packs kept open while an epoch is packed in shuffled order.
OPEN_PACKS = 64


def permutation(n: int, *seed_parts: int | str) -> list[int]:
    """A shuffle of range(n), determined by the seed parts."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(*seed_parts)))
    order: list[int] = rng.permutation(n).tolist()
    return order


def seed_random(seed: int) -> None:
    """Seed the process-wide generators, for code that draws from them implicitly: dropout, a
    library. Python's and NumPy's otherwise start differently in every process, so two runs
    would differ."""
    import torch

    random.seed(derive_seed(seed, "python"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, "torch"))


def prompt_batch(
    seed: int, n_prompts: int, per_step: int, step: int
) -> tuple[int, int, tuple[int, ...]]:
    """The prompts of ``step`` (from 0), the next ``per_step`` of the epoch's shuffle: the epoch,
    their position in it, and indices into the prepared rows.

    The tail of an epoch that is shorter than a step is dropped; each epoch drops different
    prompts. No prompt appears twice in a step.

    Raises
    ------
    DataError
        There are fewer prompts than one step needs.
    """
    if n_prompts < per_step:
        raise DataError(
            f"There are {n_prompts} training prompts, and one step takes {per_step}",
            expected="at least as many prompts as grpo.num_unique_prompts_rollout",
            fix="add prompts, or lower grpo.num_unique_prompts_rollout",
        )
    epoch, within = divmod(step, n_prompts // per_step)
    order = permutation(n_prompts, seed, "prompts", epoch)
    cursor = within * per_step
    return epoch, cursor, tuple(order[cursor : cursor + per_step])


#: One optimiser step: its epoch, and the row indices of each pack.
SftStep = tuple[int, list[tuple[int, ...]]]


def sft_steps(
    seed: int,
    lengths: Sequence[int],
    *,
    pack_length: int,
    packs_per_step: int,
    epochs: float,
    max_steps: int | None = None,
) -> list[SftStep]:
    """Every step of an SFT run: each epoch is reshuffled, packed in that order, and cut into steps.

    The last step of an epoch may have fewer packs; a fractional epoch is its first packs.
    """
    steps: list[SftStep] = []
    for epoch in range(math.ceil(epochs)):
        if max_steps is not None and len(steps) >= max_steps:
            break
        order = permutation(len(lengths), seed, "sft", epoch)
        bins = first_fit([lengths[i] for i in order], pack_length, max_open=OPEN_PACKS)
        packs = [tuple(order[i] for i in indices) for indices in bins]
        packs = packs[: math.ceil(len(packs) * (epochs - epoch))]
        steps += [
            (epoch, packs[i : i + packs_per_step]) for i in range(0, len(packs), packs_per_step)
        ]
    return steps[:max_steps]


def order_hash(sample_ids: Sequence[str]) -> str:
    """A short hash of a list of rows in their order."""
    digest = hashlib.sha256()
    for sample_id in sample_ids:
        digest.update(sample_id.encode() + b"\x1f")
    return digest.hexdigest()[:16]


#: Minimum pieces of work per rank: with fewer groups, groups are split.
PIECES = 4


def share_among(
    samples: Sequence[Sample],
    world: int,
    *,
    pack_length: int,
    share_prompts: bool,
    balance: float | None = None,
) -> list[list[Sample]]:
    """The samples of each of ``world`` ranks, in the order given; a rank's list may be empty.

    The arguments are those of :func:`pack_samples`. Samples of one prompt stay together if there
    are enough prompts.
    """

    def cost(piece: Sequence[int]) -> float:
        units = cheapest_units([samples[i] for i in piece], pack_length, balance)
        return sum(row_cost(unit_length(unit), balance) for unit in units)

    places = range(len(samples))
    groups = [list(group) for _, group in groupby(places, key=lambda i: samples[i].prompt_ids)]
    parts = -(-PIECES * world // max(1, len(groups))) if world > 1 else 1
    pieces: list[list[int]] = []
    for group in groups:
        together = share_prompts and samples[group[0]].prompt_ids
        size = -(-len(group) // parts) if together else 1
        pieces += [group[i : i + size] for i in range(0, len(group), size)]
    return [
        [samples[i] for i in sorted(i for n in mine for i in pieces[n])]
        for mine in deal([cost(piece) for piece in pieces], world)
    ]


def packs_of_ranks(
    samples: Sequence[Sample],
    world: int,
    *,
    pack_length: int,
    share_prompts: bool,
    balance: float | None,
    multiple_of: int,
) -> list[list[Pack]]:
    """Packs for every rank, equally many; missing ones are filled up with neutral packs.

    ``multiple_of``: packs per forward pass; with several ranks, their number is a multiple of it.
    """
    shares = share_among(
        *(samples, world), pack_length=pack_length, share_prompts=share_prompts, balance=balance
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

    The most expensive pack goes first, to the least loaded rank that is not full; each rank keeps
    the given order.
    """
    costs = [sum(row_cost(unit_length(unit), balance) for unit in pack.units) for pack in packs]
    shares = deal(costs, world, most=-(-len(packs) // world))
    return even_out(
        [[packs[i] for i in sorted(share)] for share in shares], multiple_of=multiple_of
    )


def even_out(shares: Sequence[Sequence[Pack]], *, multiple_of: int) -> list[list[Pack]]:
    """The packs, plus neutral ones until every rank has the same number.

    A single rank gets a neutral pack only if it has none.
    """
    most = max([1, *map(len, shares)])
    if len(shares) > 1:
        most = -(-most // multiple_of) * multiple_of
    return [[*share, *(neutral_pack() for _ in range(most - len(share)))] for share in shares]


def neutral_pack() -> Pack:
    """A pack without targets: it passes through the model; its loss and gradients are zero."""
    return build_pack([[Sample((), (0, 0), (False, False))]])


def deal(costs: Sequence[float], world: int, most: int | None = None) -> list[list[int]]:
    """Indices of costs for each rank, the largest first, each to the least loaded rank
    (that has fewer than ``most``)."""
    dealt: list[list[int]] = [[] for _ in range(world)]
    work = [0.0] * world
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        open_ranks = (r for r in range(world) if most is None or len(dealt[r]) < most)
        rank = min(open_ranks, key=lambda r: (work[r], r))
        dealt[rank].append(i)
        work[rank] += costs[i]
    return dealt
