"""Description of a kind of stage, for planner, forecast, cards and worker.

In: nothing. Out: :class:`Kind`, of which each module beside this one makes one. What a kind does is
in the function that :attr:`Kind.run` names, in ``flows/stages``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from refiner_core.contract.config import RecipeConfig

#: Fields that decide how a text becomes tokens.
TOKENIZER = (
    "model.name_or_path",
    "model.revision",
    "model.tokenizer_name_or_path",
    "model.chat_template",
)
#: Of the environment, what decides which tasks and demonstrations there are.
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
        "max_argument_bytes",  # a longer call is none, in demonstrations too
    )
)
#: Of the environment, what decides how an agent's episodes go and what they are worth.
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
#: What a change of version 2 was about, in all kinds that reward answers.
REWARDS_2 = "a claim counts once in the citation reward, however often an answer repeats it"
#: Sources of a kind whose samples are rewarded.
REWARDED_SOURCES = ("model", "rubrics", "judge_prompt", "environment")
#: What a kind that runs the model reads of a Hub.
MODEL_READS = ("model", "tokenizer")


class CardWords(NamedTuple):
    """Wording of a card about a model of one kind of stage.

    Attributes
    ----------
    algorithm, short
        Its name in full, and in the card's title.
    tags
        Of the card's metadata.
    made, made_by_agents
        How it was made, after "… is BASE"; the second, where the model is an agent.
    sections
        Sections of the configuration that shaped the model.
    silent
        Fields (prefixes) that say nothing about it.
    data_sets
        Which data sets its metadata name, beside those of stages before it: ``sft``, ``rl``.
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
        What stages of it are called, and its place in the order of work.
    run
        ``MODULE:FUNCTION`` of what carries it out: takes a
        :class:`flows.stages.work.StageWork`, returns a JSON-ready report.
    section
        Section of a recipe that has its ``resources``; its own name where nothing else is said.
    part_of
        The entry of ``stages`` that brings it along, where it has none of its own.
    version, version_of_agents, changes
        Raise the version when the same configuration would now give another result, and say in
        ``changes`` what is different. The second: in recipes with an environment, whose tasks and
        rewards are its own.
    fields, sources
        Which identity fields (dotted prefixes) and sources it depends on; inputs add the rest by
        their fingerprints.
    reads
        Both, where they depend on the recipe and on the roles of the stage's inputs.
    hub_reads
        Sources that it reads from the Hub's cache; `fetch` brings them there.
    trains
        What it trains a model with: ``demonstrations`` or ``rewards``, here or ``elsewhere``; empty
        for a kind that makes no model. The model bears the kind's name.
    learns_from
        The kind whose output it trains on.
    inputs
        Stages that fill its roles, of a kind that makes a model: takes the recipe and the newest
        model's stage (empty: the base), returns names by role.
    asks_judge
        Whether its samples are judged.
    on_prompts
        Whether it needs prompts with rubrics.
    samples_with
        Section that says how it samples; empty for a kind that samples nothing.
    needs_network
        Whether a stage of it needs a network, by the recipe.
    shown_where_used
        Whether its section stands in the evidence of models alone that it had a part in.
    label
        Of its model in tables.
    card
        What cards say of its model.
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
        """The entry of ``stages`` that it comes with."""
        return self.part_of or self.name

    def version_for(self, *, agents: bool) -> int:
        """Its version; ``agents``: in a recipe with an environment."""
        own = self.version_of_agents
        return own if agents and own is not None else self.version
