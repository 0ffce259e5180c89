"""The desk's domains by name.

In: the modules of the domains. Out: :data:`DOMAINS`.
"""

from __future__ import annotations

from refiner_core.environments.desk.bookings import BOOKINGS
from refiner_core.environments.desk.devices import DEVICES
from refiner_core.environments.desk.domain import Domain
from refiner_core.environments.desk.orders import ORDERS

DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (BOOKINGS, ORDERS, DEVICES)}
