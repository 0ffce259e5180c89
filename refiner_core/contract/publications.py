"""Which checkpoints a recipe publishes, and the stages that this takes.

In: the `publish` section and the models of a recipe. Out: stages. For the last checkpoint:

    grpo ──> publish ─┬─> card
          └> evaluate ┘

and for each step before it (:func:`published_steps`), while training goes on:

    grpo @ step 50 ──> export-step50 ──┬─> publish-step50 ──────┬─> card-step50
                                       └─> evaluate-grpo-step50 ┘

``export`` waits for the *checkpoint* of that step, not for the end of training.
``evaluate`` stands for the evaluation under the recipe's own protocol and those under each of
``evaluate.protocols``: whatever is published is measured under all of them, for its card.
``card-progression`` writes the steps' numbers into the last card, once all are there. With
``publish.which=best`` every saved step is exported and evaluated, and one ``publish-best`` has them
all as inputs (``weights-step50``, ``evaluation-step50``, …, ``weights``, ``evaluation``).
"""

from __future__ import annotations

from typing import Protocol

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.placement import STAGES
from refiner_core.contract.protocols import without_protocol

#: Models whose checkpoints are ours to export, and so can be published before training ends.
STEPWISE: tuple[str, ...] = STAGES


class Adder(Protocol):
    """What adds stages to a plan; see :class:`refiner_core.contract.plan`."""

    config: RecipeConfig

    def reads_data(self, name: str) -> bool:
        """Whether a stage has the `data` stage as an input."""
        ...

    def add_publish(self, name: str, inputs: dict[str, str], model: str) -> str:
        """A `publish` stage."""
        ...

    def add_card(
        self, name: str, inputs: dict[str, str], model: str, after: tuple[str, ...] = ()
    ) -> str:
        """A `card` stage; those of ``after`` come first."""
        ...

    def add_export(self, name: str, policy: str, model: str, step: int) -> str:
        """An `export` stage of the checkpoint of ``step`` of stage ``policy``."""
        ...

    def add_evaluations(self, model: str, weights: str) -> dict[str, str]:
        """An `evaluate` stage under each protocol: role (``evaluation-grpo-step50``) -> name."""
        ...


def final_model(config: RecipeConfig) -> str:
    """The last model that a recipe makes: ``sft``, ``grpo``, ``command``; ``base`` for none."""
    made = [m for m in TRAINED if m in config.stages]
    return made[-1] if made else "base"


def published_steps(config: RecipeConfig) -> tuple[int, ...]:
    """Steps of the final model that are exported before its training ends, ascending.

    Raises
    ------
    ConfigurationError
        Nobody can tell them before the run, or there are none of them.
    """
    publish, model = config.publish, final_model(config)
    if "publish" not in config.stages or publish.which == "final":
        return ()
    if model not in STEPWISE:
        raise ConfigurationError(
            f"publish.which={publish.which}, but the last model is that of another trainer "
            f"(`{model}`), whose steps only it can export.",
            expected="publish.which=final",
            fix="drop publish.which; `refiner adopt` publishes a step of a run that has ended",
        )
    if publish.which == "listed":
        return _listed(config, model)
    if model != "grpo":
        raise ConfigurationError(
            f"publish.which={publish.which}, but how many steps `{model}` takes depends on its "
            "data.",
            expected="publish.which=listed with publish.steps, or publish.which=final",
            fix="set publish.which=listed publish.steps=[…] (see {model}.save_freq)",
        )
    return tuple(
        range(config.grpo.save_freq, config.grpo.num_training_steps, config.grpo.save_freq)
    )


def _listed(config: RecipeConfig, model: str) -> tuple[int, ...]:
    steps, section = config.publish.steps, getattr(config, model)
    wrong = [s for s in steps if s < 1 or s % section.save_freq]
    last = config.grpo.num_training_steps if model == "grpo" else None
    wrong = [s for s in wrong if s != last] + [s for s in steps if last is not None and s > last]
    if not steps or wrong or len(set(steps)) != len(steps):
        upto = f" up to {last}" if last is not None else ""
        raise ConfigurationError(
            f"publish.which=listed with publish.steps={list(steps)}.",
            expected=f"steps{upto} at which {model} saves (multiples of {model}.save_freq="
            f"{section.save_freq}), each once",
            fix="correct publish.steps",
        )
    return tuple(sorted(s for s in steps if s != last))


def publishes_final(config: RecipeConfig) -> bool:
    """Whether the last checkpoint is published as such."""
    publish = config.publish
    if "publish" not in config.stages or publish.which == "best":
        return False
    grpo = final_model(config) == "grpo"
    listed = grpo and config.grpo.num_training_steps in publish.steps
    return publish.which != "listed" or listed


def add_publications(adder: Adder, stage: str, roles: dict[str, str]) -> None:
    """Add what publishes the model of training stage ``stage``.

    ``roles`` maps ``evaluation-sft`` (``evaluation-sft@PROTOCOL``) to the names of `evaluate`
    stages, as far as there are any.
    """
    config, model = adder.config, final_model(adder.config)
    measured = config.publish.evaluate and "evaluate" in config.stages
    exports = {
        s: adder.add_export(f"export-step{s}", stage, model, s) for s in published_steps(config)
    }
    numbers = {
        s: adder.add_evaluations(f"{model}-step{s}", exported)
        for s, exported in exports.items()
        if measured
    }
    if config.publish.which == "best":
        _add_best(adder, stage, exports, numbers, roles)
        return
    others = {r: n for r, n in roles.items() if without_protocol(r) != f"evaluation-{model}"}
    for step, exported in exports.items():
        name = adder.add_publish(f"publish-step{step}", {"weights": exported}, model)
        if step in numbers:
            inputs = {"publish": name, **numbers[step], **others}
            adder.add_card(f"card-step{step}", inputs, model)
    if publishes_final(config):
        data = {"data": "data"} if adder.reads_data(stage) else {}
        adder.add_publish("publish", {"weights": stage, **data}, model)
        if roles:
            adder.add_card("card", {"publish": "publish", **roles}, model)
        if numbers:  # a stage of its own: a step that fails must not keep the numbers off the card
            steps = {role: name for of_step in numbers.values() for role, name in of_step.items()}
            after = ("card",) if roles else ()
            inputs = {"publish": "publish", **roles, **steps}
            adder.add_card("card-progression", inputs, model, after)


def _add_best(
    adder: Adder,
    stage: str,
    exports: dict[int, str],
    numbers: dict[int, dict[str, str]],
    roles: dict[str, str],
) -> None:
    model = final_model(adder.config)
    if f"evaluation-{model}" not in roles or len(numbers) != len(exports):
        raise ConfigurationError(
            "publish.which=best, but the checkpoints are not all evaluated.",
            expected=f"`evaluate` in `stages`, {model} in evaluate.models, publish.evaluate=true",
            fix="set these, or another publish.which",
        )
    inputs = {"weights": stage, "data": "data", **roles}
    inputs |= {f"weights-step{s}": name for s, name in exports.items()}
    for of_step in numbers.values():
        inputs |= of_step
    adder.add_publish("publish-best", inputs, model)
