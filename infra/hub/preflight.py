"""Whether the Hub will take what a run publishes, asked before GPU hours are spent.

In: a recipe that publishes to the Hub. Out: warnings, or an error of ours for what is sure to fail:
no token, an expired one, one that may only read or not write to that owner, a name that is none or
taken, a public repository where weights are to stay private. A Hub that cannot be reached now is a
warning: it may be back when there is something to publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import HubOutage, HubRefused

if TYPE_CHECKING:
    from infra.hub.client import RepoInfo

#: Nobody waits for longer than this before a run.
_PATIENCE_S = 5.0
_WRITING = ("write", "admin", "contributor")


def check_hub(config: RecipeConfig) -> list[str]:
    """Ask the Hub whether the token may publish what the recipe names; two requests at most.

    Returns
    -------
    list of str
        What a person should know though it stops nothing.

    Raises
    ------
    ConfigurationError
        ``publish.repo_id`` is no name of a repository, or the name is taken.
    HubRefused
        The token or the repository will not do.
    """
    from infra.host.secrets import masked
    from infra.hub.client import open_hub
    from infra.hub.errors import in_our_words

    name = config.publish.repo_id
    known = {"recipe": config.recipe, "seed": config.seed}
    repo_id = name.format(step=1, fingerprint="0" * 8, **known)
    with in_our_words("checking the name of the repository", repo_id):
        _check_name(repo_id)
    try:
        with open_hub(repo_id, config.publish, patience_s=_PATIENCE_S) as hub:
            _check_token(hub.whoami(), repo_id)
            if "{step}" in name or "{fingerprint}" in name:
                return []  # which repository it will be is not known yet
            return _check_repository(hub.info(), repo_id, private=config.publish.private)
    except HubOutage as outage:
        return [masked(f"Whether the Hub takes {repo_id} is not known: {outage}")]


def _check_name(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo_id.count("/") != 1:
        raise HFValidationError("it must have an owner and a name")
    validate_repo_id(repo_id)


def _check_token(who: Mapping[str, Any], repo_id: str) -> None:
    owner, token = repo_id.partition("/")[0], (who.get("auth") or {}).get("accessToken") or {}
    roles = {str(o.get("name")): str(o.get("roleInOrg") or "") for o in who.get("orgs") or ()}
    if owner != who.get("name") and roles.get(owner) not in _WRITING:
        may = [str(who.get("name")), *(o for o, role in roles.items() if role in _WRITING)]
        raise HubRefused(
            f"The token of {who.get('name')} may not write to {owner} on the Hub.",
            expected=f"an owner that it may write to: {', '.join(sorted(may))}",
            fix="name one of them in publish.repo_id, or use another token (`hf auth login`, or "
            "HF_TOKEN)",
        )
    if token.get("role") == "read" or _scoped_elsewhere(token, owner, repo_id):
        raise HubRefused(
            f"The token of {who.get('name')} may not write to {repo_id} on the Hub.",
            expected="a token with write access to it",
            fix="make one (Settings, Access Tokens) and log in with `hf auth login`, or set "
            "HF_TOKEN where the publish stages run",
        )


def _scoped_elsewhere(token: Mapping[str, Any], owner: str, repo_id: str) -> bool:
    """Whether a fine-grained token lists what it may write to, and this is not among it."""
    scopes = (token.get("fineGrained") or {}).get("scoped")
    if token.get("role") != "fineGrained" or not scopes:
        return False
    written = {s["entity"].get("name") for s in scopes if "repo.write" in s.get("permissions", ())}
    return not written & {owner, repo_id}


def _check_repository(info: RepoInfo | None, repo_id: str, *, private: bool) -> list[str]:
    from infra.hub.target import check_strangers, check_visibility

    if info is None:
        return []
    check_visibility(repo_id, is_private=info.private, wanted=private)
    check_strangers(repo_id, info.names)
    if info.private and not private:
        return [f"{repo_id} is private on the Hub, though publish.private=false; it stays private."]
    return []
