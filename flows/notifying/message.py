"""A message about a run or a sweep: what has happened, why, and what to type next. Pure.

In: plain values. Out: a :class:`Message` of bounded size, and the parcel that goes out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from flows.notifying.channels import Parcel
from infra.host.secrets import masked
from infra.store.layout import call_title, is_sweep

MESSAGE_VERSION = 1
Kind = Literal["finished", "failed", "paused", "resumed", "stopped", "test"]
#: Longest title, text, and any other field, in characters: chat servers cut at about 4000.
_TITLE, _TEXT, _FIELD = 200, 2400, 600
_CUT = " …"


@dataclass(frozen=True)
class Message:
    """What somebody is told.

    Attributes
    ----------
    key
        Names what has happened: it is told once.
    kind, title, text
        In one word, in a line, in a few lines.
    call
        Id of the run; of a sweep ``sweep:NAME``.
    recipe
        Of the run or sweep.
    stage
        Which stages (or which trial) it is about; empty where it is about all.
    cause
        A failure class, or why nothing goes on; empty where all is well.
    workspace, next
        Its folder, and the command that makes sense now.
    host
        Where the orchestrator works.
    """

    key: str
    kind: Kind
    title: str
    text: str
    call: str
    recipe: str
    workspace: str
    next: str
    stage: str = ""
    cause: str = ""
    host: str = ""

    def bounded(self) -> Message:
        """The same, without credentials, cut where it is too long for a chat server."""
        return Message(
            key=self.key,
            kind=self.kind,
            title=_cut(masked(" ".join(self.title.split())), _TITLE),
            text=_cut(masked(self.text), _TEXT),
            call=self.call,
            recipe=_cut(self.recipe, _FIELD),
            workspace=_cut(self.workspace, _FIELD),
            next=_cut(self.next, _FIELD),
            stage=_cut(self.stage, _FIELD),
            cause=_cut(self.cause, _FIELD),
            host=_cut(self.host, _FIELD),
        )

    def json(self) -> dict[str, Any]:
        """All of it, as it is recorded and sent."""
        name = call_title(self.call).partition(" ")[2]
        sweep = is_sweep(self.call)
        return {
            "version": MESSAGE_VERSION,
            **asdict(self),
            "run": "" if sweep else name,
            "sweep": name if sweep else "",
        }

    @property
    def text_of_all(self) -> str:
        """The text with what to do next, for who reads nothing else."""
        return f"{self.text}\nNext: {self.next}" if self.next else self.text


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT


def message_of(value: dict[str, Any]) -> Message:
    """The message that was recorded."""
    return Message(**{name: value[name] for name in Message.__dataclass_fields__ if name in value})


_VARIABLES = (
    *("title", "text", "kind", "run", "sweep", "recipe", "stage", "cause"),
    *("workspace", "next", "host"),
)
_LABELS = ("kind", "recipe", "stage", "cause", "workspace")


def parcel_of(message: Message) -> Parcel:
    """As channels need it: ``REFINER_TITLE``, … for a command; ``refiner.run.KIND`` on
    ``refiner.run.RUN`` for Prefect (of a sweep ``refiner.sweep.…``)."""
    body = {**message.json(), "text": message.text_of_all}
    what = "sweep" if is_sweep(message.call) else "run"
    return Parcel(
        body=body,
        variables={f"REFINER_{n.upper()}": str(body[n]) for n in _VARIABLES},
        event=f"refiner.{what}.{message.kind}",
        labels={
            "prefect.resource.id": f"refiner.{what}.{body[what]}",
            "prefect.resource.name": message.title,
            **{f"refiner.{n}": str(body[n]) for n in _LABELS},
        },
    )
