"""Many episodes at a time over one generator.

In: a generator, an environment, and which tasks with which seeds. Out: one
:class:`~refiner_core.contract.types.Completion` per episode, as each ends: all tokens after the
prompt, which of them are the model's own, its log-probabilities, and the episode's record.

How a turn runs: it is sampled up to ``</tool_call>`` and parsed
(:mod:`refiner_core.environments.turns`); its call is one ``step`` of the environment, in a thread,
while other episodes decode; what is said then is appended to the conversation
(:mod:`refiner_core.environments.conversation`), and the next turn may begin.

**Repair.** A turn that is no call is sampled once more, at temperature 0, *in the same context*:
the first attempt leaves no trace there, but stands in the record (``repaired``). So the context is
always what the tokens after it were conditioned on, a task does not depend on the wording of an
error message of ours, and every later turn sees the same form that demonstrations have. What it
costs: the model is not told what was wrong, and a greedy turn is no sample of the policy; its
log-probabilities are those at temperature 1. Who trains knows such turns by ``repaired``. Where the
second attempt is no call either, the *first* one's tokens stay as the model's own last turn: they
are the policy's own sample, and they are what failed. The episode ends (``no_call``, reward 0).

**Limits.** A turn may be as long as ``turn_tokens`` and the room that the context has. What tools
and user say goes in whole or not at all: where it does not fit the episode ends
(``context_limit``), as after ``max_turns`` (``turn_limit``). Such an episode is worth what the
environment says of it as it stands, and where that is no success its failure is ``limit``.

**Time.** ``turn_timeout_s`` and ``episode_timeout_s`` count the environment's own work, not the
model's, and not a wait for a thread. A tool that hangs is left to itself: its episode ends with an
error (``turn_timeout``), others go on, and it does not keep the process from ending. A user
simulator that fails is an error as well
(:class:`~refiner_core.environments.protocol.InfrastructureError`). Such episodes count as none, and
are no failures of the model. Any other exception of an environment is a bug of it and ends the
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from refiner_core.contract.checks.shaping import check_weights
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import Completion, Generator, TurnGenerator
from refiner_core.environments.play import EpisodeRequest, EpisodeSettings
from refiner_core.environments.protocol import Environment
from refiner_core.environments.turn_desk import EpisodeDesk
from refiner_core.generation.lockstep import turn_generator

__all__ = ["EpisodeRequest", "EpisodeSettings", "run_episodes", "settings_of"]


def settings_of(
    config: RecipeConfig,
    environment: Environment,
    *,
    temperature: float,
    top_p: float,
    top_k: int = 0,
) -> EpisodeSettings:
    """The settings of a recipe, with the sampling of whoever asks."""
    section = config.environment
    ordered = section.schedule == "ordered"
    if section.schedule == "auto":
        ordered = environment.deterministic
    return EpisodeSettings(
        max_turns=section.max_turns,
        repairs=section.repairs,
        turn_tokens=config.grpo.response_length,
        context_tokens=config.grpo.max_token_length,
        max_argument_bytes=section.max_argument_bytes,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        ordered=ordered,
        workers=section.workers,
        turn_timeout_s=section.turn_timeout_s,
        episode_timeout_s=section.episode_timeout_s,
        weights=partial(check_weights, section.shaping),
    )


def run_episodes(
    generator: Generator | TurnGenerator,
    environment: Environment,
    tokenizer: Any,
    requests: Sequence[EpisodeRequest],
    settings: EpisodeSettings,
    on_episode: Callable[[int, Completion], None],
    *,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Run all episodes, as many at a time as the generator takes.

    Parameters
    ----------
    generator
        Where it samples no turns of conversations, it is driven in lockstep.
    on_episode
        Called with the index of the request and its completion, in this thread, as each episode
        ends; what it raises ends the call. An episode whose first messages do not fit into the
        context has no tokens.
    should_stop
        Asked between turns.

    Raises
    ------
    ConfigurationError
        The prompt alone is as long as the context, or the tokenizer's template cannot be used.
    StageFailed
        The environment raised what it should not; names environment, task and turn.
    Interrupted
        ``should_stop`` said so.
    RefinerError
        Others that the environment raised (a judge's outage), and those of the generator.
    """
    if not requests:
        return
    _check(requests, settings)
    desk = EpisodeDesk(environment, tokenizer, requests, settings, on_episode, should_stop)
    try:
        turn_generator(generator).turns(desk)
        desk.drain()
    finally:
        desk.close()


def _check(requests: Sequence[EpisodeRequest], settings: EpisodeSettings) -> None:
    longest = max(requests, key=lambda request: len(request.prompt_ids))
    length = len(longest.prompt_ids)
    if length >= settings.context_tokens:
        raise ConfigurationError(
            f"Policy and tools of {longest.task.domain} take {length} tokens, and an episode may "
            f"have {settings.context_tokens} (grpo.max_token_length)",
            expected="room for messages and turns behind the policy",
            fix="raise grpo.max_token_length",
        )
    for name, value in (
        ("environment.max_turns", settings.max_turns),
        ("environment.workers", settings.workers),
        ("grpo.response_length", settings.turn_tokens),
    ):
        if value < 1:
            raise ConfigurationError(
                f"`{name}` is {value}", expected="1 or more", fix=f"raise {name}"
            )
