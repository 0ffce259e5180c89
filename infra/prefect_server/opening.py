"""A link to the local server's pages that opens without asking for the key.

In: a server, and a path of its UI. Out: on a terminal, the address of a small page beside the UI's
own files, with the key in its fragment, which no server or log ever sees. The page puts the key
where the UI keeps it, takes it out of the address, and goes on to the path. Anywhere else (a file,
a pipe, JSON) the plain address.
"""

from __future__ import annotations

from pathlib import Path
from typing import TextIO
from urllib.parse import quote

from infra.prefect_server.server import UI, ServerInfo
from infra.store import atomic

_NAME = "open.html"
#: Prefect's UI takes the key from this place of its origin's storage.
_PAGE = """<!DOCTYPE html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<title>refiner</title>
<p>This page opens with the link that <code>refiner server</code> prints on a terminal.</p>
<script>
const said = location.hash.slice(1).split(",").map(decodeURIComponent);
history.replaceState(null, "", location.pathname);
const target = new URL(said[1] || "/", location.origin);
if (said[0] && target.origin === location.origin) {
  localStorage.setItem("prefect-password", btoa(said[0]));
  location.replace(target);
}
</script>
"""


def terminal_link(info: ServerInfo, path: str, stream: TextIO) -> str:
    """The address of a page of the UI, with the key only where ``stream`` is a terminal.

    Parameters
    ----------
    info
        The server.
    path
        Such as ``/runs/flow-run/ID``.
    stream
        Where the link will be printed.
    """
    folder = Path(info.home) / UI / "v1"
    if not (info.ours and info.auth and stream.isatty() and folder.is_dir()):
        return f"{info.url}{path}"
    page = folder / _NAME
    if not page.is_file() or page.read_text() != _PAGE:  # the server copies its files afresh
        atomic.write_text(page, _PAGE)
    return f"{info.url}/{_NAME}#{quote(info.auth, safe=':')},{quote(path)}"
