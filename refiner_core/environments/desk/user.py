"""The simulated user of the desk: scripted, deterministic, and silent unless asked.

In: the ``user`` part of a task, a seed, and the agent's messages.
Out: :class:`ScriptedUser`, whose :meth:`~ScriptedUser.answer` returns its replies.

A message is interpreted by its words, in this order; the first match decides:

1. The user is already satisfied, or its patience is over: it says so.
2. *Reactions* of the task, each once: the message has all the phrases of one (a fee and its
   amount, another day). The user agrees, refuses or asks for something else.
3. Everything that the user should be told has been told: it thanks.
4. *Instructions* (with a device): the message names one action; the user does it and reports the
   lamp. With two at a time it does neither.
5. *Questions* (a question mark, or a word such as ``what`` or ``please``): it says what it knows
   about the named slots, and nothing else.
6. Anything else: it asks for clarification.

Messages without progress are counted; after :data:`PATIENCE` of them the user leaves.
The seed only chooses among equivalent phrases.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.environments.desk import vocabulary
from refiner_core.environments.desk.domain import Desk

WORKING = "green"
#: Slots that an agent can ask for, by the word that identifies them.
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "cable": ("cable",),
    "wireless": ("wireless", "wifi"),
    "restart": ("restart", "reboot"),
}


def lamp(desk: Desk) -> str:
    """The lamp's colour for the user."""
    device = desk.device
    if device["cable"] == "out":
        return "dark"
    if device["wireless"] == "off":
        return "blue"
    well = device["broken"] == "no" and device["fresh"] == "yes" and _state(desk) == "active"
    return WORKING if well else "red"


def _state(desk: Desk) -> str:
    return str(desk.tables["devices"][desk.device["id"]]["state"])


def instructions(heard: Sequence[str]) -> list[str]:
    """Instructions to the user in a message."""
    return [name for name, known in INSTRUCTIONS.items() if any(word in heard for word in known)]


def do(desk: Desk, doing: str) -> bool:
    """Let the user do it; True if that changes something."""
    device, new = desk.device, doing not in desk.doings
    before = dict(device)
    if doing == "cable":
        device["cable"] = "in"
    elif doing == "wireless" and device["cable"] == "in":
        device["wireless"] = "on"
    elif doing == "restart" and device["cable"] == "in" and _state(desk) == "active":
        device["fresh"] = "yes"
    desk.doings.append(doing)
    return new or device != before


#: Messages without progress after which a user leaves.
PATIENCE = 4
_QUESTION_WORDS = frozenset(
    ("what", "which", "who", "when", "where", "please", "tell", "give", "need", "provide", "may",
     "can", "could", "confirm", "know")
)  # fmt: skip
_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "day": ("day", "date"),
    "lamp": ("lamp", "light"),
    "code": ("code", "pin"),
    "name": ("name",),
}
_MAIN_SYNONYMS = ("id", "number", "reference")


class ScriptedUser:
    """One user in one episode.

    Parameters
    ----------
    script
        ``opening``, ``knows`` (slot to value), ``volunteers`` (slots that the opening reveals),
        ``reactions`` (``hear``: phrases; ``say``: possible answers; ``agree``: what it agrees to by
        answering; ``again``: statements that it must be told again, by number in ``tell``;
        ``end``: whether it is then satisfied).
    tell
        Statements that it must be told, as phrases that one message contains; a task's ``tell``.
    slots
        The domain's; the first is the meaning of ``id`` or ``number``.
    seed
        Chooses among phrases.
    """

    def __init__(
        self,
        script: Mapping[str, Any],
        tell: Sequence[Sequence[str]],
        slots: Sequence[str],
        seed: int,
    ) -> None:
        self._script, self._tell, self._slots, self._seed = script, tell, slots, seed
        self._said = 0
        self._reacted: set[int] = set()
        self._wants_nothing = False
        self.told: set[int] = set()
        self.useless = 0
        self.left = False

    def open(self, desk: Desk) -> str:
        """The first message."""
        for slot in self._script["volunteers"]:
            desk.told[slot] = self._script["knows"][slot]
        return str(self._script["opening"])

    def satisfied(self) -> bool:
        """True if it has heard everything that it should, or wants nothing more."""
        return self._wants_nothing or (bool(self._tell) and len(self.told) == len(self._tell))

    def answer(self, content: str, desk: Desk) -> str:
        """Its answer to a message; may change its device and what it has revealed."""
        if self.satisfied():
            return self._bored(self._one_of(vocabulary.THANKS))
        heard = vocabulary.words_of(content)
        fresh = {
            i
            for i, needles in enumerate(self._tell)
            if i not in self.told and all(vocabulary.contains(heard, needle) for needle in needles)
        }
        self.told |= fresh
        reaction = self._reaction(heard, desk)
        if reaction is not None:
            return reaction
        if self.satisfied():
            return self._one_of(vocabulary.THANKS)
        done = self._instructed(heard, desk)
        if done is not None:
            return done
        if "?" in content or _QUESTION_WORDS.intersection(heard):
            answered = self._asked(heard, desk)
            if answered is not None:
                return answered
        if fresh:
            return vocabulary.OKAY[0]
        return self._bored(self._one_of(vocabulary.CLARIFY))

    def _reaction(self, heard: Sequence[str], desk: Desk) -> str | None:
        for index, reaction in enumerate(self._script["reactions"]):
            if index in self._reacted:
                continue
            if all(vocabulary.contains(heard, needle) for needle in reaction["hear"]):
                self._reacted.add(index)
                self.told -= set(reaction.get("again", ()))
                if reaction.get("agree"):
                    desk.agreed.add(reaction["agree"])
                self._wants_nothing = bool(reaction.get("end"))
                return self._one_of(reaction["say"])
        return None

    def _instructed(self, heard: Sequence[str], desk: Desk) -> str | None:
        if not desk.device:
            return None
        doings = instructions(heard)
        if not doings:
            return None
        if len(doings) > 1:
            return self._bored(vocabulary.ONE_STEP)
        changed = do(desk, doings[0])
        text = f"done, the lamp is {lamp(desk)}."
        if lamp(desk) == WORKING:
            self._wants_nothing = True
            text += " " + self._one_of(vocabulary.THANKS)
        return text if changed else self._bored(text)

    def _asked(self, heard: Sequence[str], desk: Desk) -> str | None:
        named = [slot for slot in self._slots if self._names(slot, heard)]
        if not named:
            return None
        knows = dict(self._script["knows"])
        if desk.device:
            knows["lamp"] = lamp(desk)
        parts = [(slot, str(knows[slot])) for slot in named if slot in knows]
        if not parts:
            return self._bored(vocabulary.UNKNOWN)
        new = any(desk.told.get(slot) != value for slot, value in parts)
        desk.told.update(parts)
        whose = self._one_of(("my", "the"))
        text = " and ".join(f"{whose} {slot} is {value}" for slot, value in parts) + "."
        return text if new else self._bored(text)

    def _names(self, slot: str, heard: Sequence[str]) -> bool:
        known = _SYNONYMS.get(slot, (slot,))
        if slot == self._slots[0]:
            known = (*known, *_MAIN_SYNONYMS)
        return any(word in heard for word in known)

    def _bored(self, text: str) -> str:
        self.useless += 1
        if self.useless >= PATIENCE:
            self.left = True
            return vocabulary.LEAVE
        return text

    def _one_of(self, phrases: Sequence[str]) -> str:
        self._said += 1
        return random.Random(f"{self._seed}/{self._said}").choice(list(phrases))
