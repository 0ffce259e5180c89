"""What the loopback Hub answers: accounts, repositories, LFS, commits, branches, tags, files.

In: a request (method, path, headers, body). Out: an :class:`Answer`. The routes and their JSON are
those that huggingface_hub 2.4 sends and reads.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs

import yaml

from tests.support.git_store import GitStore, pointer_text

_API = re.compile(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/([^/]+)(?:/(.*))?)?$")
_FILE = re.compile(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
_LFS = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/(batch|verify|part|done|put)(?:/(\w+))?$")


class Request(Protocol):
    """What a route reads of a request."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Account:
    """Whom a token belongs to, and what it may do."""

    name: str
    role: str = "write"
    expired: bool = False
    orgs: Mapping[str, str] = field(default_factory=dict)

    def may(self, owner: str, *, write: bool) -> bool:
        """Whether it may read or write what ``owner`` has."""
        if owner == self.name:
            return not write or self.role == "write"
        return owner in self.orgs and (not write or self.orgs[owner] in ("write", "admin"))


@dataclass
class Repo:
    """A repository and whether others see it."""

    git: GitStore
    private: bool


@dataclass
class Answer:
    """Status, headers and body of a response."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Answer:
        return cls(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    @classmethod
    def error(
        cls, status: int, says: str, code: str = "", headers: Mapping[str, str] | None = None
    ) -> Answer:
        found = {"Content-Type": "application/json", "X-Error-Message": says, **(headers or {})}
        found |= {"X-Error-Code": code} if code else {}
        return cls(status, json.dumps({"error": says}).encode(), found)


class Refused(Exception):
    """Ends a request with an answer."""

    def __init__(self, status: int, says: str, code: str = "") -> None:
        super().__init__(says)
        self.answer = Answer.error(status, says, code)


class HubApi:
    """The state of a Hub below ``root``, and its routes. One request at a time has an effect.

    ``multipart`` is the size of a part, for files that are larger than one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repos: dict[str, Repo] = {}
        self.quota: int | None = None
        self.multipart: int | None = None
        self._accounts: dict[str, Account] = {}
        self._parts: dict[tuple[str, int], bytes] = {}
        self._lock = threading.RLock()

    def account(self, token: str, name: str, **settings: Any) -> str:
        """Let ``token`` be one of ``name``; settings are those of :class:`Account`."""
        self._accounts[token] = Account(name, **settings)
        return token

    def create(self, repo_id: str, *, private: bool = True) -> GitStore:
        """A repository that is there already."""
        store = GitStore(self.root / f"{repo_id}.git")
        self.repos[repo_id] = Repo(store, private)
        return store

    def add(self, repo_id: str, files: dict[str, bytes], branch: str = "main") -> str:
        """A commit of another user on a branch of a repository; its id."""
        with self._lock:
            git = self.repos[repo_id].git
            head = git.refs("heads")[branch]
            blobs = {name: git.blob(data) for name, data in files.items()}
            commit = git.commit({**git.files(head), **blobs}, head, "by another user")
            git.set_ref(f"heads/{branch}", commit)
            return commit

    def answer(self, request: Request, base: str) -> Answer:
        """Let a request have its effect. ``base`` is the address that the client knows."""
        with self._lock:
            try:
                return self._route(request, base)
            except Refused as refused:
                return refused.answer

    def _route(self, request: Request, base: str) -> Answer:
        account = self._who(request)
        if request.path == "/api/whoami-v2":
            return self._whoami(account)
        if request.path == "/api/repos/create":
            return self._create(account, json.loads(request.body), base)
        if request.path == "/api/validate-yaml":
            return _validated(json.loads(request.body)["content"])
        if match := _LFS.match(request.path):
            repo_id, what, name = match.groups()
            return self._lfs(request, account, repo_id, what, name or "", base)
        if match := _FILE.match(request.path):
            repo_id, revision, path = match.groups()
            return self._file(request, self._repo(account, repo_id), revision, path)
        if match := _API.match(request.path):
            repo_id, what, rest = match.groups()
            repo = self._repo(account, repo_id, write=request.method != "GET" and what in _WRITES)
            route = _ROUTES.get((request.method, what or ""))
            if route:
                return route(self, request, repo_id, repo, rest or "")
        raise Refused(404, f"no such route: {request.method} {request.path}", "EntryNotFound")

    # ------------------------------------------------------------------ accounts and repositories
    def _who(self, request: Request) -> Account | None:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not token:
            return None
        account = self._accounts.get(token)
        if account is None or account.expired:
            says = "User Access Token is expired" if account else "Invalid username or password."
            raise Refused(401, says)
        return account

    def _repo(self, account: Account | None, repo_id: str, *, write: bool = False) -> Repo:
        repo, owner = self.repos.get(repo_id), repo_id.partition("/")[0]
        seen = repo and (not repo.private or (account and account.may(owner, write=False)))
        if repo is None or not seen:
            if account is None:
                raise Refused(401, "Invalid username or password.", "RepoNotFound")
            raise Refused(404, "Repository not found", "RepoNotFound")
        if write and account is None:
            raise Refused(401, "Invalid username or password.")
        if write and account and not account.may(owner, write=True):
            raise Refused(403, f"Forbidden: you need write access to {repo_id}")
        return repo

    def _whoami(self, account: Account | None) -> Answer:
        if account is None:
            raise Refused(401, "Invalid username or password.")
        orgs = [{"type": "org", "name": n, "roleInOrg": r} for n, r in account.orgs.items()]
        auth = {"type": "access_token", "accessToken": {"displayName": "t", "role": account.role}}
        return Answer.json({"type": "user", "name": account.name, "orgs": orgs, "auth": auth})

    def _create(self, account: Account | None, wanted: dict[str, Any], base: str) -> Answer:
        if account is None:
            raise Refused(401, "Invalid username or password.")
        owner = wanted.get("organization") or account.name
        repo_id = f"{owner}/{wanted['name']}"
        if not account.may(owner, write=True):
            raise Refused(
                403, f'You don\'t have the rights to create a model under the namespace "{owner}"'
            )
        if repo_id in self.repos:
            says = "You already created this model repo"
            return Answer.json({"error": says, "url": f"{base}/{repo_id}"}, 409)
        self.create(repo_id, private=wanted.get("visibility") == "private")
        return Answer.json({"url": f"{base}/{repo_id}", "name": repo_id})

    # ------------------------------------------------------------------ reading
    def _commit_of(self, repo: Repo, revision: str) -> str:
        commit = repo.git.resolve(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def _info(self, _: Request, repo_id: str, repo: Repo, rest: str) -> Answer:
        commit = self._commit_of(repo, rest or "main")
        siblings = [{"rfilename": name} for name in repo.git.files(commit)]
        seen = {"id": repo_id, "modelId": repo_id, "sha": commit, "private": repo.private}
        return Answer.json({**seen, "siblings": siblings, "tags": []})

    def _refs(self, _: Request, repo_id: str, repo: Repo, rest: str) -> Answer:
        found = {
            key: [
                {"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": c}
                for n, c in repo.git.refs(kind).items()
            ]
            for key, kind in (("branches", "heads"), ("tags", "tags"))
        }
        return Answer.json({**found, "converts": []})

    def _tree(self, _: Request, repo_id: str, repo: Repo, rest: str) -> Answer:
        revision, _, folder = rest.partition("/")
        files = repo.git.files(self._commit_of(repo, revision))
        entries = [self._entry(repo, p, b) for p, b in files.items() if p.startswith(folder)]
        if folder and not entries:
            raise Refused(404, f"{folder} does not exist", "EntryNotFound")
        return Answer.json(entries)

    def _entry(self, repo: Repo, path: str, blob: str) -> dict[str, Any]:
        pointer = repo.git.pointer(blob)
        if pointer is None:
            return {"type": "file", "path": path, "oid": blob, "size": len(repo.git.read(blob))}
        lfs = {"oid": pointer.sha256, "size": pointer.size, "pointerSize": 134}
        return {"type": "file", "path": path, "oid": blob, "size": pointer.size, "lfs": lfs}

    def _paths(self, request: Request, repo_id: str, repo: Repo, rest: str) -> Answer:
        files = repo.git.files(self._commit_of(repo, rest))
        body = request.body.decode()
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        return Answer.json([self._entry(repo, p, files[p]) for p in asked if p in files])

    def _file(self, request: Request, repo: Repo, revision: str, path: str) -> Answer:
        commit = self._commit_of(repo, revision)
        blob = repo.git.files(commit).get(path)
        if blob is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        pointer, data = repo.git.pointer(blob), repo.git.content(blob)
        etag = pointer.sha256 if pointer else blob
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        first = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if not first:
            headers["Content-Length"] = str(len(data))
            return Answer(200, data, headers)
        start, end = int(first[1]), int(first[2] or len(data) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        return Answer(206, data[start : end + 1], headers)

    # ------------------------------------------------------------------ writing
    def _preupload(self, request: Request, repo_id: str, repo: Repo, rest: str) -> Answer:
        files = repo.git.files(self._commit_of(repo, rest))
        answers = []
        for file in json.loads(request.body)["files"]:
            path, blob = file["path"], files.get(file["path"])
            pointer = repo.git.pointer(blob) if blob else None
            oid = (pointer.sha256 if pointer else blob) if blob else None
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return Answer.json({"files": answers})

    def _lfs(
        self, request: Request, account: Account | None, repo_id: str, what: str, name: str, at: str
    ) -> Answer:
        signed = what in ("part", "put", "done")  # a storage takes these, which knows no accounts
        repo = self.repos[repo_id] if signed else self._repo(account, repo_id, write=True)
        if what == "batch":
            objects = json.loads(request.body)["objects"]
            return Answer.json(self._batch(repo, repo_id, objects, at))
        if what == "part":
            number = int(parse_qs(request.query)["n"][0])
            self._parts[name, number] = request.body
            return Answer(200, headers={"ETag": f'"{number}"'})
        if what == "verify":
            stored = repo.git.large(json.loads(request.body)["oid"]).is_file()
            return Answer.json({}) if stored else Answer.error(404, "object not found")
        if what == "done":
            parts = json.loads(request.body)["parts"]
            data = b"".join(self._parts.get((name, p["partNumber"]), b"") for p in parts)
        else:
            data = request.body
        if not repo.git.put_large(name, data):
            raise Refused(400, "sha256 of the content does not match")
        return Answer.json({}) if what == "done" else Answer(200)

    def _batch(self, repo: Repo, repo_id: str, objects: list[Any], at: str) -> dict[str, Any]:
        new = [o for o in objects if not repo.git.large(o["oid"]).is_file()]
        used = sum(p.stat().st_size for p in (repo.git.folder / "lfs").iterdir())
        if self.quota is not None and used + sum(o["size"] for o in new) > self.quota:
            raise Refused(403, "Private repository storage limit reached, please upgrade your plan")
        base, answers = f"{at}/{repo_id}.git/info/lfs/objects", []
        for wanted in objects:
            oid, size = wanted["oid"], wanted["size"]
            answers.append({"oid": oid, "size": size})
            if wanted not in new:
                continue
            upload: dict[str, Any] = {"href": f"{base}/put/{oid}"}
            if self.multipart and size > self.multipart:
                count = -(-size // self.multipart)
                urls = {f"{n:05}": f"{base}/part/{oid}?n={n}" for n in range(1, count + 1)}
                upload = {"href": f"{base}/done/{oid}"}
                upload["header"] = {"chunk_size": str(self.multipart), **urls}
            answers[-1]["actions"] = {"upload": upload, "verify": {"href": f"{base}/verify"}}
        return {"transfer": "basic", "objects": answers}

    def _commit(self, request: Request, repo_id: str, repo: Repo, rest: str) -> Answer:
        head = repo.git.refs("heads").get(rest)
        if head is None:
            raise Refused(404, f"Invalid rev id: {rest}", "RevisionNotFound")
        lines = [json.loads(line) for line in request.body.splitlines()]
        header = next(i["value"] for i in lines if i["key"] == "header")
        if header.get("parentCommit", head) != head:
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        files = repo.git.files(head)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = repo.git.blob(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if not repo.git.large(value["oid"]).is_file():
                    raise Refused(400, f"LFS object {value['oid']} is not there")
                files[value["path"]] = repo.git.blob(pointer_text(value["oid"], value["size"]))
            elif line["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
        commit = repo.git.commit(files, head, header["summary"])
        repo.git.set_ref(f"heads/{rest}", commit)
        url = f"/{repo_id}/commit/{commit}"
        return Answer.json({"success": True, "commitOid": commit, "commitUrl": url})

    def _add_name(self, request: Request, _: str, repo: Repo, rest: str) -> Answer:
        wanted = json.loads(request.body)
        kind, name = ("tags", wanted["tag"]) if "tag" in wanted else ("heads", rest)
        start = rest if kind == "tags" else wanted.get("startingPoint", "main")
        if name in repo.git.refs(kind):
            raise Refused(409, f"Reference already exists: {name}")
        repo.git.set_ref(f"{kind}/{name}", self._commit_of(repo, start))
        return Answer.json({})

    def _drop_name(self, request: Request, _: str, repo: Repo, rest: str) -> Answer:
        kind = "tags" if "/tag/" in request.path else "heads"
        if rest not in repo.git.refs(kind):
            raise Refused(404, f"Reference does not exist: {rest}", "RevisionNotFound")
        repo.git.set_ref(f"{kind}/{rest}", None)
        return Answer.json({})


_Route = Callable[[HubApi, Request, str, Repo, str], Answer]
_WRITES = ("preupload", "commit", "tag", "branch")
_ROUTES: dict[tuple[str, str], _Route] = {
    ("GET", ""): HubApi._info,
    ("GET", "revision"): HubApi._info,
    ("GET", "refs"): HubApi._refs,
    ("GET", "tree"): HubApi._tree,
    ("POST", "paths-info"): HubApi._paths,
    ("POST", "preupload"): HubApi._preupload,
    ("POST", "commit"): HubApi._commit,
    ("POST", "tag"): HubApi._add_name,
    ("POST", "branch"): HubApi._add_name,
    ("DELETE", "tag"): HubApi._drop_name,
    ("DELETE", "branch"): HubApi._drop_name,
}


def _validated(card: str) -> Answer:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    try:
        known = yaml.safe_load(match.group(1)) if match else {}
    except yaml.YAMLError as error:
        return Answer.json({"errors": [{"message": str(error)}]}, 400)
    if not isinstance(known, dict):
        return Answer.json({"errors": [{"message": "metadata is not a mapping"}]}, 400)
    return Answer.json({"errors": [], "warnings": []})
