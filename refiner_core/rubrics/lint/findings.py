"""What a check says: one value per problem, and why each kind of problem matters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

Severity = Literal["error", "warning"]


class Rule(NamedTuple):
    """One kind of problem: how bad it is, why it matters, what mends it."""

    severity: Severity
    why: str
    fix: str


@dataclass(frozen=True, order=True)
class Finding:
    """One problem.

    Attributes
    ----------
    line
        Line of the file, counted from 1; of a Parquet file, the row.
    place
        Which rubric, such as ``rubrics[2]``; empty for the file or row as a whole.
    title
        Its title, where it has one.
    rule
        The kind of problem; see :data:`RULES`.
    what
        What stands there.
    """

    line: int
    place: str
    title: str
    rule: str
    what: str

    @property
    def is_error(self) -> bool:
        """Whether the reward would refuse the rubric or count it wrongly."""
        return RULES[self.rule].severity == "error"

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        rule = RULES[self.rule]
        return {**asdict(self), "severity": rule.severity, "why": rule.why, "fix": rule.fix}


def _error(why: str, fix: str) -> Rule:
    return Rule("error", why, fix)


def _warning(why: str, fix: str) -> Rule:
    return Rule("warning", why, fix)


#: Every rule. Warnings are what a set's own file may `accept`, with a reason.
RULES: dict[str, Rule] = {
    "unreadable": _error(
        "nothing after it can be relied on", "write the file with a YAML or JSON library"
    ),
    "schema": _error(
        "loading refuses it, so that no run begins", "correct what is named; see `rubrics show v3`"
    ),
    "duplicate-key": _error("all but the last value are lost without a word", "drop one of them"),
    "duplicate-title": _error(
        "reports and agreement tables go by title and would mix the two", "rename one of them"
    ),
    "duplicate-description": _error(
        "one criterion is asked and weighted twice",
        "drop one of them, and raise the other's weight",
    ),
    "contradictory-sign": _error(
        "the weight says that it counts against the answer, the list that it counts for it",
        "move it to negative_rubrics, or drop the sign",
    ),
    "unread-key": _warning(
        "rows keep title, description and weight alone; anything else changes nothing",
        "correct the key, or drop it",
    ),
    "several-demands": _warning(
        "an answer that meets one demand and not the other has no right score, and judges differ",
        "split it into one rubric per demand",
    ),
    "negated": _warning(
        "a judge's s enters as 1 - s, so that the answer is rewarded for not being so: right if "
        "the sentence describes a fault, upside down if it describes what is wanted, and hard to "
        "judge either way",
        "describe in plain words what the fault looks like, or ask for the good as a positive "
        "rubric",
    ),
    "polarity": _warning(
        "a positive description says what a good answer does, a negative one what a bad answer "
        "does; the other way round the reward has the wrong sign, or is a double negation",
        "move it to the other polarity and describe what is to be seen",
    ),
    "unseen": _warning(
        "the judge sees the question and the answer with its tags, nothing else: it would guess",
        "ask for what shows in the answer; whether sources support it is the citation reward's",
    ),
    "scale": _warning(
        "the judge answers 0, 1 or 2; another scale makes failures or wrong scores",
        "say in words what is fully true, true in part, and not true",
    ),
    "vague": _warning(
        "without an anchor every judge has a measure of its own, and repeatability suffers",
        "say what can be seen in such an answer, e.g. `Fully true if …; not true if …`",
    ),
    "addressed": _warning(
        "a criterion is given to the judge as material, not as an order; prompts tell it to ignore "
        "such text",
        "describe the answer; anchors such as `Fully true if …` are fine",
    ),
    "quoted": _warning(
        "with double quotes the lexical judge looks for the quoted words alone, literally",
        "quote only what must stand in the answer word for word; write examples without quotes",
    ),
    "long": _warning(
        "long criteria hold several, cost tokens with every judgement, and are judged less alike",
        "cut it to one observation and its anchors",
    ),
    "terse": _warning(
        "a judge has to guess what is meant", "write a sentence that can be true of an answer"
    ),
    "weightless": _warning(
        "it is judged and paid for, and counts nothing", "give it a weight, or drop it"
    ),
    "only-faults": _warning(
        "an answer that says nothing has none of the faults and gets the full judge term",
        "add what a good answer does; or use it as `instance+static`, beside rows that ask for it",
    ),
    "near-duplicate": _warning(
        "one thing is weighted twice, or for and against at once",
        "merge them, or say in each what the other does not cover",
    ),
    "name-taken": _warning(
        "cards and tables name the set, and would say the other one's name",
        "give the set a name of its own",
    ),
    "accept-unused": _warning(
        "nothing of that kind is found there any more", "drop it from `accept`"
    ),
    "accept-unknown": _error("there is no such warning", "correct the name under `accept`"),
}
