"""Attacks on the reward of a recipe, before anything is trained.

::

    rows ─> honest, best and random answers, attacks ─> judge, reward ─> differences to honest

In: a recipe, perhaps a file of rows and attacks of one's own. Out: mean rewards with intervals, and
for each attack the paired difference to the honest answers. Rewards are computed as in training, by
the recipe's own judge. Lengths are not limited: an answer may be longer than
``grpo.response_length``. For an agent, episodes take the place of answers
(:mod:`refiner_core.environments.attacks`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.checking.attacks import attacks_file
from flows.stages.judging import judge_by_hand, stored
from infra.host.secrets import mask_keys_of
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.answers import compared, parse_answer
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError, UnsupportedError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.files import imported_file
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.types import PromptRow
from refiner_core.data.rows import (
    DataRow,
    choose_questions,
    parse_any_row,
    parse_row,
    same_questions,
)
from refiner_core.data.sources import read_all_rows, read_rows, resolve_source
from refiner_core.report.printing import number, table_lines, with_interval
from refiner_core.rewards.attacks import (
    ATTACKS,
    Attack,
    AttackedRow,
    evidence_answer,
    honest_answer,
)
from refiner_core.rubrics import select_rubrics

if TYPE_CHECKING:
    from refiner_core.rewards import RewardInput

#: Default number of rows.
ROWS = 32
WRITER = "attack"
#: A difference of sums of floats that is no difference.
_SAME = 1e-9
#: A value per row; None: there is no such answer, or no score.
Values = Sequence[float | None]


class _Target(NamedTuple):
    """A row with its answers. ``made_from`` is the origin of the honest one; ``best`` is None if
    nothing says which evidence answers the row."""

    prompt: PromptRow
    row: AttackedRow
    gold: Mapping[str, str]
    honest: str
    best: str | None
    made_from: str


def attack_reward(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    rows: str | Path | None = None,
    count: int = ROWS,
    own: Sequence[str] = (),
    tell: Callable[[str, int], None] = lambda text, calls: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Attack a recipe's reward: which dishonest answers does it pay more than honest ones?

    An existing workspace keeps the result; plans and reports of this reward then name the attacks
    that pay.

    Parameters
    ----------
    recipe, overrides
        The recipe with its judge and reward.
    rows
        File of rows (default: the questions that the recipe holds out).
    count
        Maximum number of rows, a seeded choice.
    own
        Attacks of one's own, as ``FILE.py:function``; see :mod:`refiner_core.rewards.attacks`.
    tell
        Receives the plan in words and the number of calls to the judge's server, before the first;
        an exception from it ends the attack.
    progress
        Receives the numbers of judged and of all answers.

    Returns
    -------
    dict
        ``honest``, ``gold`` (None without truth or demonstration) and ``random``, each with
        ``mean``, ``low``, ``high`` and ``n``; ``attacks``, each also with ``name``, the paired
        ``difference`` to honest with its interval, and ``pays``: the interval is above 0.

    Raises
    ------
    ConfigurationError, DataError
        The recipe, a row or an attack of one's own is invalid.
    JudgeOutage, JudgeUnusable
        The judge gave too few scores.
    UnsupportedError
        The recipe trains an agent, and its environment has no expert, or rows or attacks of one's
        own are given.
    """
    config = check_config(load_recipe(recipe, overrides))
    mask_keys_of(config)
    if config.environment.name:
        if rows or own:
            raise UnsupportedError(
                f"{recipe} trains an agent, which answers no rows.",
                expected="a recipe whose answers are judged, for --rows and --attack",
                fix="leave both out: the shipped attacks on episodes are tried",
            )
        totals = _episode_rewards(config, count, tell)
        return _document(totals, [n for n in totals if n not in ("honest", "gold", "random")])
    attacks = {**ATTACKS, **dict(map(_own_attack, own))}
    targets = _targets(config, rows, count)
    answers: dict[str, list[str | None]] = {
        "honest": [target.honest for target in targets],
        "gold": [target.best for target in targets],
        "random": [_random(target.prompt) for target in targets],
    }
    for name, attack in attacks.items():
        answers[name] = [attack(t.row, t.honest, t.gold) for t in targets]
    totals = _rewards(config, targets, answers, tell, progress)
    found = _document(totals, list(attacks))
    if Workspace.read_only(config.workspace).layout.format_file.exists():
        file = attacks_file(config)
        file.parent.mkdir(exist_ok=True)
        atomic.write_json(file, found)
    return found


