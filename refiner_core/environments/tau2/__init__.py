"""tau2-bench as an environment: its domains, tools, user simulator and evaluation.

The package is a separate project and on no package index (``tau2`` there is a chemistry library),
so it is imported only if installed, and only when an episode, a task or a policy is needed.

=================== ===============================================================================
:mod:`.package`     its location, requirements, and the identity of its code and data
:mod:`.environment` tasks, splits, policies and tools behind our interface
:mod:`.episode`     one conversation, stepped by our agent; exceptions caused by the user
:mod:`.tasks`       attributes of a task; its ``reward_info`` to components and checks;
                    assertions in plain language
=================== ===============================================================================

Mapping:

- A turn is one tool call. ``respond`` is plain text of tau2's agents, ``done`` their end.
- In dual-control domains the user has tools too. The agent does not see them; it asks the user for
  an action, and the user simulator calls them.
- ``environment.max_turns`` is also passed on as ``max_steps``, which counts every message as a step
  (a tool call and its result are two), so an episode of 100 steps has about 50 turns.
- tau2's evaluation asks a fixed model about assertions in plain language. Here they are removed
  from the reward's basis, and excluded or judged by the recipe's judge.
"""

from refiner_core.environments.tau2.package import missing_tau2, tau2_digest
from refiner_core.environments.tau2.tau2_environment import Tau2Environment

__all__ = ["Tau2Environment", "missing_tau2", "tau2_digest"]
