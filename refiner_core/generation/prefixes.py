"""What several contexts have in common is computed once. Pure, torch-free.

In: contexts that have no keys of their own yet, and how many of their first tokens can be copied
from what is cached. Out: spans to compute, level by level, and who copies each of them.

Conversations of one domain begin with the same policy and tools, tries at one task with the same
first messages too: a tree. Sorted, contexts with a common prefix stand beside each other, and what
all of a group share is what its first and last share (a radix tree; for caches of language models:
Zheng et al. 2024, "SGLang", arXiv:2312.07104).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

#: A prefix that is shorter is computed again: a pass through the model costs more.
LEAST_SHARED = 16


class Span(NamedTuple):
    """Context ``context`` computes its tokens [start, stop); ``copies`` copy them from it."""

    context: int
    start: int
    stop: int
    copies: tuple[int, ...] = ()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens of two sequences of one type are equal."""
    high = min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    low = 0  # of halves that may differ, compare ever smaller ones: slices compare fast
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def plan_spans(contexts: Sequence[list[int]], known: Sequence[int]) -> list[list[Span]]:
    """Spans that come to all tokens of all contexts behind the ``known[i]`` first ones of each.

    A level needs the one before. Each context computes its last token itself, since logits follow
    it; that is the last level, which has one span per context, in order.

    A context with a part in a span, as who computes or who copies, knows nothing behind it yet:
    what stands there may be written over, by padding and by copies wider than the span.
    """
    levels: list[list[Span]] = []
    starts = list(known)
    order = sorted(range(len(contexts)), key=lambda index: contexts[index])

    def share(group: Sequence[int], level: int) -> None:
        if len(group) < 2:
            return
        lowest, highest = contexts[group[0]], contexts[group[-1]]
        length = min(common_prefix(lowest, highest), len(lowest) - 1, len(highest) - 1)
        behind = [index for index in group if starts[index] < length]
        start = min((starts[index] for index in behind), default=length)
        if length - start >= LEAST_SHARED:
            while len(levels) <= level:
                levels.append([])
            first = min(behind, key=lambda index: starts[index])
            copies = tuple(index for index in behind if index != first)
            levels[level].append(Span(first, start, length, copies))
            level += 1
            for index in behind:
                starts[index] = length
        longer = [index for index in group if len(contexts[index]) > length + 1]
        for _, members in groupby(longer, key=lambda index: contexts[index][length]):
            share(list(members), level)  # fewer than the group: its ends differ here, or one ends

    share(order, 0)
    return [*levels, [Span(i, starts[i], len(ids)) for i, ids in enumerate(contexts)]]
