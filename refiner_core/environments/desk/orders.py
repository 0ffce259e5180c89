"""The domain ``orders``: things that were sent; look up, exchange, refund.

In: a :class:`~.domain.Desk` with the tables ``orders`` (name, item, state, price, refund) and
``items`` (stock). Out: :data:`ORDERS`.

Rules: only who gives the owner's name may have a refund or an exchange, and the agent has looked at
the order before. An order whose state is ``sent`` is on its way: neither. A refund: the user has
been told the amount and has said yes. An exchange: the agent has looked at the item that the user
named, and there is some.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    finish,
    hand_over,
    introduced,
    respond,
    spec,
)

POLICY = (
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
        raise Refused("wrong_argument", f"it is {record['state']}")
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


# Families -------------------------------------------------------------------------------------

_OPENINGS = {
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


class _Scene(Scene):
    """An order, its user, and the calls up to the look-up; families add to it."""

    def __init__(self, draw: Draw, wish: str, state: str, *, owner: bool = True) -> None:
        self.draw, self.key, self.record = draw, draw.id(), _order(draw, state)
        name = self.record["name"] if owner else draw.name()
        opening = draw.rng.choice(_OPENINGS[wish])
        super().__init__(*introduced(draw, "order", self.key, name, opening))
        self.items: dict[str, dict[str, Any]] = {draw.value(): {"stock": "some"}}

    def offers_refund(self, *, agrees: bool) -> None:
        """The amount is told, and the user takes it or leaves it."""
        amount = str(self.record["refund"])
        self.answers(("refund", amount), agrees=agrees, to="refund")
        self.says(f"the refund is {amount}. do you want it?", "refund", amount)
        if agrees:
            self.calls.append(("refund", {"order": self.key}))
            self.says("your order is refunded.", "refunded")

    def asks_item(self, stock: str) -> str:
        """The user wants an item of which there is some or none."""
        item = self.draw.value()
        self.items[item] = {"stock": stock}
        self.user["knows"]["item"] = item
        self.calls += [respond(words.ask(["item"])), ("get_item", {"item": item})]
        return item

    def done(self, summary: str, end: Call, tempting: Call | None = None) -> Draft:
        """The task."""
        other = {self.draw.id(): _order(self.draw, "arrived")}
        state = {"orders": {self.key: self.record, **other}, "items": self.items}
        return self.draft(summary, state, end, tempting)


def _refund_family(*, agrees: bool) -> Family:
    def family(draw: Draw) -> Draft:
        scene = _Scene(draw, "refund", "arrived")
        scene.offers_refund(agrees=agrees)
        summary = "refund an order" + ("" if agrees else ", the user does not like the amount")
        return scene.done(summary, finish(), ("refund", {"order": scene.key}))

    return family


def _sent_family(wish: str, *, insists: bool) -> Family:
    def family(draw: Draw) -> Draft:
        scene = _Scene(draw, wish, "sent")
        if insists:
            scene.reacts(_SENT, words.ANYWAY, again=[0])
            scene.calls.append(respond("your order is sent."))
        scene.says("your order is sent.", *_SENT)
        item = {"item": next(iter(scene.items))} if wish == "exchange" else {}
        summary = f"{wish} an order that is on its way" + (", the user insists" if insists else "")
        return scene.done(summary, finish(), (wish, {"order": scene.key, **item}))

    return family


def _exchange_family(stock_or_refund: str) -> Family:
    """``some``, ``none``, or ``refund``: there is none, and the user wants a refund then."""

    def family(draw: Draw) -> Draft:
        scene = _Scene(draw, "exchange", "arrived")
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

    return family


def _look_up(wish: str) -> Family:
    def family(draw: Draw) -> Draft:
        state = draw.rng.choice(_STATES)
        scene = _Scene(draw, wish, state)
        if wish == "price":
            price = str(scene.record["price"])
            scene.says(f"the price is {price}.", price, f"!{scene.record['refund']}")
        else:
            said = _SENT if state == "sent" else (state,)
            others = [f"!{other}" for other in _STATES if other != state]
            scene.says(f"your order is {state}.", *said, *others)
        return scene.done(f"tell the {wish} of an order", finish())

    return family


def _not_owner(draw: Draw) -> Draft:
    scene = _Scene(draw, "refund", "arrived", owner=False)
    summary = "refund an order of somebody else"
    return scene.done(summary, hand_over("wrong name"), ("refund", {"order": scene.key}))


ORDERS = Domain(
    name="orders",
    policy=POLICY,
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
        "look_up_state": _look_up("state"),
        "refund": _refund_family(agrees=True),
        "exchange": _exchange_family("some"),
        "refund_sent": _sent_family("refund", insists=False),
        "exchange_none": _exchange_family("none"),
        "look_up_price": _look_up("price"),
        "refund_declined": _refund_family(agrees=False),
        "not_owner": _not_owner,
        "exchange_sent_insists": _sent_family("exchange", insists=True),
        "exchange_then_refund": _exchange_family("refund"),
    },
    slots=("order", "name", "item"),
)
