"""The desk's domains, and its tasks, generated from a pinned seed.

In: nothing. Out: :data:`DOMAINS`, and :class:`Task` values.

``bookings``: rooms by the day. Tables ``bookings`` (name, room, day, terms, fee, state) and
``rooms`` (the occupied days, a free one, the id of the next booking). A booking may be changed or
cancelled only for a user who gives the owner's name, after the agent has looked it up.
Terms ``fixed``: neither. Terms ``fee``: the user was told the fee and agreed. A room is
reserved for a day that the user asked for or agreed to.

``orders``: goods that were ordered. Tables ``orders`` (name, item, state, price, refund) and
``items`` (stock). A refund or an exchange is only for a user who gives the owner's name, after the
agent has looked the order up. An order in state ``sent`` is on its way: neither. A refund: the user
was told the amount and agreed. An exchange: the agent has looked up the item that the user named,
and it is in stock.

``devices``: the broken device is at the user's, and only the user can touch it. Table ``devices``
(state, code, tries, and the day on which a new one comes), beside the user's own device
(:mod:`.user`). A locked device is unlocked with the code that the user read from it; after a wrong
code the agent tries no other. A device is replaced only if the user has restarted it and its lamp
is still red. A blocked device is handed over.

Families alternate within a domain; no name, id, room or item occurs in two tasks. Task ``i`` of a
split depends on earlier ones for that reason only.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from refiner_core.environments.desk import user as appliance
from refiner_core.environments.desk import vocabulary
from refiner_core.environments.desk.domain import (
    COMMON,
    Call,
    Desk,
    Domain,
    Draft,
    Draw,
    Family,
    Result,
    Scene,
    ToolRefusal,
    broken,
    calling,
    finish,
    hand_over,
    introduced,
    respond,
    spec,
)
from refiner_core.environments.protocol import Task

# ---------------------------------------------------------------- bookings

_BOOKINGS_POLICY = (
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
        raise ToolRefusal("wrong_argument", "it is cancelled")
    return record


def _day(text: str) -> str:
    if text not in vocabulary.DAYS:
        raise ToolRefusal("wrong_argument", "there is no day like that")
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
        raise ToolRefusal("wrong_argument", "there is no other booking")
    room["taken"].append(day)
    made = {"name": desk.caller, "terms": "free", "fee": 0, "state": "reserved"}
    desk.tables["bookings"][key] = {**shown, **made}
    return {"booking": key, **shown, "state": "reserved"}


_BOOKING_OPENINGS = {
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


def _existing(
    draw: Draw, kind: str, terms: str, *, agrees: bool = True, insists: bool = False
) -> Draft:
    """Families about an existing booking: cancel or change it, under some terms."""
    key, fee = draw.id(), draw.amount() if terms == "fee" else 0
    record = _booking(draw, terms, fee)
    opening = draw.rng.choice(_BOOKING_OPENINGS[kind])
    scene = Scene(*introduced(draw, "booking", key, record["name"], opening))
    new_day = draw.rng.choice([day for day in vocabulary.DAYS if day != record["day"]])
    arguments = {"booking": key} if kind == "cancel" else {"booking": key, "day": new_day}
    scene.user["knows"] |= {"day": new_day} if kind == "change" else {}
    done = _DONE[kind]
    if terms == "fee":
        scene.answers(("fee", str(fee)), agrees=agrees, to="fee")
        scene.says(f"the fee is {fee}. do you want it?", "fee", str(fee))
    if terms == "fixed":
        scene.says("your booking is fixed.", _FIXED)
        if insists:
            scene.reacts((_FIXED,), vocabulary.ANYWAY, again=[0])
            scene.calls.append(respond("your booking is fixed."))
    elif agrees:
        scene.calls += [respond(vocabulary.ask(["day"]))] if kind == "change" else []
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


def _with_another(draw: Draw, key: str, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The table, with another user's booking added."""
    return {key: record, draw.id(): _booking(draw, "free", 0)}


