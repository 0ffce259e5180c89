"""Evaluate an agent: held-out tasks through it and their environment, attempt by attempt.

In: the configuration, the data stage's folder, a model. Out: samples files with one row per attempt
(:mod:`.attempts`) and ``results.json``, as of answers (:mod:`.run`): pass@k, pass^k and the rest
with intervals, by domain and overall, under a protocol that names the environment and its user.

The seed of an attempt derives from the protocol's seed, the decoding, the task and the attempt's
number: every model meets the same users and the same random numbers, and arms pair up. Greedy
decoding makes one attempt at a task, the sampled one ``evaluate.num_samples``.

What is done survives. In a deterministic environment work is cut into units of whole tasks, one
generation batch each, which are kept whole: half a unit would be finished in other company, its
sums taken in another order, and numbers would depend on when somebody pulled a plug. In one that is
not (a user at an endpoint), attempts are long, cost money and repeat nothing anyway: all of a
decoding's are begun as places become free, and each that has finished is kept.

An attempt that the infrastructure ended is none: it is left out and counted. Past
``environment.max_error_share`` of a decoding's attempts the evaluation stops; those that had errors
are then tried again when it goes on. Beside the model stands
:class:`~refiner_core.evaluation.attempts.DoNothing`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from refiner_core.batches import BatchWork
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.types import (
    Completion,
    Generator,
    Judge,
    RewardResult,
    StageIO,
    TurnGenerator,
)
from refiner_core.data.prepared import load_prompts
from refiner_core.environments.episodes import settings_of
from refiner_core.environments.protocol import (
    Environment,
    domain_of_id,
    over_domains,
)
from refiner_core.environments.registry import open_environment
from refiner_core.environments.scoring import require_episode_errors
from refiner_core.evaluation.attempts import (
    DO_NOTHING,
    TEXTS,
    DoNothing,
    attempt_row,
    domains_of,
    episodes_told,
    users_told,
    with_tasks,
)
from refiner_core.evaluation.metrics import episode_metrics
from refiner_core.evaluation.protocol import episode_protocol, sampling_params
from refiner_core.evaluation.results import Measured, write_results
from refiner_core.evaluation.run import (
    FOLDER,
    Unit,
    asked,
    key_of_row,
    open_generator,
    rows_of,
    units_of,
)
from refiner_core.generation.reporting import BatchReporter
from refiner_core.samples import Wanted, sample_episodes

_Row = dict[str, Any]


def _by_domain(wanted: Sequence[Wanted]) -> dict[str, list[Wanted]]:
    found: dict[str, list[Wanted]] = {}
    for one in wanted:
        found.setdefault(domain_of_id(one.prompt.sample_id), []).append(one)
    return found


def evaluate_episodes(
    config: RecipeConfig,
    *,
    data_dir: Path,
    data_digest: str,
    model_ref: str,
    model_name: str,
    output_dir: Path,
    io: StageIO,
    judge: Judge | None = None,
    generator: Generator | TurnGenerator | None = None,
    tokenizer: Any = None,
    environment: Environment | None = None,
    protocol_file: str = "",
) -> dict[str, Any]:
    """Measure an agent under every configured decoding.

    Parameters are those of :func:`refiner_core.evaluation.run.evaluate_model`; ``judge`` is asked
    only where ``environment.nl_assertions`` says so. ``environment`` is opened from the
    configuration where it is not given.

    Returns
    -------
    dict
        The content of ``results.json`` (:mod:`refiner_core.evaluation.results`).

    Raises
    ------
    DataError
        If there are no held-out tasks.
    Interrupted
        If asked to stop; what has finished is kept (see the module).
    EnvironmentOutage
        The infrastructure ended more than ``environment.max_error_share`` of the attempts.
    """
    found = load_prompts(data_dir / "rl_test.parquet")
    tasks = over_domains(found, config.evaluate.max_prompts)
    if not tasks:
        raise DataError(
            f"{data_dir / 'rl_test.parquet'} holds no tasks to evaluate on",
            expected="at least one held-out task",
            fix="name another environment.test_split or other environment.domains",
        )
    environment = environment or open_environment(config, evaluation=True, judge=judge)
    units = units_of(config, tasks, DO_NOTHING, whole=environment.deterministic)
    reporter = BatchReporter(io, sum(len(unit.wanted) for unit in units), "samples")
    generator, tokenizer = open_generator(config, model_ref, reporter, generator, tokenizer)
    folder = output_dir / FOLDER
    work = _Attempts(config, units, environment, generator, tokenizer, io, reporter, folder)
    made = rows_of(work, units)
    domains = domains_of(task.sample_id for task in tasks)
    attempts = {unit.key: asked(config, unit.decoding) for unit in units}
    rows = {key: with_tasks(found, attempts[key], domains) for key, found in made.items()}
    measured = [
        Measured(
            episode_protocol(config, environment, tasks, decoding, data_digest, protocol_file),
            rows[decoding],
            episode_metrics(attempts[decoding], domains),
        )
        for decoding in config.evaluate.decoding
    ]
    told = {key: episodes_told(found, attempts[key], domains) for key, found in rows.items()}
    return write_results(
        *(output_dir, config, (model_name, model_ref), measured),
        (DO_NOTHING, rows[DO_NOTHING]),
        metrics=episode_metrics(1, domains),
        texts=TEXTS,
        episodes=told,
        users=users_told(config),
    )


class _Attempts(BatchWork[_Row]):
    """Attempts of units, those of who does nothing among them."""

    what = "The evaluation"

    def __init__(
        self,
        config: RecipeConfig,
        units: Sequence[Unit],
        environment: Environment,
        generator: Generator | TurnGenerator,
        tokenizer: Any,
        io: StageIO,
        reporter: BatchReporter,
        folder: Path,
    ) -> None:
        self.config, self.units, self.environment = config, units, environment
        self.generator, self.tokenizer = generator, tokenizer
        self._errors: dict[str, list[_Row]] = {}
        parts = not environment.deterministic
        super().__init__([u.wanted for u in units], None, io, reporter, folder, keeps_parts=parts)

    def key(self, sample: _Row) -> tuple[str, int]:
        return key_of_row(sample)

    def failed(self, sample: _Row) -> bool:
        return bool(sample["status"] == "error")

    def tell(self, number: int, finished: int) -> None:
        done = sum(len(self.batches[n - 1]) for n in self.done)
        self.reporter.batch(done + finished, self.units[number - 1].key)

    def scored(
        self, number: int, samples: list[_Row], results: Sequence[RewardResult] | None
    ) -> list[_Row]:
        return samples

    def sample(
        self, number: int, wanted: Sequence[Wanted], finished: Callable[[_Row], None]
    ) -> None:
        unit = self.units[number - 1]
        params = sampling_params(self.config, unit.decoding or "greedy")
        settings = settings_of(self.config, self.environment, params)
        parts = [(self.generator, wanted)]
        if unit.decoding is None:
            short = replace(settings.section, max_turns=1, repairs=0)
            settings = replace(settings, section=short)
            parts = [
                (DoNothing(self.environment, domain, self.tokenizer), mine)
                for domain, mine in _by_domain(wanted).items()
            ]
        for agent, these in parts:

            def ended(place: int, completion: Completion, these: Any = these) -> None:
                one = these[place]
                row = attempt_row(one.prompt.sample_id, one.number, completion)
                finished(row)
                if self.failed(row):
                    self._require(unit.key, row)

            sample_episodes(
                *(agent, these, self.environment, self.tokenizer, settings, ended),
                should_stop=self.io.should_stop if self.keeps_parts else None,
            )

    def _require(self, key: str, row: _Row) -> None:
        """Stop as soon as there are too many errors, however the rest would go."""
        errors = self._errors.get(key)
        if errors is None:
            known = [n for n in self.done if self.units[n - 1].key == key]
            errors = [one for n in known for one in self.rows(n) if self.failed(one)]
        self._errors[key] = [*errors, row]
        asked = sum(len(unit.wanted) for unit in self.units if unit.key == key)
        require_episode_errors(
            Counter(one["error_kind"] for one in self._errors[key]),
            asked,
            self.config.environment.max_error_share,
            of="attempts of this evaluation",
            example=json.loads(row["episode"])["error"],
        )
