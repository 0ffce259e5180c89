"""What a lint says: one value per problem."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, order=True)
class Finding:
    """One problem of a card.

    Attributes
    ----------
    line
        Where it stands, counted from 1.
    rule
        Its short name, such as ``percentage-impossible``; see :data:`RULES`.
    message
        What stands there and why it cannot be.
    fix
        What mends it; empty where that is plain.
    severity
        An ``error`` is wrong as it stands; a ``warning`` cannot be checked, or misleads.
    """

    line: int
    rule: str
    message: str
    fix: str = ""
    severity: Severity = "error"

    @property
    def is_error(self) -> bool:
        """Whether a card with it is unfit to be published."""
        return self.severity == "error"

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)


#: Every rule with what it looks for.
RULES: dict[str, str] = {
    "too-large": "a card has at most a million characters",
    "front-matter": "the block between two lines of --- is there, is YAML, and is a mapping",
    "licence-missing": "the front matter names a licence",
    "base-model-missing": "the front matter names the base model",
    "key-twice": "no key of the front matter stands there twice",
    "not-finite": "no NaN or infinity where a number should stand",
    "not-a-number": "the values of model-index are numbers",
    "secret": "no access token or key",
    "bare-link": "links lead to something in particular",
    "machine-path": "no path of some machine",
    "control-character": "no character that nobody sees",
    "fence-open": "every code block is closed",
    "command": "commands parse; those of refiner name recipes and fields that there are",
    "out-of-range": "no share above 100 % or below 0",
    "percentage-impossible": "a percentage of n is a whole number of cases, as printed",
    "total": "totals and averages recompute from the parts beside them",
    "parts": "parts sum to their whole, x of y is x of more, a / b is what it is said to be",
    "interval": "intervals hold their value, low before high",
    "pass-at-k": "pass@k does not fall as k grows",
    "two-values": "one quantity has one value",
    "model-index": "the numbers of model-index are those of the tables",
    "comparison": "an improvement recomputes, from two numbers of one protocol and one n",
    "comparison-built-on": "an improvement is not built on a number that cannot be",
    "evidence": "the card is what its evidence gives, number by number",
    "evidence-inconsistent": "the evidence agrees with itself",
    "evidence-missing": "numbers of our own cards have evidence beside them",
    "file-differs": "the files of a publication are those that its evidence names",
}
