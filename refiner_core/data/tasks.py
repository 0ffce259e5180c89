"""The data stage of agents: an environment's tasks, and demonstrations, to prepared files.

In: the recipe's ``environment`` and ``data`` sections, the lengths of ``sft`` and ``grpo``, and a
tokenizer. Out: the files of :mod:`refiner_core.data.prepare`, under the same names.

``rl_train.parquet`` and ``rl_test.parquet`` have a row per task
(:mod:`refiner_core.environments.protocol`). The split is the environment's own: a test task that
is also in the train split (same id, or same content) is refused.

Demonstrations come from one of two sources:

* the environment's expert (``environment.demonstrations``): each is a really played episode of
  a kept training task with its own seed;
  ``environment.flawed_demonstrations`` of them with a mistake;
* rows of conversations (``data.sft_path``; :mod:`refiner_core.data.conversations`).

Both are encoded by :mod:`refiner_core.environments.conversation`, like rollouts. Rows are kept or
dropped whole:

================== ==========================================================================
prompt_too_long    policy and tools > ``data.max_prompt_token_length``
too_long_for_pack  they and one turn > ``grpo.max_token_length``
answer_too_long    a demonstration > ``sft.pack_length``
over_max_rows      ``environment.max_train_tasks`` / ``data.max_sft_rows`` were reached first
no_call            a demonstration with a turn of the assistant that is no tool call
held_out_task      a demonstration of a held-out task
duplicate          the same conversation as in an earlier row
================== ==========================================================================
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from refiner_core.contract.checks.environment import BUILTIN_ROWS
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fingerprint import canonical_json, derive_seed
from refiner_core.contract.sections.environment import check_settings
from refiner_core.contract.types import DemonstrationRow, PromptRow, StageIO
from refiner_core.data.conversations import read_conversations
from refiner_core.data.datacard import (
    Tally,
    in_order,
    make_report,
    percentiles,
    tally_of,
    write_report,
)
from refiner_core.data.prepare import Sides, tell, write_rows
from refiner_core.environments.conversation import demonstration, prompt_ids
from refiner_core.environments.protocol import (
    Environment,
    HasExpert,
    Task,
    domain_of_id,
    row_of_task,
)

_R = TypeVar("_R", PromptRow, DemonstrationRow)


def prepare_tasks(
    config: RecipeConfig,
    *,
    environment: Environment,
    digest: str,
    tokenizer: Any,
    output_dir: Path,
    io: StageIO | None = None,
) -> dict[str, Any]:
    """Prepare all rows of an agent's recipe and write them to ``output_dir``.

    ``digest`` identifies the environment's tasks and rules.

    Returns
    -------
    dict
        The report, as in ``report.json``; the form of
        :func:`refiner_core.data.prepare.prepare_data`, plus ``environment`` and ``domains``.

    Raises
    ------
    DataError
        Splits share a task, tasks or rows are malformed, or nothing is left.
    ConfigurationError
        Demonstrations are requested of an environment without an expert, or partial credit is set
        for an unknown domain.
    Interrupted
        ``io`` requested a stop.
    """
    if not config.environment.domains:  # else only the used ones are known
        check_settings(config.environment.shaping, environment.domains())
    work = _Work(config, environment, tokenizer, io)
    rl = Tally(f"{environment.name} {environment.version}", digest)
    train, test = _splits(config, environment)
    prompts = work.prompts({t.domain for t in (*train, *test)}, rl)
    kept_train, kept_test = work.rows(train, prompts, rl), work.rows(test, prompts, rl)
    seed = config.data.split_seed
    kept_train = _limited(kept_train, config.environment.max_train_tasks, seed, "tasks", rl)
    if not kept_train or not kept_test:
        raise _nothing_left(config, rl, "train" if not kept_train else "test")
    rl.kept = len(kept_train) + len(kept_test)
    used = {row.sample_id for row in kept_train}
    shown_at = [task for task in train if f"{task.domain}/{task.id}" in used]
    sft, demonstrated = work.demonstrations(shown_at, test, prompts, digest)
    splits = {"train": kept_train, "test": kept_test}
    for tally in (rl, sft):
        lengths = {"total_tokens": percentiles(tally.total_lengths)}
        tally.more = {"domains": in_order(tally.names), **lengths, **tally.more}
    report = make_report(
        config,
        tokenizer,
        {"rl": rl, "sft": sft},
        {"questions": rl.kept, "held_out_questions": len(kept_test), "rl_without_rubrics": 0},
        write_rows(output_dir, _validation(config, demonstrated), (kept_train, kept_test)),
        environment=dict(environment.describe()),
        domains={
            name: in_order(Counter(domain_of_id(row.sample_id) for row in rows))
            for name, rows in splits.items()
        },
    )
    write_report(output_dir, report)
    return report


def _splits(
    config: RecipeConfig, environment: Environment
) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Training and held-out tasks; raises if they overlap."""
    names = (config.environment.train_split, config.environment.test_split)
    train, test = environment.tasks(names[0]), environment.tasks(names[1])
    for what, of in (("id", lambda t: t.id), ("content", _content)):
        known = {of(task): task for task in train}
        if found := next((task for task in test if of(task) in known), None):
            same = known[of(found)]
            raise DataError(
                f"Task {found.domain}/{found.id} of the split {names[1]!r} has the {what} of "
                f"{same.domain}/{same.id} of {names[0]!r}",
                expected="held-out tasks that differ from all training tasks",
                fix="correct environment.tasks, environment.train_split or environment.test_split",
            )
    return train, test


