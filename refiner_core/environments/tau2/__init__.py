"""tau2-bench as an environment: its domains, tools, user simulator and evaluation.

The package is not ours and on no package index (``tau2`` there is a library for chemistry), so it
is imported where somebody has installed it, and only when an episode, a task or a policy is needed.

=================== ===============================================================================
:mod:`.package`     where it is, what it must have, what identifies its code and data
:mod:`.environment` tasks, splits, policies and tools in our terms
:mod:`.episode`     one conversation, stepped by our agent; what of an exception was the user's
:mod:`.tasks`       what is read off a task; its ``reward_info`` to components and checks;
                    assertions in plain language
=================== ===============================================================================

How it maps:

- A turn is one tool call. ``respond`` is what its agents say as plain text, ``done`` how they end.
- In dual-control domains the user has tools of their own. The agent is not told of them; it has to
  ask for what should be done, and the user simulator calls them.
- ``environment.max_turns`` is given to it as ``max_steps``, too. It counts every message as a step
  (a tool call and its result are two), so an episode of 100 steps has about 50 turns.
- Its evaluation asks a model of its own choice about assertions in plain language. Here they are
  taken out of the basis of the reward, and excluded or asked of the recipe's judge.
"""

from refiner_core.environments.tau2.environment import Tau2Environment
from refiner_core.environments.tau2.package import missing_tau2, tau2_digest

__all__ = ["Tau2Environment", "missing_tau2", "tau2_digest"]
