"""Evaluation of an agent on held-out tasks, attempt by attempt.

In: the configuration, the data stage's folder, a model. Out: samples files with one row per attempt
and ``results.json``, as for answers (:mod:`.run`): pass@k, pass^k and other metrics with intervals,
by domain and overall, under a protocol that names the environment and its user.

The seed of an attempt derives from the protocol's seed, the decoding, the task and the attempt's
number: every model meets the same users and random numbers, so that arms are paired. Greedy
decoding makes one attempt per task, the sampled one ``evaluate.num_samples``.

Finished work survives interruptions. In a deterministic environment work is cut into units of whole
tasks, one generation batch each, which are saved whole: the rest of half a unit would be decoded in
another batch, with sums in another order, and numbers would depend on the time of the interruption.
In other environments (a user at an endpoint) attempts are long, cost money and are not reproducible
anyway: all attempts of a decoding start as capacity allows, and each finished one is saved.

An attempt ended by the infrastructure does not count: it is left out and reported. Above
``environment.max_error_share`` of a decoding's attempts the evaluation stops; attempts with errors
are retried when it resumes. The reference is :class:`_NullAgent`.

``results.json`` adds for episodes::

    episodes   {DECODING or do_nothing: {"attempts": per task,
                "domains": {DOMAIN: {"tasks", "asked", "passed", "errors": {KIND: n},
                                     "failures": {CLASS: n}}},
                "tasks": {DOMAIN/TASK: [passed, valid]}}}

asked = passed + errors + failures, per domain. Errors are of the infrastructure: such an attempt
has only ``episode_error``. A turn that is no tool call ends an attempt as a failure, with
reward 0 as in training, whatever was done before it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Generator,
    Judge,
    OnCompletion,
    PromptRow,
    RewardResult,
    SamplingParams,
    StageIO,
    TurnGenerator,
)
from refiner_core.data.prepared import load_prompts
from refiner_core.environments.episodes import settings_of
from refiner_core.environments.protocol import (
    FAILURES,
    Environment,
    EpisodeRecord,
    ToolCall,
    domain_of_id,
    over_domains,
    record_from_json,
)
from refiner_core.environments.registry import open_environment
from refiner_core.environments.scoring import require_episodes
from refiner_core.environments.turns import call_text
from refiner_core.evaluation.metric_names import FAILURE, base_of, domain_of, task_passes
from refiner_core.evaluation.metrics import EPISODE_METRICS, FAILURE_METRICS, episode_metrics
from refiner_core.evaluation.protocol import make_protocol, sampling_params
from refiner_core.evaluation.results import MeasuredRows, write_results
from refiner_core.evaluation.run import UnitWork, asked, units_of, work_units
from refiner_core.samples import OpenServers, PlannedSample, sample_episodes

_Row = dict[str, Any]


def _by_domain(wanted: Sequence[PlannedSample]) -> dict[str, list[PlannedSample]]:
    found: dict[str, list[PlannedSample]] = {}
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
    open_servers: OpenServers | None = None,
    environment: Environment | None = None,
    protocol_file: str = "",
) -> dict[str, Any]:
    """Evaluate an agent under every configured decoding.

    Parameters are those of :func:`refiner_core.evaluation.run.evaluate_model`; ``judge`` is used
    only if ``environment.nl_assertions`` is ``judge``. ``environment`` is opened from the
    configuration by default.

    Returns
    -------
    dict
        The content of ``results.json`` (:mod:`refiner_core.evaluation.results`).

    Raises
    ------
    DataError
        There are no held-out tasks.
    Interrupted
        A stop was requested; finished work is kept (see the module).
    EnvironmentOutage
        The infrastructure ended more than ``environment.max_error_share`` of the attempts.
    """
    tasks = _held_out(config, data_dir / "rl_test.parquet")
    environment = environment or open_environment(config, evaluation=True, judge=judge)
    units = units_of(config, tasks, DO_NOTHING, whole=environment.deterministic)
    _, made = work_units(
        *(_Attempts, config, model_ref, units),
        io=io,
        output_dir=output_dir,
        total=sum(len(unit.wanted) for unit in units),
        window=config.grpo.max_token_length,
        generator=generator,
        tokenizer=tokenizer,
        open_servers=open_servers,
        environment=environment,
    )
    domains = domains_of(task.sample_id for task in tasks)
    attempts = {unit.key: asked(config, unit.decoding) for unit in units}
    rows = {key: with_tasks(found, attempts[key], domains) for key, found in made.items()}
    measured = [
        MeasuredRows(
            make_protocol(config, tasks, decoding, data_digest, protocol_file, environment),
            rows[decoding],
            episode_metrics(attempts[decoding], domains),
        )
        for decoding in config.evaluate.decoding
    ]
    told = {key: episode_progress(found, attempts[key], domains) for key, found in rows.items()}
    return write_results(
        *(output_dir, config, (model_name, model_ref), measured),
        (DO_NOTHING, rows[DO_NOTHING]),
        metrics=episode_metrics(1, domains),
        texts=TEXTS,
        episodes=told,
    )


def _held_out(config: RecipeConfig, path: Path) -> list[PromptRow]:
    """The tasks to evaluate on."""
    tasks = over_domains(load_prompts(path), config.evaluate.max_prompts)
    if not tasks:
        raise DataError(
            f"{path} holds no tasks to evaluate on",
            expected="at least one held-out task",
            fix="name another environment.test_split or other environment.domains",
        )
    return tasks


@dataclass(eq=False, kw_only=True)
class _Attempts(UnitWork):
    """Attempts by units, including those of the do-nothing agent."""

    environment: Environment

    def __post_init__(self) -> None:
        self._errors: dict[str, list[_Row]] = {}
        super().__post_init__()

    @property
    def keeps_parts(self) -> bool:
        return not self.environment.deterministic

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
        self, number: int, wanted: Sequence[PlannedSample], finished: Callable[[_Row], None]
    ) -> None:
        unit = self.units[number - 1]
        params = sampling_params(self.config, unit.decoding or "greedy")
        settings = settings_of(self.config, self.environment, params)
        parts = [(self.generator, wanted)]
        if unit.decoding is None:
            short = replace(settings.section, max_turns=1, repairs=0)
            settings = replace(settings, section=short)
            parts = [
                (_NullAgent(self.environment, domain, self.tokenizer), mine)
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
        """Stop as soon as there are too many errors, whatever the remaining attempts give."""
        errors = self._errors.get(key)
        if errors is None:
            known = [n for n in self.done if self.units[n - 1].key == key]
            errors = [one for n in known for one in self.rows(n) if self.failed(one)]
        errors = self._errors[key] = [*errors, row]
        asked = sum(len(unit.wanted) for unit in self.units if unit.key == key)
        told = [(one["error_kind"], json.loads(one["episode"])["error"]) for one in errors]
        share = self.config.environment.max_error_share
        require_episodes(told, asked, share, of="attempts of this evaluation")


# ---------------------------------------------------------------- one attempt

#: Text columns of a samples file of episodes, beside those of every samples file. ``episode`` is
#: the JSON of its record.
TEXTS = ("domain", "failure", "error_kind", "episode")


def attempt_row(sample_id: str, index: int, completion: Completion) -> dict[str, Any]:
    """A finished attempt as a row, without metrics of whole tasks.

    Parameters
    ----------
    sample_id
        ``DOMAIN/TASK``.
    index
        Number of the attempt at the task, from 0.
    completion
        Of an episode.
    """
    assert completion.episode is not None, "an attempt is an episode"
    record = record_from_json(completion.episode)
    own = len(completion.token_ids) if completion.own is None else sum(completion.own)
    failure = failure_of(record)
    return {
        "sample_id": sample_id,
        "sample_index": index,
        "response_text": transcript_text(record),
        "finish_reason": "stop" if record.ended == "done" else record.ended,
        "status": record.status,
        **_numbers(record, failure, own),
        "judgements": json.dumps([_judged(check) for check in record.checks], ensure_ascii=False),
        "domain": record.domain,
        "failure": failure,
        "error_kind": record.error_kind if record.status == "error" else "",
        "episode": json.dumps(completion.episode, ensure_ascii=False),
    }


def failure_of(record: EpisodeRecord) -> str:
    """Reason why an attempt failed; empty for a success, which the reward alone decides, as in
    training, and for an infrastructure error. Without a reason from the environment it is
    ``incomplete``."""
    if record.status == "error":
        return ""
    if record.ended == "no_call":
        return "no_call"
    return "" if record.success else record.failure or "incomplete"


def _numbers(record: EpisodeRecord, failure: str, own_tokens: int) -> dict[str, float | None]:
    """Every metric of an attempt; after an infrastructure error only ``episode_error``."""
    none = dict.fromkeys((*EPISODE_METRICS, *FAILURE_METRICS))
    if record.status == "error":
        return {**none, "episode_error": 1.0}
    return {
        "success": float(not failure),
        "reward": 0.0 if record.ended == "no_call" else record.reward,
        "partial": record.partial,
        "turns": float(len(record.turns)),
        "length_tokens": float(own_tokens),
        "repairs": float(sum(turn.tried_again for turn in record.turns)),
        "tool_errors": float(sum(bool(turn.tool_error) for turn in record.turns)),
        "episode_error": 0.0,
        **{f"{FAILURE}{name}": float(name == failure) for name in FAILURES},
    }


def _judged(check: Mapping[str, Any]) -> dict[str, Any]:
    """A check in the form of a judgement, for readers of judgements."""
    return {
        "kind": "check",
        "title": f"{check['kind']}: {check['name']}",
        "score": float(check["passed"]),
        "detail": check.get("detail", ""),
    }


def transcript_text(record: EpisodeRecord) -> str:
    """An episode as text: who said what, in order, with every line of each message."""
    parts = [f"[{role}]\n{content}" for role, content in record.first_messages]
    for turn in record.turns:
        if turn.repaired is not None:
            parts.append(f"[agent, no call]\n{turn.repaired}")
        parts.append(f"[agent]\n{turn.text}")
        parts += [f"[{role}]\n{content}" for role, content in turn.messages]
    return "\n".join(parts)


# ---------------------------------------------------------------- whole tasks


def with_tasks(
    rows: Sequence[dict[str, Any]], attempts: int, domains: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows, grouped by task in the order of attempts, with metrics of tasks in the first row of
    each; every metric also under its domain's name in the rows of that domain."""
    metrics = episode_metrics(attempts, domains)
    passes = {first: task_passes(found, attempts) for first, found in _tasks(rows)}
    made = []
    for place, row in enumerate(rows):
        known = {**row, **passes.get(place, {})}
        own = {
            metric: known.get(base_of(metric))
            for metric in metrics
            if domain_of(metric) in ("", row["domain"])
        }
        made.append({**row, **dict.fromkeys(metrics), **own})
    return made


