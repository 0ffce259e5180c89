"""What is wrong with a card whatever it says: links, paths of machines, secrets, NaN, open blocks.

In: a :class:`Document`. Out: findings. Code is not read for links and paths, except for what is
cloned; secrets are looked for everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from refiner_core.cards.lint.findings import Finding, Severity
from refiner_core.cards.lint.markdown import Document, Paragraph, Table
from refiner_core.cards.printed import CONTROLS
from refiner_core.contract.checks.secrets import has_secret

_HOSTS = {
    "github.com": ("github",),
    "gitlab.com": ("gitlab",),
    "huggingface.co": ("hugging", "hf", "hub", "🤗"),
    "hf.co": ("hugging", "hf", "hub", "🤗"),
    "wandb.ai": ("wandb", "w&b", "weights"),
}
_BARE = re.compile(
    r"https?://(?:www\.)?(?P<host>github\.com|gitlab\.com|huggingface\.co|hf\.co|wandb\.ai)/?"
    r"(?![./:@-]*+[\w?#]|[./-]*+[<{$%\[])"
)
_EXAMPLE = re.compile(r"https?://(?:www\.)?example\.(?:com|org|net)\b[^\s)>\]]*")
_LINK = re.compile(
    r"(?<!\\)(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*+\])*+)\]\(\s*+(?P<to>[^()\s]*+)\s*+\)"
)
_NOWHERE = re.compile(r"(?i)^(?:links?|url|todo|tbd|xxx+|your[-_ ]?(?:link|url)|https?://)$")
_NOT_A_NUMBER = r"[-+]?\.?(?:nan|inf|infinity)(?![\w-])"
_IN_CELL = re.compile(
    rf"(?:^(?P<what>{_NOT_A_NUMBER})(?=\s*(?:$|%|±|,\s*n\s*=|[\[(]\s*(?:[-\d]|{_NOT_A_NUMBER})))"
    rf"|(?:[\d\])]|[\[(±,])\s*(?P<later>{_NOT_A_NUMBER})(?=\s*(?:$|[,\])%])))",
    re.IGNORECASE,
)
_IN_PROSE = (
    re.compile(rf"(?:[=≈±]|\+/-)[\s*_]*(?P<what>{_NOT_A_NUMBER})", re.IGNORECASE),
    re.compile(rf":[\s*_]*(?P<what>{_NOT_A_NUMBER})[\s*_.]*$", re.IGNORECASE | re.MULTILINE),
    re.compile(rf"\[\s*(?P<what>{_NOT_A_NUMBER})\s*,", re.IGNORECASE),
    re.compile(rf"\d\s*,\s*(?P<what>{_NOT_A_NUMBER})\s*\]", re.IGNORECASE),
)
#: Somebody's own; then what may be in a container, or what everybody has.
_OWN_PATH = re.compile(
    r"(?<![\w.:/-])(?:/(?:home|Users|scratch|gpfs|lustre|nfs)/"
    r"(?!(?:your|user|runner)[\w-]*)[\w.~-]+|[A-Z]:\\Users\\\w+)"
)
_FOLDER = re.compile(r"(?<![\w.:/-])(?:/(?:root|mnt|work|data)/[\w.~-]+|~/\w[\w.-]*|[A-Z]:\\\w+)")
_COMMON = re.compile(r"(?<![\w.:/-])(?:/(?:tmp|opt|var|home|Users)/[\w.~-]+|~/\.[\w.-]+)")


def text_findings(document: Document, *, is_ours: bool) -> Iterator[Finding]:
    """All findings that need no numbers. ``is_ours``: a card that refiner makes names no folder of
    a machine at all; elsewhere some are what everybody has."""
    for paragraph in document.paragraphs:
        yield from _links(paragraph)
        yield from _paths(paragraph, is_ours)
        for pattern in _IN_PROSE:
            for found in pattern.finditer(paragraph.without_code):
                yield _nan(paragraph.line_of(found.start("what")), found["what"])
    for table in document.tables:
        yield from _table(table, is_ours)
    for fence in document.fences:
        if not fence.closed:
            yield Finding(fence.line, "fence-open", "this code block is never closed", "add ```")
        for offset, line in enumerate(fence.lines, start=1):
            for found in _BARE.finditer(line) if "git clone" in line else ():
                yield _bare(fence.line + offset, found.group())
    yield from _secrets(document)
    yield from _controls(document)


def bare_links(text: str) -> list[str]:
    """Links to a host and nothing on it."""
    return [m.group() for m in _BARE.finditer(text)]


def _bare(line: int, link: str) -> Finding:
    return Finding(
        line,
        "bare-link",
        f"the link {link} leads nowhere in particular",
        "name the page that is meant, or take the link out",
    )


def _links(paragraph: Paragraph) -> Iterator[Finding]:
    text = paragraph.without_code
    links = [m for m in _LINK.finditer(paragraph.text) if text[m.start()] == m.group()[0]]
    named = {m.start("to"): m["text"] for m in links}
    for found in links:
        if not found["to"] or _NOWHERE.match(found["to"]):
            yield Finding(
                paragraph.line_of(found.start()),
                "bare-link",
                f"the link {found.group()} has no address",
                "name the page that is meant, or take the link out",
            )
    for found in _BARE.finditer(text):
        called = named.get(found.start(), "").lower()
        unreadable = bool(called) and not re.search(r"[a-z0-9]", called)
        if not unreadable and not any(word in called for word in _HOSTS[found["host"]]):
            yield _bare(paragraph.line_of(found.start()), found.group())
    for found in _EXAMPLE.finditer(text):
        yield _bare(paragraph.line_of(found.start()), found.group())


def _paths(paragraph: Paragraph, is_ours: bool) -> Iterator[Finding]:
    for offset, path, severity in _found_paths(paragraph.text, is_ours):
        yield _path(paragraph.line_of(offset), path, severity)


def _found_paths(text: str, is_ours: bool) -> Iterator[tuple[int, str, Severity]]:
    kinds: list[tuple[re.Pattern[str], Severity]] = [(_OWN_PATH, "error")]
    kinds += [(_FOLDER, "error"), (_COMMON, "error")] if is_ours else [(_FOLDER, "warning")]
    seen: set[int] = set()
    for pattern, severity in kinds:
        for found in pattern.finditer(text):
            if found.start() not in seen:
                seen.add(found.start())
                yield found.start(), found.group(), severity


def _path(line: int, path: str, severity: Severity) -> Finding:
    message = f"{path} is a path of some machine"
    return Finding(line, "machine-path", message, "name what others can get", severity)


def _nan(line: int, what: str) -> Finding:
    return Finding(
        line,
        "not-finite",
        f"{what!r} stands where a number should",
        "a number that was not computed is a dash",
    )


def _table(table: Table, is_ours: bool) -> Iterator[Finding]:
    for row in table.rows:
        for position, cell in enumerate(row.cells):
            found = _IN_CELL.search(cell.text) if position else None
            if found:
                yield _nan(row.line, found["what"] or found["later"])
            for _, path, severity in _found_paths(cell.text, is_ours):
                yield _path(row.line, path, severity)


def _secrets(document: Document) -> Iterator[Finding]:
    front = document.front.count("\n") + 3 if document.front is not None else 0
    for number, line in enumerate(document.text.split("\n"), start=1):
        if number > front and has_secret(line):
            yield Finding(
                number,
                "secret",
                "something looks like an access token or key",
                "take it out, and revoke it",
            )


def _controls(document: Document) -> Iterator[Finding]:
    for number, line in enumerate(document.text.split("\n"), start=1):
        if found := CONTROLS.search(line):
            yield Finding(
                number,
                "control-character",
                f"the character U+{ord(found.group()):04X} is shown by nobody: what a reader sees "
                "here is not what stands here",
                "take it out",
            )
