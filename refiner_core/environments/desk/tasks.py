"""The desk's own tasks, generated from a pinned seed.

In: nothing; or a domain, a number and a seed for further ones. Out: :class:`Task` values.

Families take turns within a domain; no name, id, room or item stands in two tasks. Task ``i`` of a
split depends on those before it for that reason alone.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from typing import Any

from refiner_core.environments.desk.bookings import BOOKINGS
from refiner_core.environments.desk.devices import DEVICES
from refiner_core.environments.desk.domain import Domain, Draft, Draw
from refiner_core.environments.desk.orders import ORDERS
from refiner_core.environments.protocol import Task
from refiner_core.words import World

DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (BOOKINGS, ORDERS, DEVICES)}


#: Pinned to the content of tasks, texts and rules by a test; see the README.
VERSION = "1"
#: Tasks of each domain by split.
COUNTS: Mapping[str, int] = {"train": 120, "test": 30}


@functools.lru_cache(maxsize=1)
def own_tasks() -> tuple[Task, ...]:
    """All tasks of the desk's own, domain by domain, ``train`` before ``test``."""
    used: set[str] = set()
    return tuple(
        _drawn(domain, split, index, f"desk-{VERSION}", Draw(random.Random(), used))
        for domain in DOMAINS
        for split, count in COUNTS.items()
        for index in range(count)
    )


def draw_tasks(
    domain: str, count: int, seed: int, *, split: str = "extra", world: World = "task"
) -> tuple[Task, ...]:
    """Further tasks, as many as one likes.

    With ``world="pretrain"`` they are of names, ids and values that no task of the desk's own has;
    with ``"task"`` single ones may be the same. Within a task nothing stands twice.
    """
    return tuple(
        _drawn(domain, split, index, f"extra-{seed}", Draw(random.Random(), set(), world))
        for index in range(count)
    )


def _drawn(domain: str, split: str, index: int, root: str, draw: Draw) -> Task:
    families = list(DOMAINS[domain].families.items())
    name, family = families[index % len(families)]
    draw.rng.seed(f"{root}/{domain}/{split}/{index}")
    draft = family(draw)
    stem = f"{domain}-{split}" if split in COUNTS else f"{domain}-{split}-{root}"
    return Task(f"{stem}-{index:03d}", domain, split, draft.summary, _data(name, draft))


def _data(family: str, draft: Draft) -> dict[str, Any]:
    values = {"family": family, **vars(draft)}
    del values["summary"]
    data: dict[str, Any] = json.loads(json.dumps(values, ensure_ascii=False))
    return data