def _content(task: Task) -> str:
    return canonical_json({"domain": task.domain, "data": dict(task.data)})


def _limited(rows: list[_R], most: int | None, seed: int, what: str, counts: Tally) -> list[_R]:
    """A seeded choice of at most ``most`` rows, in their order."""
    if most is None or len(rows) <= most:
        return rows
    order = sorted(rows, key=lambda row: derive_seed(seed, "limit", what, row.sample_id))
    chosen = {row.sample_id for row in order[:most]}
    counts.dropped["over_max_rows"] += len(rows) - most
    return [row for row in rows if row.sample_id in chosen]


def _validation(config: RecipeConfig, rows: Sequence[DemonstrationRow]) -> Sides[DemonstrationRow]:
    """Training and validation rows; all demonstrations of one task are on one side."""
    tasks = sorted({_task_of(row) for row in rows})
    count = round(config.data.validation_fraction * len(tasks))
    seed = config.data.split_seed
    order = sorted(tasks, key=lambda task: derive_seed(seed, "validation", task))
    chosen = set(order[: min(count, max(0, len(tasks) - 1))])
    sides: Sides[DemonstrationRow] = ([], [])
    for row in rows:
        sides[_task_of(row) in chosen].append(row)
    return sides


def _task_of(row: DemonstrationRow) -> str:
    return row.sample_id.partition("#")[0]


