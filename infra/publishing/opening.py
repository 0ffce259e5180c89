"""From a recipe to the target that it publishes to."""

from __future__ import annotations

from pathlib import Path

from infra.publishing.folder import FolderTarget
from infra.publishing.targets import Target
from refiner_core.contract.config import RecipeConfig


def make_target(config: RecipeConfig, published: Path) -> Target:
    """The target that a recipe names; ``published`` is the workspace's own folder for it."""
    if config.publish.target == "hub":
        from infra.hub.target import HubTarget  # the Hub client only where it is used

        return HubTarget(config.publish)
    path = config.publish.path
    root = Path(path).expanduser().absolute() if path else published
    return FolderTarget(root, config.publish)