def _booking_of_another(draw: Draw) -> Draft:
    key, record, name = draw.id(), _booking(draw, "free", 0), draw.name()
    opening = draw.rng.choice(_BOOKING_OPENINGS["cancel"])
    scene = Scene(*introduced(draw, "booking", key, name, opening))
    state = {"bookings": _with_another(draw, key, record), "rooms": {}}
    summary = "cancel a booking of somebody else"
    return scene.draft(summary, state, hand_over("wrong name"), ("cancel", {"booking": key}))


def _reserve_family(draw: Draw, taken: bool, agrees: bool = True) -> Draft:
    """Families about a new booking: the day is free, or another one is offered."""
    room, key = draw.value(), draw.id()
    day, other = draw.days(2)
    opening = draw.rng.choice(("i want to reserve a room.", "i need a room please."))
    calls: list[Call] = [
        respond(vocabulary.ask(["room", "day"])),
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


_FAMILIES: dict[str, Family] = {
    "cancel_free": partial(_existing, kind="cancel", terms="free"),
    "change_fee": partial(_existing, kind="change", terms="fee"),
    "cancel_fixed": partial(_existing, kind="cancel", terms="fixed"),
    "reserve": partial(_reserve_family, taken=False),
    "cancel_fee": partial(_existing, kind="cancel", terms="fee"),
    "not_owner": _booking_of_another,
    "change_free": partial(_existing, kind="change", terms="free"),
    "reserve_other_day": partial(_reserve_family, taken=True),
    "cancel_fee_declined": partial(_existing, kind="cancel", terms="fee", agrees=False),
    "change_fixed_insists": partial(_existing, kind="change", terms="fixed", insists=True),
    "reserve_declined": partial(_reserve_family, taken=True, agrees=False),
}

_BOOKINGS = Domain(
    name="bookings",
    policy=_BOOKINGS_POLICY,
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


# ---------------------------------------------------------------- orders

_ORDERS_POLICY = (
    "you work at the orders desk. ask for the order and the name, then get the order. "
    "wrong name: hand over. sent: no refund and no exchange, tell it is sent. "
    "refund: tell the refund and ask before you do it. "
    "exchange: ask for the item and get the item. stock none: tell there is none. "
    "tell what is done, then finish."
)


def _get_order(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    key = arguments["order"]
    record = desk.look_up("orders", key)
    return {"order": key, **{name: record[name] for name in ("name", "state", "price", "refund")}}


def _get_item(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    key = arguments["item"]
    return {"item": key, "stock": desk.look_up("items", key)["stock"]}


def _may_return(desk: Desk, key: str) -> dict[str, Any]:
    record = desk.owned("orders", key)
    if record["state"] == "sent":
        raise broken("not allowed, it is sent")
    if record["state"] != "arrived":
        raise ToolRefusal("wrong_argument", f"it is {record['state']}")
    return record


def _refund(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    record = _may_return(desk, arguments["order"])
    if "refund" not in desk.agreed:
        raise broken("not allowed, tell the refund and ask first")
    record["state"] = "refunded"
    return {"order": arguments["order"], "refund": record["refund"], "state": "refunded"}


def _exchange(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    record, name = _may_return(desk, arguments["order"]), arguments["item"]
    item = desk.record("items", name)
    if name not in desk.seen:
        raise broken("not allowed, get the item first")
    if name != desk.told.get("item"):
        raise broken("not allowed, ask for the item first")
    if item["stock"] == "none":
        raise broken("not allowed, there is none")
    record["state"], record["item"] = "exchanged", name
    return {"order": arguments["order"], "item": name, "state": "exchanged"}


_ORDER_OPENINGS = {
    "refund": ("i want a refund for my order.", "please refund my order."),
    "exchange": ("i want to exchange my order.", "i need another item for my order."),
    "state": ("where is my order?", "what is the state of my order?"),
    "price": ("what is the price of my order?", "how much is my order?"),
}
_STATES = ("open", "sent", "arrived")
_SENT = ("sent|shipped|on its way",)
_NONE = ("none|out of stock|sold out",)


def _order(draw: Draw, state: str) -> dict[str, Any]:
    price = draw.rng.randrange(40, 99)
    return {
        "name": draw.name(),
        "item": draw.value(),
        "state": state,
        "price": price,
        "refund": draw.rng.randrange(12, price),
    }


class _OrderScene(Scene):
    """An order, its user, and the calls up to the look-up; families extend it."""

    def __init__(self, draw: Draw, wish: str, state: str, *, owner: bool = True) -> None:
        self.draw, self.key, self.record = draw, draw.id(), _order(draw, state)
        name = self.record["name"] if owner else draw.name()
        opening = draw.rng.choice(_ORDER_OPENINGS[wish])
        super().__init__(*introduced(draw, "order", self.key, name, opening))
        self.items: dict[str, dict[str, Any]] = {draw.value(): {"stock": "some"}}

    def offers_refund(self, *, agrees: bool) -> None:
        """Tell the amount; the user accepts or declines it."""
        amount = str(self.record["refund"])
        self.answers(("refund", amount), agrees=agrees, to="refund")
        self.says(f"the refund is {amount}. do you want it?", "refund", amount)
        if agrees:
            self.calls.append(("refund", {"order": self.key}))
            self.says("your order is refunded.", "refunded")

    def asks_item(self, stock: str) -> str:
        """Let the user want an item that is in stock or not."""
        item = self.draw.value()
        self.items[item] = {"stock": stock}
        self.user["knows"]["item"] = item
        self.calls += [respond(vocabulary.ask(["item"])), ("get_item", {"item": item})]
        return item

    def done(self, summary: str, end: Call, tempting: Call | None = None) -> Draft:
        """The task."""
        other = {self.draw.id(): _order(self.draw, "arrived")}
        state = {"orders": {self.key: self.record, **other}, "items": self.items}
        return self.draft(summary, state, end, tempting)


def _refund_family(draw: Draw, *, agrees: bool) -> Draft:
    scene = _OrderScene(draw, "refund", "arrived")
    scene.offers_refund(agrees=agrees)
    summary = "refund an order" + ("" if agrees else ", the user does not like the amount")
    return scene.done(summary, finish(), ("refund", {"order": scene.key}))


def _sent_family(draw: Draw, wish: str, *, insists: bool) -> Draft:
    scene = _OrderScene(draw, wish, "sent")
    if insists:
        scene.reacts(_SENT, vocabulary.ANYWAY, again=[0])
        scene.calls.append(respond("your order is sent."))
    scene.says("your order is sent.", *_SENT)
    item = {"item": next(iter(scene.items))} if wish == "exchange" else {}
    summary = f"{wish} an order that is on its way" + (", the user insists" if insists else "")
    return scene.done(summary, finish(), (wish, {"order": scene.key, **item}))


def _exchange_family(draw: Draw, stock_or_refund: str) -> Draft:
    """``some``, ``none``, or ``refund``: out of stock, and the user then wants a refund."""
    scene = _OrderScene(draw, "exchange", "arrived")
    stock = "some" if stock_or_refund == "some" else "none"
    item = scene.asks_item(stock)
    call = ("exchange", {"order": scene.key, "item": item})
    if stock == "some":
        scene.calls.append(call)
        scene.says("your order is exchanged.", "exchanged")
        return scene.done("exchange an order", finish())
    if stock_or_refund == "refund":
        scene.reacts(_NONE, ("then i want a refund.", "then please refund it."))
    scene.says("there is none.", *_NONE)
    if stock_or_refund == "refund":
        scene.offers_refund(agrees=True)
        summary = "exchange an order, there is no such item, so refund it"
        return scene.done(summary, finish(), ("refund", {"order": scene.key}))
    return scene.done("exchange an order, there is no such item", finish(), call)


def _look_up(draw: Draw, wish: str) -> Draft:
    state = draw.rng.choice(_STATES)
    scene = _OrderScene(draw, wish, state)
    if wish == "price":
        price = str(scene.record["price"])
        scene.says(f"the price is {price}.", price, f"!{scene.record['refund']}")
    else:
        said = _SENT if state == "sent" else (state,)
        others = [f"!{other}" for other in _STATES if other != state]
        scene.says(f"your order is {state}.", *said, *others)
    return scene.done(f"tell the {wish} of an order", finish())


def _order_of_another(draw: Draw) -> Draft:
    scene = _OrderScene(draw, "refund", "arrived", owner=False)
    summary = "refund an order of somebody else"
    return scene.done(summary, hand_over("wrong name"), ("refund", {"order": scene.key}))


_ORDERS = Domain(
    name="orders",
    policy=_ORDERS_POLICY,
    specs=(
        spec("get_order", "look up an order", "order"),
        spec("get_item", "look up an item", "item"),
        spec("refund", "refund an order", "order"),
        spec("exchange", "exchange the item of an order", "order", "item"),
        *COMMON,
    ),
    tools={
        "get_order": _get_order,
        "get_item": _get_item,
        "refund": _refund,
        "exchange": _exchange,
    },
    families={
        "look_up_state": partial(_look_up, wish="state"),
        "refund": partial(_refund_family, agrees=True),
        "exchange": partial(_exchange_family, stock_or_refund="some"),
        "refund_sent": partial(_sent_family, wish="refund", insists=False),
        "exchange_none": partial(_exchange_family, stock_or_refund="none"),
        "look_up_price": partial(_look_up, wish="price"),
        "refund_declined": partial(_refund_family, agrees=False),
        "not_owner": _order_of_another,
        "exchange_sent_insists": partial(_sent_family, wish="exchange", insists=True),
        "exchange_then_refund": partial(_exchange_family, stock_or_refund="refund"),
    },
    slots=("order", "name", "item"),
)


# ---------------------------------------------------------------- devices

_DEVICES_POLICY = (
    "you work at the devices desk. only the user can touch the device. "
    "ask for the device and the lamp. dark: ask to plug the cable. "
    "blue: ask to turn wireless on. red: get the device. active: ask to restart. "
    "locked: ask for the code, unlock, then ask to restart. "
    "blocked or wrong code: hand over. red after restart: replace, tell the day. "
    "green: finish."
)


def _get_device(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    key = arguments["device"]
    return {"device": key, "state": desk.look_up("devices", key)["state"]}


def _handled(desk: Desk, key: str) -> dict[str, Any]:
    record = desk.record("devices", key)
    if key not in desk.seen:
        raise broken("not allowed, get the device first")
    if record["state"] == "blocked":
        raise broken("not allowed, it is blocked")
    return record


def _unlock(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    key, code = arguments["device"], arguments["code"]
    record = _handled(desk, key)
    if code != desk.told.get("code"):
        raise broken("not allowed, ask for the code first")
    if record["tries"]:
        raise broken("not allowed, the code is wrong")
    if record["state"] != "locked":
        raise ToolRefusal("wrong_argument", f"it is {record['state']}")
    if code != record["code"]:
        record["tries"] = 1
        return {"device": key, "state": "locked", "code": "wrong"}
    record["state"] = "active"
    return {"device": key, "state": "active"}


def _replace(desk: Desk, arguments: Mapping[str, Any]) -> Result:
    key = arguments["device"]
    record = _handled(desk, key)
    tried = desk.device["id"] == key and "restart" in desk.doings
    if record["state"] != "active" or not tried or appliance.lamp(desk) != "red":
        raise broken("not allowed, ask to restart first")
    record["state"] = "replaced"
    return {"device": key, "state": "replaced", "day": record["day"]}


_DEVICE_OPENINGS = (
    "my device does not work.",
    "i need help with my device.",
    "there is a problem with my device.",
)
_PLUG = "please plug the cable."
_WIRELESS = "please turn wireless on."
_RESTART = "please restart the device."


def _device(draw: Draw, state: str) -> dict[str, Any]:
    return {"state": state, "code": draw.id(), "tries": 0, "day": draw.days(1)[0]}


def _device_family(
    draw: Draw,
    state: str = "active",
    *,
    cable: str = "in",
    wireless: str = "on",
    fresh: str = "no",
    broken: str = "no",
    wrong_code: bool = False,
) -> Draft:
    """A family by the faults of the device, at the user's and at the desk."""
    key, record = draw.id(), _device(draw, state)
    code = draw.id() if wrong_code else record["code"]
    device = {"id": key, "cable": cable, "wireless": wireless, "fresh": fresh, "broken": broken}
    table = {key: record, draw.id(): _device(draw, "active")}
    user = calling(draw.rng.choice(_DEVICE_OPENINGS), {"device": key, "code": code})
    scene = Scene({**user, "device": device}, [respond(vocabulary.ask(["device", "lamp"]))])
    calls = scene.calls
    calls += [respond(_PLUG)] if cable == "out" else []
    calls += [respond(_WIRELESS)] if wireless == "off" else []
    red = fresh == "no" or broken == "yes" or state != "active"
    end, replacing = finish(), ("replace", {"device": key})
    if red:
        calls.append(("get_device", {"device": key}))
    if state == "locked":
        calls.append(respond(vocabulary.ask(["code"])))
        calls.append(("unlock", {"device": key, "code": code}))
    if state == "blocked" or wrong_code:
        end = hand_over("wrong code" if wrong_code else "blocked")
    elif red:
        calls.append(respond(_RESTART))
    if broken == "yes":
        calls.append(replacing)
        scene.says(f"your day is {record['day']}.", record["day"])
    summary = _device_summary(state, device, wrong_code)
    return scene.draft(summary, {"devices": table}, end, replacing if red else None)


def _device_summary(state: str, device: Mapping[str, str], wrong_code: bool) -> str:
    faults = {
        "the cable is out": device["cable"] == "out",
        "wireless is off": device["wireless"] == "off",
        "it is broken": device["broken"] == "yes",
        "it wants a restart": device["fresh"] == "no" and device["broken"] == "no",
        f"the desk has it {state}": state != "active",
        "the code is wrong": wrong_code,
    }
    return "a device: " + ", ".join(fault for fault, holds in faults.items() if holds)


_DEVICES = Domain(
    name="devices",
    policy=_DEVICES_POLICY,
    specs=(
        spec("get_device", "look up a device", "device"),
        spec("unlock", "unlock a device", "device", "code"),
        spec("replace", "send a new device", "device"),
        *COMMON,
    ),
    tools={"get_device": _get_device, "unlock": _unlock, "replace": _replace},
    families={
        "cable": partial(_device_family, cable="out", fresh="yes"),
        "locked": partial(_device_family, state="locked"),
        "broken": partial(_device_family, broken="yes"),
        "wireless": partial(_device_family, wireless="off", fresh="yes"),
        "restart": _device_family,
        "blocked": partial(_device_family, state="blocked"),
        "cable_restart": partial(_device_family, cable="out"),
        "wrong_code": partial(_device_family, state="locked", wrong_code=True),
        "cable_wireless": partial(_device_family, cable="out", wireless="off", fresh="yes"),
        "wireless_locked": partial(_device_family, state="locked", wireless="off"),
    },
    slots=("device", "lamp", "code"),
)


# ---------------------------------------------------------------- tasks

DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (_BOOKINGS, _ORDERS, _DEVICES)}


#: Pinned by a test to the content of tasks, texts and rules; see the README.
VERSION = "1"
#: Tasks of each domain by split.
COUNTS: Mapping[str, int] = {"train": 120, "test": 30}


@functools.lru_cache(maxsize=1)
def own_tasks() -> tuple[Task, ...]:
    """All tasks of the desk, domain by domain, ``train`` before ``test``."""
    draw, tasks = Draw(random.Random(), set()), []
    for name, domain in DOMAINS.items():
        families = list(domain.families.items())
        for split, index in ((split, i) for split, count in COUNTS.items() for i in range(count)):
            draw.rng.seed(f"desk-{VERSION}/{name}/{split}/{index}")
            family, make = families[index % len(families)]
            summary, data = make(draw)
            data = json.loads(json.dumps({"family": family, **data}, ensure_ascii=False))
            tasks.append(Task(f"{name}-{split}-{index:03d}", name, split, summary, data))
    return tuple(tasks)