def _tasks(rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[int, list[bool | None]]]:
    """For each task the index of its first row, and the success of its attempts."""
    found: dict[str, tuple[int, list[bool | None]]] = {}
    for place, row in enumerate(rows):
        success = row["success"]
        _, succeeded = found.setdefault(str(row["sample_id"]), (place, []))
        succeeded.append(None if success is None else bool(success))
    return found.values()


def episode_progress(
    rows: Sequence[Mapping[str, Any]], attempts: int, domains: Sequence[str]
) -> dict[str, Any]:
    """Counts of attempts; see the module."""
    told: dict[str, Any] = {}
    for domain in domains:
        mine = [row for row in rows if row["domain"] == domain]
        failures = Counter(row["failure"] for row in mine if row["failure"])
        told[domain] = {
            "tasks": len({row["sample_id"] for row in mine}),
            "asked": len(mine),
            "passed": sum(row["success"] == 1.0 for row in mine),
            "errors": dict(Counter(row["error_kind"] for row in mine if row["status"] == "error")),
            "failures": {name: failures[name] for name in FAILURES if failures[name]},
        }
    tasks: dict[str, list[int]] = {}
    for row in rows:
        counts = tasks.setdefault(str(row["sample_id"]), [0, 0])
        counts[0] += row["success"] == 1.0
        counts[1] += row["status"] != "error"
    return {"attempts": attempts, "domains": told, "tasks": tasks}


def domains_of(sample_ids: Iterable[str]) -> tuple[str, ...]:
    """The domains of tasks, in order of appearance."""
    return tuple(dict.fromkeys(domain_of_id(one) for one in sample_ids))


DO_NOTHING = "do_nothing"
_GOODBYE = "Goodbye."


class _NullAgent:
    """A generator without a model: every turn is the call that ends an episode of a domain."""

    def __init__(self, environment: Environment, domain: str, tokenizer: Any) -> None:
        text = call_text(ending_call(environment, domain))
        self._ids = tuple(int(i) for i in tokenizer.encode(text, add_special_tokens=False))

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """The call, once per request, with the log-probabilities of a certain choice."""
        made = Completion(self._ids, (0.0,) * len(self._ids), "stop")
        for index in range(len(requests)):
            if on_completion is not None:
                on_completion(index, made)
        return [made] * len(requests)


def ending_call(environment: Environment, domain: str) -> ToolCall:
    """The call that ends an episode, with a text for each argument required by its schema."""
    name = environment.finish or environment.speak
    text = "" if environment.finish else _GOODBYE
    schema = next((t.parameters for t in environment.tools(domain) if t.name == name), {})
    return ToolCall(name, dict.fromkeys(schema.get("required") or (), text))
