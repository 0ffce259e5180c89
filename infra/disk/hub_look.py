"""What a Hub says that a commit holds, asked right before a local copy of it is deleted.

In: an endpoint, a repository, a commit. Out: size and SHA-256 of its large files by name. It is
asked in the middle of a trainer's save, so every answer has to come within seconds and nothing is
tried twice. Our token goes to the Hub that this process is set up for and to no other address.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

_TIMEOUT_S = 10.0
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')


def files_at(endpoint: str, repo_id: str, commit: str) -> dict[str, tuple[int, str]]:
    """Name -> (bytes, SHA-256) of the files that the Hub keeps by hash (LFS), weights among them.

    Raises
    ------
    OSError
        It cannot be asked, or does not tell; the text says why.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set, so the network is not used")
    own = endpoint.rstrip("/") == constants.ENDPOINT.rstrip("/")
    token = get_token() if own else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    base = f"{endpoint}/api/models/{repo_id}/tree/{quote(commit, safe='')}?recursive=true"
    found: dict[str, tuple[int, str]] = {}
    url: str | None = base
    while url is not None:
        entries, after = _page(url, headers)
        for entry in entries:
            if lfs := entry.get("lfs"):
                found[entry["path"]] = (int(lfs["size"]), str(lfs["oid"]))
        url = after if after is None or after.startswith(endpoint) else None
    return found


def _page(url: str, headers: dict[str, str]) -> tuple[list[dict[str, Any]], str | None]:
    request = urllib.request.Request(url)
    for name, value in headers.items():
        request.add_unredirected_header(name, value)  # a redirect never takes the token elsewhere
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            entries = json.loads(answer.read())
            after = _NEXT.search(answer.headers.get("Link") or "")
    except urllib.error.HTTPError as error:
        raise OSError(f"it answers {error.code} {error.reason}") from error
    except ValueError as error:
        raise OSError(f"its answer cannot be read ({error})") from error
    return entries, after[1] if after else None
