"""Whether a model has given a single well-formed answer, by the reports of stages.

In: the report of a training by reinforcement, or of an evaluation. Out: a sentence where it has
not: such a stage is done, and hardly what anybody meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def all_malformed(report: Mapping[str, Any]) -> str:
    """What there is to say of a report in which not one answer was well formed; else empty. A base
    that nobody has trained yet is nobody's fault."""
    rollouts, counts = report.get("episodes"), report.get("counts") or {}
    if rollouts and counts.get("samples/malformed") == rollouts:
        return f"all of its {rollouts} rollouts were malformed: there was nothing to learn from"
    valid = [e for e in report.get("evaluations") or () if e.get("metric") == "format_valid"]
    if not valid or any(e.get("stage") == "base" or e.get("numerator") != 0 for e in valid):
        return ""
    counted = ", ".join(f"0 of {e.get('denominator')} {e.get('decoding')}" for e in valid)
    return f"not one answer was well formed (format_valid: {counted})"
