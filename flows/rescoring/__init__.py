"""Rescoring stored rollouts: from the words of a person to files and a table.

``reading`` finds rollouts in a workspace, ``settings`` makes settings of options, ``asking`` plans
what is asked of judges and asks it, ``work`` puts them together, ``writing`` leaves the files and
``text`` is what is shown.
"""

from flows.rescoring.work import Wanted, carry_out, plan_rescore

__all__ = ["Wanted", "carry_out", "plan_rescore"]
