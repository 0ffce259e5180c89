"""A planned rescoring, carried out; its files, and what a terminal shows of it.

::

    plan ─> judges ─> scores ─> fidelity · comparisons with the baseline · judge x policy matrix

In: a :class:`~flows.rescoring.planning.Planned`. Out: a :class:`Done` one, its document, lines, and
``rescore.json``, ``rewards.parquet``, ``table.md``.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from flows.rescoring.asking import Asking, JudgePlan
from flows.rescoring.planning import (
    AGAIN,
    WRITER,
    Planned,
    Setting,
    identity_of,
    judge_fields,
    own_setting,
)
from flows.rescoring.reading import Policy
from flows.stages.judging import judge_by_hand
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.traces import encode_rollouts
from infra.store.workspace import now_text
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import picked, to_json
from refiner_core.contract.types import Judge, Judgement
from refiner_core.judge_report.measures import plain
from refiner_core.judges import build_judge
from refiner_core.report.printing import table_lines
from refiner_core.rescoring import document as doc
from refiner_core.rescoring.compare import (
    compare,
    judges_agree,
    make_matrix,
)
from refiner_core.rescoring.rollouts import (
    Key,
    NobodyToAsk,
    RecordedJudge,
    Scores,
    fidelity,
    groups_of,
    is_batched,
    judge_identity,
    scores_under,
    stored_scores,
)

#: Listener to how far it is: what is counted, how many of it are done, of how many.
Tell = Callable[[str, int, int], None]
#: Scores by policy, then setting; the run's own are as they were stored.
ScoresOf = Mapping[str, Mapping[str, Scores]]


class Rescored(NamedTuple):
    """What rescoring has found, and where its files lie."""

    document: dict[str, Any]
    folder: Path


def rescore(
    planned: Planned, folder: str | Path | None = None, tell: Tell = lambda *_: None
) -> Rescored:
    """Score stored rollouts again, and write down what changes.

    Parameters
    ----------
    planned
        What :func:`flows.api.plan_rescoring` has made.
    folder
        Where the files go (default: ``rescores/ID`` in the workspace).
    tell
        Told what is counted (judgements, scorings), how many are done, and of how many.

    Returns
    -------
    Rescored
        The document that is also written as JSON, and the folder.

    Raises
    ------
    JudgeOutage
        A judge does not answer; what was judged is kept.
    NoSpaceError
        There is no room for the files.
    WorkspaceError
        Somebody else may have written what is recorded there.
    """
    planned.workspace.require_trust()  # its records name the judge, and whose key it gets
    default = planned.workspace.layout.rescores / planned.short_id
    where = default if folder is None else Path(folder)
    document, scores = carry_out(planned, tell)
    write(planned, scores, document, where)
    return Rescored(document, where)


def carry_out(planned: Planned, tell: Tell = lambda *_: None) -> tuple[dict[str, Any], ScoresOf]:
    """Ask what is to be asked, and score everything; writes nothing.

    Returns
    -------
    document, scores
        Everything that was found, as plain values; and the scores behind it.

    Raises
    ------
    JudgeOutage
        A judge could not be asked; what has been judged is kept.
    """
    scores: dict[str, dict[str, Scores]] = {}
    faithful: dict[str, dict[str, Any]] = {}
    total = len(planned.policies) * len(planned.settings)
    with contextlib.ExitStack() as stack:
        asking = {
            key: stack.enter_context(_asking(planned, plan, tell))
            for key, plan in planned.judges.items()
            if plan.questions
        }
        for policy in planned.policies:
            again = _own_again(planned, policy)
            faithful[policy.name] = _fidelity(planned, policy, again)
            of_policy = scores.setdefault(policy.name, {})
            for setting in planned.settings:
                of_policy[setting.name] = _scores(planned, policy, setting, again, asking)
                tell("scorings", sum(map(len, scores.values())), total)
            if not faithful[policy.name]["sound"]:
                of_policy[AGAIN] = again
        bills = [asked.bill(planned.prices) for asked in asking.values()]
    document = {
        "version": doc.DOCUMENT_VERSION,
        "id": planned.short_id,
        "made_at": now_text(),
        "refiner": version("refiner"),
        "workspace": str(planned.workspace.root),
        "part": to_json(planned.part),
        "metric": planned.metric,
        "policies": [_policy(policy) for policy in planned.policies],
        "settings": [_setting(setting) for setting in planned.settings],
        "fidelity": faithful,
        "judging": bills,
        "comparisons": list(_compare_all(planned, scores)),
        "matrix": _matrix(planned, scores),
    }
    return dict(atomic.finite(plain(document))), scores


@contextlib.contextmanager
def _asking(planned: Planned, plan: JudgePlan, tell: Tell) -> Iterator[Asking]:
    calls = plan.calls > 0
    with judge_by_hand(plan.config, planned.workspace, writer=WRITER, calls=calls) as judge:
        yield Asking(plan, judge, partial(tell, f"judgements of {plan.name}"))


def _scores(
    planned: Planned,
    policy: Policy,
    setting: Setting,
    again: Scores,
    asking: Mapping[str, Asking],
) -> Scores:
    """A policy's rollouts under a setting, by all that is known of its judge, each rollout's own
    judgements first; under its run's own, as they were stored."""
    if identity_of(setting.config) == identity_of(policy.config):
        normalization = policy.config.grpo.advantage_normalization_type
        return stored_scores(policy.rollouts, again, normalization)
    key = planned.judge_key(policy, setting)
    known: dict[Key, Sequence[Judgement]] = dict(planned.judges[key].known)
    if key == planned.judge_key(policy, own_setting(policy.config)):
        known |= planned.recorded[policy.name]
    return _judged(policy, setting.config, known, asking.get(key, NobodyToAsk()))