def attack_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The results as lines, the most paid attack first."""
    rows = [
        (name, *_shown(document[name]), "", "")
        for name in ("honest", "gold", "random")
        if document[name] is not None
    ]
    attacks = sorted(document["attacks"], key=lambda one: -(one["difference"] or 0.0))
    for one in attacks:
        ends = one["difference_low"], one["difference_high"]
        gained = with_interval(one["difference"], *ends, 2, signed=True)
        rows.append((one["name"], *_shown(one), gained, "pays" if one["pays"] else ""))
    header = ("answer", "reward", "n", "more than honest", "")
    yield from table_lines(rows, header)
    paid = [one["name"] for one in attacks if one["pays"]]
    yield ""
    yield f"{len(paid)} of {len(attacks)} attacks pay" + (f": {', '.join(paid)}" if paid else "")


def _shown(measured: Mapping[str, Any]) -> tuple[str, str]:
    mean, low, high = (measured[name] for name in ("mean", "low", "high"))
    return with_interval(mean, low, high, 2), number(measured["n"], 0)


# ---------------------------------------------------------------- answers


def _own_attack(name: str) -> tuple[str, Attack]:
    """Name and function of ``FILE.py:function``."""
    fix = "write a function (row, honest, gold) that returns the text of an answer"
    file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    expected = "FILE.py:function, a Python file and a function in it"
    if not path.is_file():
        raise ConfigurationError(f"--attack {name} names no file", expected=expected, fix=fix)
    found = getattr(imported_file(path.resolve(), fix), function, None)
    if not callable(found):
        what = f"{path} has no function {function!r}"
        raise ConfigurationError(what, expected=expected, fix=fix)

    def attack(row: AttackedRow, honest: str, gold: Mapping[str, str]) -> str:
        try:
            text = found(row, honest, gold)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise ConfigurationError(
                f"The attack {name} failed on the question {row.question[:80]!r}: {said}",
                expected="the text of an answer",
                fix="correct the function",
            ) from error
        if not isinstance(text, str):
            what = f"The attack {name} returned a {type(text).__name__}"
            raise ConfigurationError(what, expected="the text of an answer", fix=fix)
        return text

    return f"{path.name}:{function}", attack


def _targets(config: RecipeConfig, file: str | Path | None, count: int) -> list[_Target]:
    """Rows that the recipe holds out, or those of a file, with their answers."""
    from refiner_core.data.prepare import RowSelection

    shown = {} if file else _demonstrations(config)
    if file and not Path(file).expanduser().exists():
        raise ConfigurationError(
            f"--rows {file} does not exist",
            expected="a .jsonl or .parquet file, or a folder made by `datasets` save_to_disk",
            fix="correct the path",
        )
    if file:
        config = replace_fields(config, {"data.rl_path": str(file), "data.all_held_out": True})
    selection, seen = RowSelection(config, "rl", None, None), set[str]()
    if selection.source.kind == "none":
        raise ConfigurationError(
            "data.rl_path is empty, so that the recipe has no rows with rubrics.",
            expected="rows to answer",
            fix="name a file with --rows FILE",
        )
    rows: list[DataRow] = []
    for raw in read_rows(selection.source):
        row = parse_row(raw, "rl")
        if not selection.reason_to_drop(row, seen):
            seen.add(row.content_key)
            rows.append(row)
            ended = parse_any_row(raw, "sft")  # a last assistant turn is a demonstration
            if isinstance(ended, DataRow) and ended.answer:
                shown[compared(row.prompt_text)] = ended.answer
    data = config.data
    if not data.all_held_out:
        question_of = same_questions([row.question_names for row in rows])
        asked = [question_of[row.question_names[0]] for row in rows]
        held = choose_questions(asked, data.held_out_fraction, data.split_seed, "held_out")
        if held:  # none of a single question
            rows = [row for row, question in zip(rows, asked, strict=True) if question in held]
    if not rows:
        raise DataError(
            f"No row of {selection.source.path} can be answered",
            expected="rows with evidence in the prompt",
            fix=f"see `refiner data check {selection.source.path}`",
        )
    rows.sort(key=lambda row: derive_seed(data.split_seed, WRITER, row.content_key))
    return [_target(config, row, shown.get(compared(row.prompt_text))) for row in rows[:count]]


def _demonstrations(config: RecipeConfig) -> dict[str, str]:
    """Demonstrations of the recipe by prompt. Synthetic ones share no prompt with the rows."""
    source = resolve_source(config.data, "sft")
    if source.kind == "synthetic":
        return {}
    rows = (parse_any_row(raw, "sft") for raw in read_all_rows(source))
    return {compared(r.prompt_text): r.answer or "" for r in rows if isinstance(r, DataRow)}


def _target(config: RecipeConfig, row: DataRow, demonstration: str | None) -> _Target:
    evidence = dict(row.evidence.texts)
    facts = _stating(row, evidence)
    best = evidence_answer(evidence, facts) if facts else None
    if demonstration and not parse_answer(demonstration).malformed:
        honest, made_from = demonstration, "the demonstration"
        best = best or demonstration
    elif facts:
        honest = evidence_answer(evidence, facts[: (len(facts) + 1) // 2])
        made_from = "half of the row's facts"
    else:
        honest, made_from = honest_answer(row.question, evidence), "the nearest evidence"
    cited = parse_answer(honest).cited_ids
    prompt = PromptRow(
        *(row.sample_id, row.question, row.prompt_text, ()),
        *(row.rubrics, row.refiner_mode, None),
    )
    rubrics = select_rubrics(row.rubrics, config.reward)
    seen = AttackedRow(row.question, row.prompt_text, evidence, rubrics, row.refiner_mode)
    gold = {i: evidence[i] for i in facts or cited if i in evidence}
    return _Target(prompt, seen, gold, honest, best, made_from)


def _stating(row: DataRow, evidence: Mapping[str, str]) -> list[str]:
    """For each fact of the row's truth, the first source that states it."""
    facts = (row.truth or {}).get("facts")  # a row of one's own may have any truth
    known = [f for f in facts if isinstance(f, Mapping)] if isinstance(facts, list) else []
    found = (next((i for i in evidence if i in fact.get("ids", ())), None) for fact in known)
    return list(dict.fromkeys(i for i in found if i is not None))


