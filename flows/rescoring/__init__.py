"""Rescoring stored rollouts: from the words of a person to files and a table.

``reading`` finds rollouts in a workspace, ``settings`` makes settings of options, ``planning`` says
what would be asked, ``asking`` asks it of ``judges``, ``work`` makes scores and numbers of that,
``writing`` leaves the files and ``text`` is what is shown.
"""

from flows.rescoring.planning import Planned, Wanted, plan_rescore
from flows.rescoring.results import Done, carry_out

__all__ = ["Done", "Planned", "Wanted", "carry_out", "plan_rescore"]