def _own_again(planned: Planned, policy: Policy) -> Scores:
    """The run's own settings once more, from what was stored with the rollouts alone; the lexical
    judge, which costs nothing, judges what was not."""
    judge = policy.config.judge
    rest = build_judge(judge) if judge.kind == "lexical" else NobodyToAsk()
    return _judged(policy, policy.config, planned.recorded[policy.name], rest)


def _judged(
    policy: Policy, config: RecipeConfig, known: Mapping[Key, Sequence[Judgement]], rest: Judge
) -> Scores:
    judge = RecordedJudge(known, rest, batched=is_batched(config.judge))
    normalization = policy.config.grpo.advantage_normalization_type
    return scores_under(policy.rollouts, config.reward, judge, normalization)


def _fidelity(planned: Planned, policy: Policy, again: Scores) -> dict[str, Any]:
    known, unused = planned.recorded[policy.name], planned.unused[policy.name]
    rejudged = alike = 0
    if policy.config.judge.kind == "lexical":
        questions = planned.questions_under(policy, policy.config.reward)
        requests = [asked for of in questions for asked, _ in of if asked in known]
        today = build_judge(policy.config.judge).judge(requests)
        rejudged = len(requests)
        alike = sum(
            now.score == known[request][0].score
            for request, now in zip(requests, today, strict=True)
        )
    return fidelity(policy.rollouts, again, unused=unused, rejudged=rejudged, judged_alike=alike)


def _compare_all(planned: Planned, scores: ScoresOf) -> Iterator[dict[str, Any]]:
    """Each setting against its baseline, on each policy."""
    configs = {setting.name: setting.config for setting in planned.settings}
    for policy in planned.policies:
        baseline = planned.baseline_of(policy)
        resamples = policy.config.evaluate.bootstrap_samples
        base, judge = scores[policy.name][baseline], judge_fields(configs[baseline])
        for name, other in scores[policy.name].items():
            if other is base:
                continue
            agreement = []
            if judge_fields(configs.get(name, policy.config)) != judge:
                agreement = judges_agree(policy.rollouts, base, other, resamples=resamples)
            which = {"policy": policy.name, "setting": name, "baseline": baseline}
            found = compare(policy.rollouts, base, other, resamples=resamples)
            yield {**which, **found, "agreement": agreement}


def _matrix(planned: Planned, scores: ScoresOf) -> dict[str, Any] | None:
    if len(planned.policies) < 2:
        return None
    metric = planned.metric
    names = [s.name for s in planned.settings]
    return make_matrix(
        metric,
        {p.name: p.rollouts for p in planned.policies},
        {p.name: {n: scores[p.name][n].values(metric) for n in names} for p in planned.policies},
        resamples=planned.policies[0].config.evaluate.bootstrap_samples,
    )


DOCUMENT, REWARDS, TABLE = "rescore.json", "rewards.parquet", "table.md"


