"""How to make a model again: the command, what it needs, and what it plans.

In: :class:`CardFacts`. Out: lines of the section "Reproduction". That the command plans to the
fingerprint has been checked by whoever collected the facts.
"""

from __future__ import annotations

from refiner_core.cards.facts import CardFacts
from refiner_core.contract.placement import STAGES


def reproduction_lines(facts: CardFacts) -> list[str]:
    """What the command needs, and how to see that it is the same."""
    lines = []
    version = (facts.provenance.get("packages") or {}).get("refiner")
    if version:
        commit = facts.provenance.get("commit")
        at = f" at commit `{commit}`" if commit else ""
        lines.append(f"It takes refiner {version}{at}.")
    if facts.recipe_file is not None:
        lines.append(
            f"`recipe.yaml` lies beside this card (SHA-256 `{facts.recipe_file}`); give the "
            "command in its folder."
        )
    lines += [
        f"It reads `{name}` from the folder that it is given in (SHA-256 `{digest}`)."
        for name, digest in sorted(facts.sources.items())
    ]
    if facts.fingerprint:
        lines.append(
            f"With `--dry-run` it shows the fingerprint of the stage `{facts.stage}`, "
            f"`{facts.fingerprint}`: the same one means the same training."
        )
    if facts.stage in STAGES and not facts.final:
        save = getattr(facts.config, facts.stage).save_freq
        lines.append(
            f"It trains to the end of the run; step {facts.step} is a checkpoint that it saves on "
            f"the way (every {save} steps)."
        )
    return lines