class _Work:
    """Tokenises an environment's data."""

    def __init__(
        self, config: RecipeConfig, environment: Environment, tokenizer: Any, io: StageIO | None
    ) -> None:
        self.config, self.environment = config, environment
        self.tokenizer, self.io = tokenizer, io

    def prompts(self, domains: set[str], counts: Tally) -> dict[str, tuple[int, ...]]:
        """The common prefix of all episodes of a domain."""
        found = {}
        for domain in sorted(domains):
            policy, tools = self.environment.policy(domain), self.environment.tools(domain)
            found[domain] = prompt_ids(self.tokenizer, policy, tools)
            counts.prompt_lengths.append(len(found[domain]))
        return found

    def rows(
        self, tasks: Sequence[Task], prompts: dict[str, tuple[int, ...]], counts: Tally
    ) -> list[PromptRow]:
        """Tasks as rows, if they fit."""
        grpo, longest = self.config.grpo, self.config.data.max_prompt_token_length
        kept = []
        for task in tasks:
            counts.read += 1
            ids = prompts[task.domain]
            if len(ids) > longest:
                counts.dropped["prompt_too_long"] += 1
            elif len(ids) + grpo.response_length > grpo.max_token_length:
                counts.dropped["too_long_for_pack"] += 1
            else:
                counts.names[task.domain] += 1
                kept.append(row_of_task(task, ids))
        return kept

    def demonstrations(
        self,
        train: Sequence[Task],
        test: Sequence[Task],
        prompts: dict[str, tuple[int, ...]],
        digest: str,
    ) -> tuple[Tally, list[DemonstrationRow]]:
        """Demonstrations from the recipe's source."""
        if self.config.data.sft_path not in (None, BUILTIN_ROWS):
            counts, rows = self._from_rows(test)
        elif self.config.environment.demonstrations:
            counts = Tally(f"the expert of {self.environment.name}", digest)
            rows = self._from_expert(train, prompts, counts)
        else:
            return Tally("none", ""), []
        counts.kept = len(rows)
        if not rows:
            raise _no_demonstration(self.config, counts)
        return counts, rows

    def _from_rows(self, test: Sequence[Task]) -> tuple[Tally, list[DemonstrationRow]]:
        held_out = {name for task in test for name in (task.id, f"{task.domain}/{task.id}")}
        counts, rows, nameless = tally_of(self.config, "sft"), [], set[str]()
        for made in read_conversations(self.config, self.tokenizer, held_out):
            counts.read += 1
            tell(self.io, counts.read, 0, "tokenise sft", every=16)
            if isinstance(made, str):
                counts.dropped[made] += 1
            elif (row := self._fitting(made.row, made.prompt_length, counts)) is not None:
                counts.names[made.domain] += 1
                rows.append(row)
                nameless.update({row.sample_id} if not made.named else ())
        data = self.config.data
        if data.max_sft_rows is not None and len(rows) > data.max_sft_rows:
            rows = _limited(rows, data.max_sft_rows, data.split_seed, "sft", counts)
            rows.sort(key=lambda row: row.sample_id)
        if unnamed := sum(row.sample_id in nameless for row in rows):
            counts.more = {"unnamed_task": unnamed}
        return counts, rows

    def _fitting(
        self, row: DemonstrationRow, prompt_length: int, counts: Tally
    ) -> DemonstrationRow | None:
        counts.prompt_lengths.append(prompt_length)
        counts.total_lengths.append(len(row.input_ids))
        if len(row.input_ids) > self.config.sft.pack_length:
            counts.dropped["answer_too_long"] += 1
            return None
        counts.loss_lengths.append(sum(row.loss_mask))
        return row

    def _from_expert(
        self, train: Sequence[Task], prompts: dict[str, tuple[int, ...]], counts: Tally
    ) -> list[DemonstrationRow]:
        """Task by task, in a shuffled order, until there are enough."""
        expert, wanted = self.environment, self.config.environment.demonstrations
        if not isinstance(expert, HasExpert):
            raise ConfigurationError(
                f"environment.demonstrations is {wanted}, but {self.environment.name} has no "
                "expert to make them.",
                expected="rows of conversations",
                fix="set environment.demonstrations=0 and data.sft_path=FILE",
            )
        flawed, seen = self.config.environment.flawed_demonstrations, set[str]()
        counts.more = {"flawed": 0, "solved": 0}
        rows = []
        for number in range(wanted):
            counts.read += 1
            tell(self.io, number, wanted, "demonstrations", every=16)
            task = self._task(train, number)
            seed = derive_seed(self.config.data.split_seed, "demonstration", task.id, number)
            wrong = (seed >> 8) % 10_000 < flawed * 10_000
            row = self._played(expert, task, seed, wrong, prompts[task.domain], counts)
            content = hashlib.sha256(repr(row.input_ids).encode()).hexdigest()
            if content in seen:
                counts.dropped["duplicate"] += 1
                continue
            seen.add(content)
            fitting = self._fitting(row, len(prompts[task.domain]), counts)
            if fitting is not None:
                counts.names[task.domain] += 1
                rows.append(fitting)
        return rows

    def _task(self, train: Sequence[Task], number: int) -> Task:
        """The task of the ``number``-th demonstration: all tasks once before any repeats."""
        turn, place = divmod(number, len(train))
        seed = self.config.data.split_seed
        order = sorted(train, key=lambda t: derive_seed(seed, "demonstrated", turn, t.id))
        return order[place]

    def _played(
        self,
        expert: HasExpert,
        task: Task,
        seed: int,
        flawed: bool,
        prompt: tuple[int, ...],
        counts: Tally,
    ) -> DemonstrationRow:
        """An episode of the expert, as tokens."""
        episode = self.environment.episode(task)
        first = episode.reset(seed)
        turns = []
        for call in expert.expert(task, seed, flawed=flawed):
            step = episode.step(call)
            turns.append((call, step.messages))
            if step.done:
                break
        outcome = episode.outcome()
        episode.close()
        if not flawed and not outcome.success:
            raise DataError(
                f"The expert of {self.environment.name} does not solve its own task "
                f"{task.domain}/{task.id} (reward {outcome.reward:g}, {outcome.failure})",
                expected="demonstrations that solve the task",
                fix="see `refiner environments check`",
            )
        counts.more["flawed"] += flawed
        counts.more["solved"] += outcome.success
        ids, mask = demonstration(self.tokenizer, prompt, first, turns)
        name = f"{task.domain}/{task.id}#{counts.read}"
        return DemonstrationRow(name, tuple(ids), tuple(mask))


def _nothing_left(config: RecipeConfig, counts: Tally, split: str) -> DataError:
    longest = max(counts.prompt_lengths, default=0)
    needed = longest + config.grpo.response_length
    return DataError(
        f"No {split} task is left ({counts.reasons or 'there are none'}); policy and tools of a "
        f"domain have up to {longest} tokens",
        expected="tasks whose policy and tools fit, with a turn",
        fix=f"set data.max_prompt_token_length={longest} and grpo.max_token_length={needed} or "
        "more, if the model's window allows it",
    )


def _no_demonstration(config: RecipeConfig, counts: Tally) -> DataError:
    shortest = min(counts.total_lengths, default=0)
    return DataError(
        f"None of the {counts.read} demonstrations ({counts.source}) is usable ({counts.reasons}); "
        f"the shortest has {shortest} tokens",
        expected=f"conversations of at most {config.sft.pack_length} tokens (sft.pack_length), "
        "each turn of the assistant one tool call",
        fix=f"set sft.pack_length={shortest} or more, or correct the rows",
    )
