"""A bare git repository, written without git: loose objects, branches, tags, and LFS objects.

In: whole commits as ``{path: blob}``. Out: a folder that ``git clone`` and ``git fsck`` accept. It
takes no processes, so that a test can make thousands of requests in seconds. Large files are
pointers in git, and their bytes lie beside it under their SHA-256, which is checked as they come.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
_POINTED = re.compile(rb"version \S+\noid sha256:([0-9a-f]{64})\nsize (\d+)\n")
#: One author at one second: the same commits in the same order have the same ids.
_AUTHOR = "Loopback Hub <hub@localhost> 1700000000 +0000"


class Pointer(NamedTuple):
    """What an LFS pointer says: SHA-256 and size of the bytes."""

    sha256: str
    size: int


def git_oid(data: bytes, kind: str = "blob") -> str:
    """The id that git gives to an object."""
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data).hexdigest()


def pointer_text(sha256: str, size: int) -> bytes:
    """The blob that stands for a large file."""
    return _POINTER.format(sha256, size).encode()


class GitStore:
    """One bare repository at ``folder``, with one commit to begin with unless it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / "HEAD").exists():
            return
        for name in ("objects", "refs/heads", "refs/tags", "lfs"):
            (folder / name).mkdir(parents=True)
        (folder / "HEAD").write_text("ref: refs/heads/main\n")
        (folder / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = true\n")
        rules = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        self.set_ref("heads/main", self.commit({".gitattributes": self.blob(rules)}, None, "init"))

    # ------------------------------------------------------------------ objects
    def write(self, kind: str, data: bytes) -> str:
        """Store an object; its id."""
        oid = git_oid(data, kind)
        path = self.folder / "objects" / oid[:2] / oid[2:]
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(zlib.compress(b"%s %d\0" % (kind.encode(), len(data)) + data, 1))
        return oid

    def read(self, oid: str) -> bytes:
        """An object's content; KeyError if there is none."""
        path = self.folder / "objects" / oid[:2] / oid[2:]
        if not path.is_file():
            raise KeyError(oid)
        return zlib.decompress(path.read_bytes()).partition(b"\0")[2]

    def blob(self, data: bytes) -> str:
        """Store a file's content; its id."""
        return self.write("blob", data)

    def commit(self, files: Mapping[str, str], parent: str | None, message: str) -> str:
        """Store a commit of these files (path -> blob); its id. No branch moves."""
        lines = [f"tree {self._tree(files)}"]
        lines += [f"parent {parent}"] if parent else []
        lines += [f"author {_AUTHOR}", f"committer {_AUTHOR}", "", message, ""]
        return self.write("commit", "\n".join(lines).encode())

    def files(self, commit: str) -> dict[str, str]:
        """Path -> blob of a commit."""
        header = self.read(commit).split(b"\n", 1)[0]
        return dict(self._walk(header.decode().removeprefix("tree "), ""))

    def history(self, commit: str) -> list[tuple[str, str]]:
        """(id, message) of a commit and those before it, newest first."""
        found, at = [], commit
        while at:
            head, _, message = self.read(at).decode().partition("\n\n")
            found.append((at, message.rstrip("\n")))
            parents = re.findall(r"^parent (\w+)$", head, re.MULTILINE)
            at = parents[0] if parents else ""
        return found

    def _tree(self, files: Mapping[str, str]) -> str:
        entries: list[tuple[str, bytes]] = []
        below: dict[str, dict[str, str]] = {}
        for path, oid in files.items():
            first, _, rest = path.partition("/")
            if rest:
                below.setdefault(first, {})[rest] = oid
            else:
                entries.append((first, b"100644 %s\0" % first.encode() + bytes.fromhex(oid)))
        for name, inner in below.items():
            oid = bytes.fromhex(self._tree(inner))
            entries.append((name + "/", b"40000 %s\0" % name.encode() + oid))
        return self.write("tree", b"".join(data for _, data in sorted(entries)))

    def _walk(self, tree: str, prefix: str) -> Iterator[tuple[str, str]]:
        data = self.read(tree)
        while data:
            head, _, rest = data.partition(b"\0")
            mode, _, name = head.decode().partition(" ")
            oid, data = rest[:20].hex(), rest[20:]
            if mode == "40000":
                yield from self._walk(oid, f"{prefix}{name}/")
            else:
                yield prefix + name, oid

    # ------------------------------------------------------------------ names
    def refs(self, kind: str) -> dict[str, str]:
        """Name -> commit of the branches (``heads``) or tags (``tags``)."""
        folder = self.folder / "refs" / kind
        found = (p for p in sorted(folder.rglob("*")) if p.is_file())
        return {p.relative_to(folder).as_posix(): p.read_text().strip() for p in found}

    def set_ref(self, name: str, commit: str | None) -> None:
        """Point ``heads/…`` or ``tags/…`` at a commit; None removes it."""
        path = self.folder / "refs" / name
        if commit is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit + "\n")

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, tag or commit id names."""
        for kind in ("heads", "tags"):
            path = self.folder / "refs" / kind / revision
            if path.is_file():
                return path.read_text().strip()
        if re.fullmatch(r"[0-9a-f]{40}", revision):
            try:
                return revision if self.read(revision).startswith(b"tree ") else None
            except KeyError:
                return None
        return None

    # ------------------------------------------------------------------ large files
    def pointer(self, blob: str) -> Pointer | None:
        """What a blob points to, if it is a pointer."""
        match = _POINTED.fullmatch(self.read(blob))
        return Pointer(match.group(1).decode(), int(match.group(2))) if match else None

    def large(self, sha256: str) -> Path:
        """Where the bytes of a large file lie once they have come."""
        return self.folder / "lfs" / sha256

    def put_large(self, sha256: str, data: bytes) -> bool:
        """Take the bytes of a large file, if they are what they are said to be."""
        if hashlib.sha256(data).hexdigest() != sha256:
            return False
        self.large(sha256).write_bytes(data)
        return True

    def content(self, blob: str) -> bytes:
        """The bytes of a file, pointed to or not."""
        pointer = self.pointer(blob)
        return self.large(pointer.sha256).read_bytes() if pointer else self.read(blob)
