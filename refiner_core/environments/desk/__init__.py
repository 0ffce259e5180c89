"""The shipped environment: an invented service desk with real state and rules.

===================== ==========================================================================
:mod:`.environment`   the interface: domains, tasks, policy, tools, digest; demonstrations,
                      right and flawed
:mod:`.episode`       one episode: calls, checks, rewards, classes of failure
:mod:`.user`          the scripted user and its device, with the lamp and its fixes
:mod:`.tasks`         the domains bookings, orders and devices, and tasks from a pinned seed
:mod:`.domain`        parts of a domain; the tables of its tools
:mod:`.words`         all phrases, and the list of their words
===================== ==========================================================================
"""

from refiner_core.environments.desk.environment import DeskEnvironment, desk_digest
from refiner_core.environments.desk.tasks import VERSION

__all__ = ["VERSION", "DeskEnvironment", "desk_digest"]
