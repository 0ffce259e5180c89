"""The domain ``devices``: the thing that does not work stands at the user's, and only the user can
touch it.

In: a :class:`~.domain.Desk` with the tables ``devices`` (state, code, tries, and the
day on which a new one comes), and the user's own device (:mod:`.user`).
Out: :data:`DEVICES`.

Rules: a locked device is unlocked with the code that the user has read from it; after a wrong code
the agent tries no other. A device is replaced only where the user has restarted it and its lamp is
red still. A blocked device is for somebody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refiner_core.environments.desk import user as appliance
from refiner_core.environments.desk import words
from refiner_core.environments.desk.domain import (
    COMMON,
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
    respond,
    spec,
)

POLICY = (
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
        raise Refused("wrong_argument", f"it is {record['state']}")
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


# Families -------------------------------------------------------------------------------------

_OPENINGS = (
    "my device does not work.",
    "i need help with my device.",
    "there is a problem with my device.",
)
_PLUG = "please plug the cable."
_WIRELESS = "please turn wireless on."
_RESTART = "please restart the device."


def _record(draw: Draw, state: str) -> dict[str, Any]:
    return {"state": state, "code": draw.id(), "tries": 0, "day": draw.days(1)[0]}


def _device_family(
    state: str = "active",
    *,
    cable: str = "in",
    wireless: str = "on",
    fresh: str = "no",
    broken: str = "no",
    wrong_code: bool = False,
) -> Family:
    """A family by what is wrong with the device, at the user's and at the desk."""

    def family(draw: Draw) -> Draft:
        key, record = draw.id(), _record(draw, state)
        code = draw.id() if wrong_code else record["code"]
        device = {"id": key, "cable": cable, "wireless": wireless, "fresh": fresh, "broken": broken}
        table = {key: record, draw.id(): _record(draw, "active")}
        user = calling(draw.rng.choice(_OPENINGS), {"device": key, "code": code})
        scene = Scene({**user, "device": device}, [respond(words.ask(["device", "lamp"]))])
        calls = scene.calls
        calls += [respond(_PLUG)] if cable == "out" else []
        calls += [respond(_WIRELESS)] if wireless == "off" else []
        red = fresh == "no" or broken == "yes" or state != "active"
        end, replacing = finish(), ("replace", {"device": key})
        if red:
            calls.append(("get_device", {"device": key}))
        if state == "locked":
            calls.append(respond(words.ask(["code"])))
            calls.append(("unlock", {"device": key, "code": code}))
        if state == "blocked" or wrong_code:
            end = hand_over("wrong code" if wrong_code else "blocked")
        elif red:
            calls.append(respond(_RESTART))
        if broken == "yes":
            calls.append(replacing)
            scene.says(f"your day is {record['day']}.", record["day"])
        summary = _summary(state, device, wrong_code)
        return scene.draft(summary, {"devices": table}, end, replacing if red else None)

    return family


def _summary(state: str, device: Mapping[str, str], wrong_code: bool) -> str:
    faults = {
        "the cable is out": device["cable"] == "out",
        "wireless is off": device["wireless"] == "off",
        "it is broken": device["broken"] == "yes",
        "it wants a restart": device["fresh"] == "no" and device["broken"] == "no",
        f"the desk has it {state}": state != "active",
        "the code is wrong": wrong_code,
    }
    return "a device: " + ", ".join(fault for fault, holds in faults.items() if holds)


DEVICES = Domain(
    name="devices",
    policy=POLICY,
    specs=(
        spec("get_device", "look up a device", "device"),
        spec("unlock", "unlock a device", "device", "code"),
        spec("replace", "send a new device", "device"),
        *COMMON,
    ),
    tools={"get_device": _get_device, "unlock": _unlock, "replace": _replace},
    families={
        "cable": _device_family(cable="out", fresh="yes"),
        "locked": _device_family("locked"),
        "broken": _device_family(broken="yes"),
        "wireless": _device_family(wireless="off", fresh="yes"),
        "restart": _device_family(),
        "blocked": _device_family("blocked"),
        "cable_restart": _device_family(cable="out"),
        "wrong_code": _device_family("locked", wrong_code=True),
        "cable_wireless": _device_family(cable="out", wireless="off", fresh="yes"),
        "wireless_locked": _device_family("locked", wireless="off"),
    },
    slots=("device", "lamp", "code"),
)
