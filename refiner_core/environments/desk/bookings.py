"""The domain ``bookings``: rooms by the day; find, reserve, change, cancel.

In: a :class:`~.domain.Desk` with the tables ``bookings`` (name, room, day, terms, fee, state) and
``rooms`` (the days that are taken, one that is free, the id of the next booking).
Out: :data:`BOOKINGS`.

Rules: only who gives the owner's name may have a booking changed or cancelled, and the agent has
looked at it before. Terms ``fixed``: neither. Terms ``fee``: the user has been told the fee and
has said yes. A room is reserved for a day that the user has asked for or agreed to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from refiner_core.environments.desk import words
from refiner_core.environments.desk.domain import (
    COMMON,
    Call,
    Desk,
    Domain,
    Draft,
    Draw,
    Family,
    Refused,
    Result,
    Scene,
    broken,
    calling,
    finish,
    hand_over,
    introduced,
    respond,
    spec,
)

POLICY = (
    "you work at the bookings desk. ask for the booking and the name, then get the booking. "
    "wrong name: hand over. fixed: no change and no cancel, tell it is fixed. "
    "fee: tell the fee and ask before you do it. change: ask for the day. "
    "reserve: ask for the room and the day. taken: offer the free day. "
    "tell the new booking. tell what is done, then finish."
)


def _get_booking(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    key = arguments["booking"]
    record = desk.look_up("bookings", key)
    shown = {name: record[name] for name in ("name", "day", "terms")}
    fee = {"fee": record["fee"]} if record["terms"] == "fee" else {}
    return {"booking": key, **shown, **fee}


def _may_change(desk: Desk, key: str) -> dict[str, Any]:
    record = desk.owned("bookings", key)
    if record["terms"] == "fixed":
        raise broken("not allowed, it is fixed")
    if record["terms"] == "fee" and "fee" not in desk.agreed:
        raise broken("not allowed, tell the fee and ask first")
    if record["state"] == "cancelled":
        raise Refused("wrong_argument", "it is cancelled")
    return record


def _day(text: str) -> str:
    if text not in words.DAYS:
        raise Refused("wrong_argument", "there is no day like that")
    return text


def _change(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    record = _may_change(desk, arguments["booking"])
    record["day"] = _day(arguments["day"])
    return {"booking": arguments["booking"], "day": record["day"], "state": "changed"}


def _cancel(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    record = _may_change(desk, arguments["booking"])
    record["state"] = "cancelled"
    return {"booking": arguments["booking"], "state": "cancelled"}


def _reserve(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    name, day = arguments["room"], _day(arguments["day"])
    room = desk.record("rooms", name)
    if day != desk.told.get("day") and day not in desk.agreed:
        raise broken("not allowed, ask for the day first")
    shown = {"room": name, "day": day}
    if day in room["taken"]:
        return {**shown, "state": "taken", "free": room["free"]}
    key = room["next"]
    if key in desk.tables["bookings"]:
        raise Refused("wrong_argument", "there is no other booking")
    room["taken"].append(day)
    made = {"name": desk.caller, "terms": "free", "fee": 0, "state": "reserved"}
    desk.tables["bookings"][key] = {**shown, **made}
    return {"booking": key, **shown, "state": "reserved"}


# Families -------------------------------------------------------------------------------------

_OPENINGS = {
    "cancel": ("i want to cancel my booking.", "please cancel my booking."),
    "change": ("i want to change my booking.", "i need another day for my booking."),
}
_DONE = {"cancel": "cancelled", "change": "changed"}
_FIXED = "fixed|not possible"
_ANY_SPELLING = {"cancelled": "cancelled|canceled", "changed": "changed|moved"}


def _booking(draw: Draw, terms: str, fee: int) -> dict[str, Any]:
    return {
        "name": draw.name(),
        "room": draw.value(),
        "day": draw.days(1)[0],
        "terms": terms,
        "fee": fee,
        "state": "reserved",
    }


def _existing(kind: str, terms: str, *, agrees: bool = True, insists: bool = False) -> Family:
    """Families about a booking that is there: cancel or change it, under some terms."""

    def family(draw: Draw) -> Draft:
        key, fee = draw.id(), draw.amount() if terms == "fee" else 0
        record = _booking(draw, terms, fee)
        opening = draw.rng.choice(_OPENINGS[kind])
        scene = Scene(*introduced(draw, "booking", key, record["name"], opening))
        new_day = draw.rng.choice([day for day in words.DAYS if day != record["day"]])
        arguments = {"booking": key} if kind == "cancel" else {"booking": key, "day": new_day}
        scene.user["knows"] |= {"day": new_day} if kind == "change" else {}
        done = _DONE[kind]
        if terms == "fee":
            scene.answers(("fee", str(fee)), agrees=agrees, to="fee")
            scene.says(f"the fee is {fee}. do you want it?", "fee", str(fee))
        if terms == "fixed":
            scene.says("your booking is fixed.", _FIXED)
            if insists:
                scene.reacts((_FIXED,), words.ANYWAY, again=[0])
                scene.calls.append(respond("your booking is fixed."))
        elif agrees:
            scene.calls += [respond(words.ask(["day"]))] if kind == "change" else []
            scene.calls.append((kind, arguments))
            scene.says(f"your booking is {done}.", _ANY_SPELLING[done])
        return scene.draft(
            f"{kind} a booking, terms {terms}"
            + ("" if agrees else ", the user does not want to pay")
            + (", the user insists" if insists else ""),
            {"bookings": _with_another(draw, key, record), "rooms": {}},
            finish(),
            None if terms == "free" else (kind, arguments),
        )

    return family


def _with_another(draw: Draw, key: str, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The table, with the booking of somebody else beside it."""
    return {key: record, draw.id(): _booking(draw, "free", 0)}


