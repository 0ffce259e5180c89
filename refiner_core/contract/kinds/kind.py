"""Description of a kind of stage, for planner, forecast, cards and worker.

In: nothing. Out: :class:`Kind`, instantiated by each module beside this one. The work of a kind is
the function named in :attr:`Kind.run`, in ``flows/stages``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from refiner_core.contract.config import RecipeConfig

#: Fields that determine how a text becomes tokens.
TOKENIZER = (
    "model.name_or_path",
    "model.revision",
    "model.tokenizer_name_or_path",
    "model.chat_template",
)
#: Fields of the environment that determine its tasks and demonstrations.
ENVIRONMENT_DATA = tuple(
    f"environment.{name}"
    for name in (
        "name",
        "domains",
        "train_split",
        "test_split",
        "tasks",
        "max_train_tasks",
        "demonstrations",
        "flawed_demonstrations",
        "max_argument_bytes",  # longer calls are refused, in demonstrations too
    )
)
#: Fields of the environment that determine an agent's episodes and their score.
ENVIRONMENT_EVALUATED = tuple(
    f"environment.{name}"
    for name in (
        "name",
        "max_turns",
        "repairs",
        "max_argument_bytes",
        "nl_assertions",
        "schedule",
        "shaping.weights",
        "shaping.weights_by_domain",
    )
)
#: The change of version 2, in all kinds that reward answers.
REWARDS_2 = "a claim counts once in the citation reward, however often an answer repeats it"
#: Sources of a kind with rewarded samples.
REWARDED_SOURCES = ("model", "rubrics", "judge_prompt", "environment")
#: Sources on a Hub for a kind that runs the model.
MODEL_READS = ("model", "tokenizer")


class CardWords(NamedTuple):
    """Wording of a card about a model of one kind of stage.

    Attributes
    ----------
    algorithm, short
        Its name in full, and in the card's title.
    tags
        Tags of the card's metadata.
    made, made_by_agents
        How it was made, after "… is BASE"; the second if the model is an agent.
    sections
        Sections of the configuration that shaped the model.
    silent
        Fields (prefixes) that do not describe it.
    data_sets
        Data sets in its metadata, in addition to those of earlier stages: ``sft``, ``rl``.
    """

    algorithm: str
    short: str
    tags: tuple[str, ...]
    made: str = ""
    made_by_agents: str = ""
    sections: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    data_sets: tuple[str, ...] = ("sft",)


class Reads(NamedTuple):
    """Dependencies of a stage: identity fields (dotted prefixes), and names of sources."""

    fields: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of stage.

    Attributes
    ----------
    name, order
        Name of its stages, and its place in the order of work.
    run
        ``MODULE:FUNCTION`` of its work: takes a
        :class:`flows.stages.work.StageWork`, returns a JSON-ready report.
    section
        Section of a recipe that has its ``resources``; by default its own name.
    part_of
        The entry of ``stages`` that includes it, if it has none of its own.
    version, version_of_agents, changes
        Raise the version when the same configuration would now give another result, and describe
        the difference in ``changes``. The second: in recipes with an environment, whose tasks and
        rewards are its own.
    fields, sources
        The identity fields (dotted prefixes) and sources that it depends on; inputs add the rest by
        their fingerprints.
    reads
        Both, if they depend on the recipe and on the roles of the stage's inputs.
    hub_reads
        Sources that it reads from the Hub's cache; `fetch` downloads them.
    trains
        What it trains a model with: ``demonstrations`` or ``rewards``, here or ``elsewhere``; empty
        for a kind that makes no model. The model has the kind's name.
    learns_from
        The kind whose output it trains on.
    inputs
        Stages that fill its roles, for a kind that makes a model: takes the recipe and the newest
        model's stage (empty: the base), returns names by role.
    asks_judge
        Whether its samples are judged.
    on_prompts
        Whether it needs prompts with rubrics.
    samples_with
        Section with its sampling settings; empty for a kind that samples nothing.
    needs_network
        Whether a stage of it needs a network, by the recipe.
    shown_where_used
        Whether its section is only part of the evidence of models that it contributed to.
    label
        Label of its model in tables.
    card
        Wording of cards about its model.
    """

    name: str
    order: int
    run: str
    section: str = ""
    part_of: str = ""
    version: int = 1
    version_of_agents: int | None = None
    changes: Mapping[int, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    reads: Callable[[Kind, RecipeConfig, Mapping[str, str]], Reads] = lambda kind, config, inputs: (
        Reads(kind.fields, kind.sources)
    )
    hub_reads: tuple[str, ...] = ()
    trains: Literal["", "demonstrations", "rewards", "elsewhere"] = ""
    learns_from: str = "data"
    inputs: Callable[[RecipeConfig, str], dict[str, str]] = lambda config, newest: (
        {"data": "data", "policy": newest} if newest else {"data": "data"}
    )
    asks_judge: bool = False
    on_prompts: bool = False
    samples_with: str = ""
    needs_network: Callable[[RecipeConfig], bool] = lambda config: False
    shown_where_used: bool = False
    label: str = ""
    card: CardWords | None = None

    def __post_init__(self) -> None:
        if not self.section:
            object.__setattr__(self, "section", self.name)

    @property
    def entry(self) -> str:
        """The entry of ``stages`` that includes it."""
        return self.part_of or self.name
