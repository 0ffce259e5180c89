"""Section `publish`: which checkpoints are published where, and with what card."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.marks import STRICT, added, execution, identity, section
from refiner_core.contract.sections.steering import Resources


@dataclass(frozen=True, config=STRICT)
class PublishConfig:
    """Which checkpoints are published where, and with what card.

    `which`, `steps` and `evaluate` determine which publications exist, not their definitions, so
    they invalidate no existing publication.
    """

    target: Literal["folder", "hub"] = identity("folder", doc="a folder in Hub layout, or the Hub")
    path: str | None = identity(None, doc="folder target; default: WORKSPACE/published")
    repo_id: str = identity(
        "refiner/{recipe}-seed{seed}-{fingerprint}",
        doc="repository, OWNER/NAME on the Hub; may use {recipe}, {seed}, {step} and {fingerprint} "
        "(of the weights)",
    )
    which: Literal["final", "every-save", "best", "listed"] = added(
        "final",
        doc="checkpoints to publish: the last, every saved one, the best by an evaluation, or "
        "`steps`; all but the last during training",
    )
    steps: tuple[int, ...] = added((), doc="with which=listed: the steps")
    evaluate: bool = added(True, doc="evaluate each published step for its card")
    best_metric: str = added("reward", doc="with which=best: the metric that decides")
    best_decoding: Literal["greedy", "sampled"] = added(
        "greedy", doc="with which=best: the decoding of that metric"
    )
    per_step: Literal["tag", "branch", "repository"] = added(
        "tag",
        doc="how steps share a repository: `tag` (main moves forward, each step has a tag), "
        "`branch` (each step has one), `repository` (each has its own: {step} in repo_id)",
    )
    replace: bool = execution(False, doc="replace another run's weights in the same repository")
    malformed: bool = execution(
        False, doc="publish a trained model even if none of its answers was well formed"
    )
    private: bool = identity(True, doc="Hub only: create the repository private")
    license: str = identity("apache-2.0", doc="licence in the card's front matter")
    files: tuple[str, ...] = added(
        (),
        doc="patterns of the exported files to publish (README.md always is); none: all that a "
        "model needs",
    )
    card_template: str | None = added(
        None,
        doc="a Jinja file to make the card from, stored in refiner.json; default: the shipped one",
    )
    request_timeout_s: float = execution(60.0, doc="Hub only: deadline of one small request")
    patience_s: float = execution(
        300.0, doc="Hub only: limit of waiting for rate limits and outages in one attempt, seconds"
    )
    price_per_gpu_hour: float | None = execution(
        None, doc="price of a GPU-hour, for the card's cost; none: GPU-hours alone"
    )
    currency: str = execution("USD", doc="currency of `price_per_gpu_hour`")
    resources: Resources = section(Resources, doc="resources of the publish job")


#: Licences known to the Hub; it refuses a card with another one. A licence that is not listed is
#: ``other``, with its text in the card (``publish.card_template``).
_OF_THE_HUB = (
    "apache-2.0 mit afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear "
    "ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 isc "
    "lgpl lgpl-2.1 lgpl-3.0 lgpl-lr lppl-1.3c ms-pl mpl-2.0 ncsa ofl-1.1 openmdw-1.0 osl-3.0 "
    "postgresql unlicense wtfpl zlib "
    "cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 "
    "cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 "
    "cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 "
    "c-uda cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 odc-by odbl pddl "
    "openrail openrail++ bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 "
    "bigcode-openrail-m apple-ascl apple-amlr deepfloyd-if-license "
    "fair-noncommercial-research-license h-research intel-research gemma grok2-community llama2 "
    "llama3 llama3.1 llama3.2 llama3.3 llama4 unknown other"
)


LICENSES = frozenset(_OF_THE_HUB.split())
