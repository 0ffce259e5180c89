"""Shared parts of all report pages: colours, script, security policy, formatting of values.

In: the package of a page, with its ``page.html.jinja``, ``page.css`` and ``page.js``. Out: its
parts, with ``base.css``, ``base.js`` and ``charts.js`` prepended, and the chart library if it has
charts. A content security policy allows only these scripts, by hash. Templates escape everything,
replace characters that cannot be encoded, and may import macros of this package.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from refiner_core.contract.records import mapped, to_json
from refiner_core.report import drawing, printing
from refiner_core.report.drawing import library

_HERE = "refiner_core.report"
#: Limits on characters of a value, and on values of one list or mapping.
MOST_OF_LEAF, MOST_IN_TREE = 2_000, 300
#: Script of a page that only hides, navigates and remembers.
_BEGIN = "reportPage().begin();"


def parts_of(package: str, *, charts: bool, script: str | None = None) -> Mapping[str, Any]:
    """The parts of a package's page: ``template``, ``style``, ``scripts``, and ``policy``, its
    content security policy. Only a page with ``charts`` includes their library; one without a
    ``script`` of its own has the shared script."""
    names = ("base.js", "charts.js") if charts else ("base.js",)
    own = _BEGIN if script is None else read(package, script)
    whole = Markup("".join([*(read(_HERE, name) for name in names), own]))
    scripts = [library(), whole] if charts else [whole]
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"img-src data:; script-src {' '.join(map(_hash_of, scripts))}"
    )
    return {
        "template": template_of(package, "page.html.jinja"),
        "style": Markup(_base_style() + read(package, "page.css")),
        "scripts": scripts,
        "policy": policy,
    }


@lru_cache
def _hash_of(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@lru_cache
def _base_style() -> str:
    """The style sheet of all pages: dark if the reader's system is, or by choice
    (``data-scheme`` of the root)."""
    light, dark = read(_HERE, "light.css"), read(_HERE, "dark.css")
    return (
        f":root{{{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-scheme=light]){{{dark}}}}}"
        f"\n@media screen{{:root[data-scheme=dark]{{color-scheme:dark;{dark}}}"
        ":root[data-scheme=light]{color-scheme:light}}\n" + read(_HERE, "base.css")
    )


@lru_cache
def read(package: str, name: str) -> str:
    """A file of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


@lru_cache
def template_of(package: str, name: str) -> Template:
    """A template of a package. Inserted values are escaped; in ``*.md.jinja`` for Markdown: texts
    of people and policies start no table, link, tag or mention. In ``*.txt.jinja`` they are made
    safe for terminals."""
    return _environment(name.split(".")[-2]).from_string(read(package, name))


@lru_cache
def _environment(kind: str) -> Environment:
    shown = printing.escaped if kind == "md" else printing.plain
    environment = Environment(
        autoescape=kind not in ("md", "txt"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: shown(value) if type(value) is str else value,
        loader=FunctionLoader(lambda name: read(_HERE, name)),
    )
    environment.globals.update(p=printing, d=drawing, leaf=leaf, most_in_tree=MOST_IN_TREE)
    environment.globals["table"] = _table
    environment.filters["code"] = _code
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    return Markup(printing.table(header, rows))


def _code(text: str) -> Markup:
    return Markup(printing.plain(text).replace("`", "'").replace("\n", " "))


def values(report: Any) -> dict[str, Any]:
    """A whole report as JSON values, its version first, without unencodable values."""
    return dict(mapped(to_json(report), _clean))


def json_text(report: Any) -> str:
    """``report.json``."""
    return json.dumps(values(report), ensure_ascii=False, allow_nan=False) + "\n"


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else printing.whole(value)
    return printing.finite(value) if isinstance(value, float) else value


def leaf(value: Any) -> str:
    """A leaf value in words; the middle of a long one is left out."""
    if value is None or value == "" or value == {} or value == []:
        return printing.MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return printing.MISSING if printing.finite(value) is None else f"{value:.6g}"
    text = str(value)
    if (more := len(text) - MOST_OF_LEAF) > 0:
        half = MOST_OF_LEAF // 2
        text = f"{text[:half]} … ({printing.count(more)} characters more) … {text[-half:]}"
    return printing.plain(text)
