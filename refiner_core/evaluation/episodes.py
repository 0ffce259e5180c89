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
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError, EnvironmentOutage, Interrupted, RefinerError
from refiner_core.contract.types import Completion, Generator, Judge, StageIO, TurnGenerator
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
from refiner_core.evaluation.run import Circumstances, Unit, asked, open_generator, units_of
from refiner_core.generation.reporting import BatchReporter
from refiner_core.samples import SampledBatch, Wanted, sample_batches, sample_episodes

_ROWS_FILE = "rows.json"
#: Seconds between checkpoints of attempts that have finished within a unit.
_SAVE_S = 60.0
_OF = "attempts of this evaluation"

_Rows = dict[tuple[str, int], dict[str, Any]]


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
    circumstances: Circumstances | None = None,
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
    made = _Work(units, config, environment, generator, tokenizer, io, reporter).run()
    around = circumstances or Circumstances()
    domains = domains_of(task.sample_id for task in tasks)
    attempts = {unit.key: asked(config, unit.decoding) for unit in units}
    rows = {key: with_tasks(found, attempts[key], domains) for key, found in made.items()}
    measured = [
        Measured(
            episode_protocol(
                config, environment, tasks, decoding, data_digest, around.protocol_file
            ),
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


class _Work:
    """Units one after the other, from the newest checkpoint on."""

    def __init__(
        self,
        units: Sequence[Unit],
        config: RecipeConfig,
        environment: Environment,
        generator: Generator | TurnGenerator,
        tokenizer: Any,
        io: StageIO,
        reporter: BatchReporter,
    ) -> None:
        self.units, self.config, self.environment = units, config, environment
        self.generator, self.tokenizer, self.io, self.reporter = generator, tokenizer, io, reporter
        self.rows: dict[str, _Rows] = {unit.key: {} for unit in units}
        self.keeps_halves = not environment.deterministic
        self._saved, self._saved_at_s = 0, time.monotonic()
        if (checkpoint := io.latest_checkpoint()) is not None:
            kept = json.loads((checkpoint.path / _ROWS_FILE).read_text(encoding="utf-8"))
            for key, rows in kept.items():
                self.rows[key] = {_place(row): row for row in rows}
            self._saved = checkpoint.step

    @property
    def done(self) -> int:
        """Attempts that are there."""
        return sum(len(rows) for rows in self.rows.values())

    def run(self) -> dict[str, list[dict[str, Any]]]:
        """Rows by decoding (and of what does nothing), task by task, attempt by attempt."""
        left = [n for n in range(len(self.units)) if self._missing(n)]
        if not sample_batches(left, self._make, self._keep, self.io.should_stop):
            raise _stopped(self.done, self.reporter.total)
        self.reporter.batch(self.done, "numbers")
        return {
            key: [rows[one.key] for unit in self.units if unit.key == key for one in unit.wanted]
            for key, rows in self.rows.items()
        }

    def _missing(self, number: int) -> list[Wanted]:
        unit = self.units[number]
        return [one for one in unit.wanted if one.key not in self.rows[unit.key]]

    def _make(self, number: int) -> SampledBatch[dict[str, Any]]:
        """A unit's missing attempts; it is kept when all are there."""
        unit, made = self.units[number], _Rows()
        before, asked = self.done, sum(len(u.wanted) for u in self.units if u.key == unit.key)
        self.reporter.batch(before, unit.key)

        def finished(row: dict[str, Any]) -> None:
            made[_place(row)] = row
            self.reporter.batch(before + len(made), unit.key)
            if row["status"] == "error":
                self._require(unit, made, asked)
            if self.keeps_halves and time.monotonic() - self._saved_at_s > _SAVE_S:
                self._save(unit, made)

        try:
            self._attempt(unit, self._missing(number), finished)
        except RefinerError as error:
            if self.keeps_halves:
                self._save(unit, made)
            elif isinstance(error, EnvironmentOutage):
                self._give_up_errors()
            raise
        return SampledBatch(tuple(made.values()))

    def _keep(self, number: int, made: SampledBatch[dict[str, Any]]) -> None:
        unit = self.units[number]
        self.rows[unit.key] |= {_place(row): row for row in made.samples}
        if number + 1 < len(self.units):
            self._save(unit, {})

    def _attempt(
        self, unit: Unit, wanted: Sequence[Wanted], on_row: Callable[[dict[str, Any]], None]
    ) -> None:
        """Make attempts of a unit; a row as each has finished."""
        params = sampling_params(self.config, unit.decoding or "greedy")
        settings = settings_of(
            *(self.config, self.environment),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
        )
        parts = [(self.generator, wanted)]
        if unit.decoding is None:
            short = replace(settings.section, max_turns=1, repairs=0)
            settings = replace(settings, section=short)
            parts = [
                (DoNothing(self.environment, domain, self.tokenizer), mine)
                for domain, mine in _by_domain(wanted).items()
            ]
        for agent, these in parts:

            def finished(place: int, completion: Completion, these: Any = these) -> None:
                one = these[place]
                on_row(attempt_row(one.prompt.sample_id, one.number, completion))

            sample_episodes(
                *(agent, these, self.environment, self.tokenizer, settings, finished),
                should_stop=self.io.should_stop if self.keeps_halves else None,
            )

    def _require(self, unit: Unit, made: _Rows, asked: int) -> None:
        """Stop as soon as there are too many errors, however the rest would go."""
        rows = [*self.rows[unit.key].values(), *made.values()]
        errors = [row for row in rows if row["status"] == "error"]
        said = json.loads(errors[-1]["episode"])["error"]
        share = self.config.environment.max_error_share
        kinds = Counter(row["error_kind"] for row in errors)
        require_episode_errors(kinds, asked, share, of=_OF, example=said)

    def _give_up_errors(self) -> None:
        """Whole units in which there were errors are made again, too: else these would count
        against the next try."""
        for unit in self.units:
            rows, places = self.rows[unit.key], [one.key for one in unit.wanted]
            if any(place in rows and rows[place]["status"] == "error" for place in places):
                self.rows[unit.key] = {k: row for k, row in rows.items() if k not in places}
        if self._saved > self.done:
            self._write(
                self._saved + 1, {key: list(rows.values()) for key, rows in self.rows.items()}
            )

    def _save(self, unit: Unit, half: _Rows) -> None:
        """A checkpoint of whole units and, of one that is not whole, of the attempts without an
        error: the others are tried again."""
        good = {place: row for place, row in half.items() if row["status"] != "error"}
        step = self.done + len(good)
        if step <= self._saved:
            return
        rows = {key: list(found.values()) for key, found in self.rows.items()}
        rows[unit.key] += good.values()
        self._write(step, rows)

    def _write(self, step: int, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        with self.io.new_checkpoint(step) as folder:
            text = json.dumps(rows, ensure_ascii=False)
            (folder / _ROWS_FILE).write_text(text, encoding="utf-8")
        self._saved, self._saved_at_s = step, time.monotonic()


def _place(row: dict[str, Any]) -> tuple[str, int]:
    return str(row["sample_id"]), int(row["sample_index"])


def _stopped(done: int, total: int) -> Interrupted:
    return Interrupted(
        f"The evaluation stopped after {done} of {total} attempts",
        fix="run the same command again to go on",
    )