def _policy(policy: Policy) -> dict[str, Any]:
    return {
        **picked(policy, "name", "run", "model", "attempt", "sources", "steps", "files"),
        **{"recipe": policy.config.recipe, "stage": policy.stage_id, "data": policy.data_stage},
        "reward": to_json(policy.config.reward),
        "judge": judge_identity(policy.config.judge, policy.sources.get("judge_prompt", "-")),
        "advantages": policy.config.grpo.advantage_normalization_type,
        "rollouts": len(policy.rollouts),
        "groups": len(groups_of(policy.rollouts)),
        "prompts": len({r.prompt.sample_id for r in policy.rollouts}),
    }


def _setting(setting: Setting) -> dict[str, Any]:
    judge = setting.config.judge
    return {
        "name": setting.name,
        "reward": to_json(setting.config.reward),
        "judge": judge_identity(judge, "-") | {"prompt": judge.prompt},
    }


def write(planned: Planned, scores: ScoresOf, document: Mapping[str, Any], folder: Path) -> None:
    """All files; what was there of an earlier call is replaced.

    Raises
    ------
    NoSpaceError
        They did not fit.
    """
    with no_space_guard(folder, "writing the results of a rescoring"):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(folder / REWARDS, encode_rollouts(list(_rows(planned, scores))))
        atomic.write_text(folder / TABLE, doc.markdown(document))
        atomic.write_json(folder / DOCUMENT, document)


def _rows(planned: Planned, every: ScoresOf) -> Iterator[dict[str, Any]]:
    """One row per rollout and setting."""
    for policy in planned.policies:
        for setting, scores in every[policy.name].items():
            for i, rollout in enumerate(policy.rollouts):
                yield {
                    "policy": policy.name,
                    "run": policy.run,
                    "setting": setting,
                    "step": rollout.step,
                    "group": rollout.group,
                    "sample_id": rollout.prompt.sample_id,
                    "sample_index": rollout.sample_index,
                    "status": scores.statuses[i],
                    "total": scores.totals[i],
                    "advantage": scores.advantages[i],
                    **{f"reward/{k}": v for k, v in scores.components[i].items()},
                    "judgements": json.dumps(list(scores.judgements[i]), ensure_ascii=False),
                }


#: Rows of a table that a terminal shows; the files have all.
_SHOWN = 8


def plan_lines(planned: Planned) -> Iterator[str]:
    """Lines on what would be read and asked."""
    for policy in planned.policies:
        steps = f", steps {policy.steps[0]} to {policy.steps[-1]}" if policy.steps else ""
        groups = len({r.group for r in policy.rollouts})
        yield f"{policy.name}: {len(policy.rollouts)} rollouts in {groups} groups{steps}"
    yield "settings: " + "; ".join(setting.name for setting in planned.settings)
    for plan in planned.judges.values():
        if not plan.questions:
            continue
        reused, asked = len(plan.questions) - plan.open, len(plan.questions)
        known = f"{reused} of {asked} questions are answered already"
        if not plan.served:
            yield f"{plan.name}: {known}, {plan.open} are judged here, without calls"
            continue
        kept = f", {plan.kept} are in the workspace's store" if plan.kept else ""
        tokens = f" (about {plan.prompt_tokens:,} tokens of prompts)" if plan.calls else ""
        yield f"{plan.name}: {known}{kept}; {plan.calls} calls{tokens}"


def document_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The result."""
    for place, section in enumerate(doc.sections(document)):
        if place:
            yield from ("", f"{section.title}:")
        if section.rows:
            is_long = section.title.startswith("Agreement")
            rows = section.rows[: _SHOWN if is_long else None]
            yield from table_lines(rows, section.header, "  ")
        yield from section.words


def next_lines(document: Mapping[str, Any], folder: Path, words: Sequence[str]) -> Iterator[str]:
    """Lines on where the files are, and a command that makes sense now; ``words`` are those of this
    call."""
    yield ""
    yield f"Files: {folder}/ ({DOCUMENT}, {REWARDS}, {TABLE})"
    yield "Next:"
    if document["comparisons"]:
        yield f"  less {shlex.quote(str(folder / TABLE))}"
    else:
        tried = ["--rubrics", "v3", "--citation-weight", "0.5"]
        yield f"  {shlex.join(['refiner', 'rescore', *words, *tried])}"