def _not_owner(draw: Draw) -> Draft:
    key, record, name = draw.id(), _booking(draw, "free", 0), draw.name()
    opening = draw.rng.choice(_OPENINGS["cancel"])
    scene = Scene(*introduced(draw, "booking", key, name, opening))
    state = {"bookings": _with_another(draw, key, record), "rooms": {}}
    summary = "cancel a booking of somebody else"
    return scene.draft(summary, state, hand_over("wrong name"), ("cancel", {"booking": key}))


def _reserve_family(taken: bool, agrees: bool = True) -> Family:
    """Families that want a new booking: the day is free, or another one is offered."""

    def family(draw: Draw) -> Draft:
        room, key = draw.value(), draw.id()
        day, other = draw.days(2)
        opening = draw.rng.choice(("i want to reserve a room.", "i need a room please."))
        calls: list[Call] = [
            respond(words.ask(["room", "day"])),
            ("reserve", {"room": room, "day": day}),
        ]
        record = {"taken": [day] if taken else [], "free": other, "next": key}
        state = {"bookings": {draw.id(): _booking(draw, "free", 0)}, "rooms": {room: record}}
        knows = {"room": room, "day": day, "name": draw.name()}
        scene = Scene(calling(opening, knows), calls)
        if taken:
            scene.answers((other,), agrees=agrees, to=other)
            scene.says(f"{day} is taken. is {other} good?", other)
            scene.calls += [("reserve", {"room": room, "day": other})] if agrees else []
        if agrees:
            scene.says(f"your booking is {key}.", key)
        return scene.draft(
            "reserve a room"
            + (", the day is taken" if taken else "")
            + ("" if agrees else ", no other day will do"),
            state,
            finish(),
            ("reserve", {"room": room, "day": other}) if taken else None,
        )

    return family


_FAMILIES: dict[str, Callable[[Draw], Draft]] = {
    "cancel_free": _existing("cancel", "free"),
    "change_fee": _existing("change", "fee"),
    "cancel_fixed": _existing("cancel", "fixed"),
    "reserve": _reserve_family(False),
    "cancel_fee": _existing("cancel", "fee"),
    "not_owner": _not_owner,
    "change_free": _existing("change", "free"),
    "reserve_other_day": _reserve_family(True),
    "cancel_fee_declined": _existing("cancel", "fee", agrees=False),
    "change_fixed_insists": _existing("change", "fixed", insists=True),
    "reserve_declined": _reserve_family(True, agrees=False),
}

BOOKINGS = Domain(
    name="bookings",
    policy=POLICY,
    specs=(
        spec("get_booking", "look up a booking", "booking"),
        spec("reserve", "reserve a room", "room", "day"),
        spec("change", "change the day of a booking", "booking", "day"),
        spec("cancel", "cancel a booking", "booking"),
        *COMMON,
    ),
    tools={"get_booking": _get_booking, "reserve": _reserve, "change": _change, "cancel": _cancel},
    families=_FAMILIES,
    slots=("booking", "name", "room", "day"),
)
