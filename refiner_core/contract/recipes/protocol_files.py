"""Protocol files on the disk: shipped ones by name, others by path.

In: what a recipe or an override says in ``evaluate.protocols``. Out: what the files say, as JSON
texts (:mod:`refiner_core.contract.protocols`), with the files that they name as whole paths. A
configuration holds these texts, so what was meant stays known whatever becomes of the files.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.protocols import ProtocolFile, parse_protocol, protocol_of
from refiner_core.contract.recipes.file_fields import settled_files
from refiner_core.contract.yaml_words import yaml_reason

#: Package folder that holds shipped protocols.
PROTOCOL_PACKAGE = "flows.protocols"


def shipped_protocols() -> dict[str, Path]:
    """Names and files of the protocols that come with refiner."""
    folder = Path(str(resources.files(PROTOCOL_PACKAGE)))
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def load_protocol(name: str, folder: Path | None = None) -> ProtocolFile:
    """A shipped protocol, or a YAML file (relative to ``folder``, else to the current one).

    Raises
    ------
    ConfigurationError
        There is none, it cannot be read, or it says what no protocol can.
    """
    return _read(find_protocol(name, folder))


def find_protocol(name: str, folder: Path | None = None) -> Path:
    """The file of a protocol given by shipped name or path; errors as of :func:`load_protocol`."""
    shipped = shipped_protocols()
    if name in shipped:
        return shipped[name]
    given = Path(name).expanduser()
    for path in ((folder or Path.cwd()) / given, Path.cwd() / given):
        if path.is_file():
            return path.resolve()
    if "/" in name or given.suffix:
        raise ConfigurationError(
            f"There is no protocol file {name}.",
            expected="the path of a YAML file, relative to the file that names it, or a shipped "
            f"name: {', '.join(shipped)}",
            fix="check the path",
        )
    raise ConfigurationError(
        f"There is no protocol {name!r}.{suggest(name, shipped)}",
        expected=f"a shipped name ({', '.join(shipped)}) or the path of a YAML file",
        fix="name one of these; `refiner protocols list` says what they are",
    )


def description_of(path: Path) -> str:
    """What a protocol file says of itself."""
    return " ".join(str(_mapping(path).get("description") or "").split())


def embedded(value: Any, folder: Path) -> str:
    """One element of ``evaluate.protocols`` as JSON text: a name, a path, or what such a file
    says, as a mapping or as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return parse_protocol(value).text
    if isinstance(value, str):
        return load_protocol(value, folder).text
    if isinstance(value, dict):
        return _settled_protocol(value, folder, "").text
    raise ConfigurationError(
        f"`evaluate.protocols` has {value!r}.",
        expected="names of shipped protocols, or YAML files",
        fix="write e.g. evaluate.protocols='[held-out-greedy-v1]'",
    )


def _read(path: Path) -> ProtocolFile:
    protocol, shipped = (
        _settled_protocol(_mapping(path), path.parent, path.name),
        shipped_protocols(),
    )
    known = shipped.get(protocol.name)
    if known is not None and known != path and _read(known).text != protocol.text:
        raise ConfigurationError(
            f"Protocol {path} is called {protocol.name}, as a shipped one that measures otherwise.",
            expected="a name of its own: tables and cards show it",
            fix=f"change `name:`, e.g. to {protocol.name}-mine",
        )
    return protocol


def _mapping(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # yaml raises its own family; OSError for unreadable files
        raise ConfigurationError(
            f"Protocol {path} cannot be read: {yaml_reason(error, path)}.",
            expected="a YAML file in UTF-8",
            fix="correct the place named above",
        ) from error
    if not isinstance(values, dict) or not values:
        raise ConfigurationError(
            f"Protocol {path} holds no fields.",
            expected="`name:` and sections such as `judge:` with fields",
            fix="see `refiner protocols show held-out-greedy-v1` for the form",
        )
    return {str(key): value for key, value in values.items()}


def _settled_protocol(values: dict[str, Any], folder: Path, origin: str) -> ProtocolFile:
    """With whole paths of what lies beside the file."""
    from omegaconf import OmegaConf

    node = OmegaConf.create(values, flags={"allow_objects": True})
    plain = OmegaConf.to_container(settled_files(node, folder), resolve=False)
    assert isinstance(plain, dict)
    return protocol_of({str(k): v for k, v in plain.items()}, origin)