def _random(prompt: PromptRow) -> str:
    from refiner_core.data.random_baseline import random_baseline_answers

    seed = derive_seed(0, WRITER, prompt.sample_id)
    return random_baseline_answers(prompt.prompt_text, random.Random(seed))


# ---------------------------------------------------------------- rewards


def _rewards(
    config: RecipeConfig,
    targets: Sequence[_Target],
    answers: Mapping[str, Sequence[str | None]],
    tell: Callable[[str, int], None],
    progress: Callable[[int, int], None],
) -> dict[str, list[float | None]]:
    """Totals by kind of answer, one per row, as in training."""
    from refiner_core.rewards import RewardInput, RewardStream, require_scored

    prompts = [target.prompt for target in targets]
    places = [(n, i) for n, texts in answers.items() for i, t in enumerate(texts) if t is not None]
    items = [RewardInput(prompts[i], answers[name][i] or "", True) for name, i in places]
    workspace = Workspace.read_only(config.workspace)
    judge = config.judge
    if not workspace.layout.format_file.exists():  # then there is no store of judgements either
        judge = replace(judge, cache_gb=0.0)
    asked, calls = _cost(replace(config, judge=judge), workspace, items)
    kinds = Counter(target.made_from for target in targets)
    honest = "; ".join(f"{kind} ({n})" for kind, n in kinds.most_common())
    tell(
        f"{len(targets)} rows, {len(items)} answers: {asked} questions to {judge.model}, "
        f"{calls} calls. Honest answers: {honest}",
        calls,
    )
    with judge_by_hand(judge, workspace, writer=WRITER, calls=bool(calls)) as asker:
        stream = RewardStream(config.reward, asker)
        for place, item in enumerate(items):
            stream.add(place, item)
        results = stream.results(progress)
    require_scored(results, judge.max_failed_share, of="answers")
    totals: dict[str, list[float | None]] = {name: [None] * len(targets) for name in answers}
    for (name, i), result in zip(places, results, strict=True):
        totals[name][i] = result.total
    return totals


