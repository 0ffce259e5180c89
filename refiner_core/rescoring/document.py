"""Everything that a rescoring found, as one JSON document.

In: policies, settings, comparisons, a matrix, bills. Out: plain values for ``rescore.json``. Every
share has its numerator and denominator, every number its interval and how that was made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.judge_report.agreement import Agreement
from refiner_core.rescoring.agreement import CriterionAgreement
from refiner_core.rescoring.compare import Comparison
from refiner_core.rescoring.matrix import Matrix, Reversal

#: Version of ``rescore.json``. Raised when an older reader would misread it.
DOCUMENT_VERSION = 1


def plain(value: Any) -> Any:
    """Dataclasses, named tuples, mappings and sequences as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return value


def comparison_json(
    policy: str,
    setting: str,
    baseline: str,
    comparison: Comparison,
    agreements: Sequence[CriterionAgreement],
) -> dict[str, Any]:
    """One setting against its baseline, on one policy."""
    return {
        "policy": policy,
        "setting": setting,
        "baseline": baseline,
        **plain(comparison),
        "no_signal": _beside(comparison.no_signal),
        "means": {name: _beside(pair) for name, pair in comparison.means.items()},
        "unscored": {"baseline": comparison.unscored[0], "setting": comparison.unscored[1]},
        "agreement": [_agreement(found) for found in agreements],
    }


def _beside(pair: Any) -> dict[str, Any]:
    return {"baseline": plain(pair.first), "setting": plain(pair.second)}


def _agreement(found: CriterionAgreement) -> dict[str, Any]:
    numbers: Agreement = found.agreement
    return {
        "kind": found.kind,
        "title": found.title,
        "criterion": found.criterion,
        **plain(numbers),
    }


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """The matrix with its reversals."""
    return {**plain(matrix), "reversals": [_reversal(r) for r in matrix.reversals]}


def _reversal(reversal: Reversal) -> dict[str, Any]:
    return {**plain(reversal), "clear": reversal.clear}