def _cost(
    config: RecipeConfig, workspace: Workspace, items: Sequence[RewardInput]
) -> tuple[int, int]:
    """Number of different questions, and of calls to a server that no stored judgement saves."""
    from refiner_core.judges.calls import plan_calls
    from refiner_core.rescoring.rollouts import questions_of

    found = questions_of(items, config.reward)
    asked = list(dict.fromkeys(request for questions in found for request, _ in questions))
    if config.judge.kind == "lexical":
        return len(asked), 0
    calls = {call.keys for call in plan_calls(asked, config.judge)}
    with stored(config.judge, workspace, WRITER) as store:
        return len(asked), sum(store is None or None in store.get(keys) for keys in calls)


def _episode_rewards(
    config: RecipeConfig, count: int, tell: Callable[[str, int], None]
) -> dict[str, list[float | None]]:
    """Rewards of episodes on held-out tasks, which an expert demonstrates."""
    from refiner_core.environments.attacks import attacked_episodes
    from refiner_core.environments.protocol import HasExpert
    from refiner_core.environments.registry import open_environment

    environment = open_environment(config, evaluation=False)
    if not isinstance(environment, HasExpert):
        raise UnsupportedError(
            f"The environment {config.environment.name!r} has no expert, whose tries are changed.",
            expected="an environment with a method `expert`, such as `desk`",
            fix="name another recipe; `refiner environments play` shows what an episode earns",
        )
    tasks = sorted(
        environment.tasks(config.environment.test_split),
        key=lambda task: derive_seed(config.data.split_seed, WRITER, task.id),
    )[:count]
    tell(f"{len(tasks)} tasks. Honest tries: the expert's, with a typical mistake", 0)
    return attacked_episodes(environment, environment, config.environment, tasks)


# ---------------------------------------------------------------- numbers


def _document(
    totals: Mapping[str, Sequence[float | None]], attacks: Sequence[str]
) -> dict[str, Any]:
    return {
        "version": 1,
        **{name: _mean(totals[name]) for name in ("honest", "gold", "random")},
        "attacks": [_compared(name, totals[name], totals["honest"]) for name in attacks],
    }


def _mean(values: Values) -> dict[str, Any] | None:
    """Mean with its t interval over rows; None without values."""
    found = _estimate(values)
    return None if not found["n"] else found


def _compared(name: str, attacked: Values, honest: Values) -> dict[str, Any]:
    """An attack's mean, and its paired difference to the honest answers."""
    pairs = zip(attacked, honest, strict=True)
    gained = _estimate([None if a is None or h is None else a - h for a, h in pairs])
    return {
        "name": name,
        **_estimate(attacked),
        "difference": gained["mean"],
        "difference_low": gained["low"],
        "difference_high": gained["high"],
        "pays": gained["low"] is not None and gained["low"] > _SAME,
    }


def _estimate(values: Values) -> dict[str, Any]:
    import numpy as np

    from refiner_core.evaluation.statistics import two_way_mean

    known = np.array([value for value in values if value is not None], dtype=np.float64)
    found = two_way_mean(known[None])
    mean = found.value if found.n else None
    return {"mean": mean, "low": found.low, "high": found.high, "n": found.n}
