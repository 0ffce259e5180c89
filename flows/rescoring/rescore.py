"""A rescoring, carried out; its files, and its output on a terminal.

::

    plan ─> judges ─> scores ─> fidelity · comparisons with the baseline · judge x policy matrix

In: a :class:`~flows.rescoring.rescore_plan.RescorePlan`. Out: the :class:`RescoreResult`, its
document, lines, and ``rescore.json``, ``rewards.parquet``. In the document every share has its
numerator and denominator, every number its interval.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from flows.rescoring.reading import SampledPolicy
from flows.rescoring.rescore_plan import (
    AGAIN,
    WRITER,
    JudgePlan,
    RescorePlan,
    RewardSetting,
    identity_of,
    judge_fields,
)
from flows.stages.judging import judge_by_hand
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.traces import encode_rollouts
from infra.store.workspace import now_text
from refiner_core.contract.fingerprint import digest
from refiner_core.contract.records import picked, to_json
from refiner_core.contract.types import Judge, JudgeUsage
from refiner_core.judge_report.measures import plain
from refiner_core.judges import build_judge
from refiner_core.judges.context import usage_of
from refiner_core.report.printing import MISSING, Section, measured, table_lines
from refiner_core.rescoring.rollouts import (
    RecordedJudge,
    Scores,
    compare,
    fidelity,
    groups_of,
    judge_identity,
    judges_agree,
    make_matrix,
    scores_under,
    stored_scores,
)

#: Receives the numbers of scored and of all rollouts.
Tell = Callable[[int, int], None]
#: Scores by policy, then setting; the run's own are the stored ones.
ScoresOf = Mapping[str, Mapping[str, Scores]]


class RescoreResult(NamedTuple):
    """Results of a rescoring, and the folder of its files."""

    document: dict[str, Any]
    folder: Path


def rescore(
    planned: RescorePlan, folder: str | Path | None = None, tell: Tell = lambda *_: None
) -> RescoreResult:
    """Score stored rollouts again, and write the changes.

    Parameters
    ----------
    planned
        From :func:`flows.api.plan_rescoring`.
    folder
        Folder for the files (default: ``rescores/ID`` in the workspace).
    tell
        Receives the numbers of scored and of all rollouts; each counts once per setting.

    Returns
    -------
    RescoreResult
        The document that is also written as JSON, and the folder.

    Raises
    ------
    JudgeOutage
        A judge does not answer; its judgements so far are kept.
    NoSpaceError
        There is no space for the files.
    WorkspaceError
        The records may have been written by another user.
    """
    planned.workspace.require_trust()  # its records name the judge, and the key that it gets
    document, scores = carry_out(planned, tell)
    where = Path(folder or planned.workspace.layout.rescores / document["id"])
    write(planned, scores, document, where)
    return RescoreResult(document, where)


def carry_out(
    planned: RescorePlan, tell: Tell = lambda *_: None
) -> tuple[dict[str, Any], ScoresOf]:
    """Ask the judges, and score everything; writes nothing.

    Returns
    -------
    document, scores
        The results as plain values, and the scores behind them.

    Raises
    ------
    JudgeOutage
        A judge could not be asked; its judgements so far are kept.
    """
    scores: dict[str, dict[str, Scores]] = {}
    faithful: dict[str, dict[str, Any]] = {}
    done, total = 0, sum(len(p.rollouts) * len(planned.settings) for p in planned.policies)

    def scored(more: int) -> None:
        nonlocal done
        done += more
        tell(done, total)

    with contextlib.ExitStack() as stack:
        judges = {
            plan: stack.enter_context(
                judge_by_hand(
                    plan.config, planned.workspace, writer=WRITER, calls=bool(plan.missing)
                )
            )
            for plan in planned.judges.values()
            if plan.unknown
        }
        for policy in planned.policies:
            again = _own_again(planned, policy)
            faithful[policy.name] = fidelity(policy.rollouts, again)
            of_policy = scores.setdefault(policy.name, {})
            for setting in planned.settings:
                of_policy[setting.name] = _scores(planned, policy, setting, again, judges, scored)
            if not faithful[policy.name]["exact"]:
                of_policy[AGAIN] = again
        bills = [
            _bill(plan, judges.get(plan))
            for plan in planned.judges.values()
            if plan.reused or plan.unknown
        ]
    document = {
        "version": DOCUMENT_VERSION,
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
    # The same question has the same id.
    asked = [document[name] for name in ("part", "policies", "settings", "metric")]
    document["id"] = digest(asked)[:10]
    return dict(atomic.finite(plain(document))), scores


def _bill(plan: JudgePlan, judge: Judge | None) -> dict[str, Any]:
    """Planned and actual cost."""
    usage = (usage_of(judge) if judge is not None else None) or JudgeUsage()
    took = picked(usage, "calls", "failed", "prompt_tokens", "completion_tokens")
    return {**plan.figures(), **took}


def _scores(
    planned: RescorePlan,
    policy: SampledPolicy,
    setting: RewardSetting,
    again: Scores,
    judges: Mapping[JudgePlan, Judge],
    scored: Callable[[int], None],
) -> Scores:
    """A policy's rollouts under a setting; under its run's own, the stored scores."""
    config, normalization = setting.config, policy.config.grpo.advantage_normalization_type
    if identity_of(config) == identity_of(policy.config):
        scored(len(policy.rollouts))
        return stored_scores(policy.rollouts, again, normalization)
    rest = judges.get(planned.judge_of(policy, config))
    judge = RecordedJudge(planned.known(policy, config), rest)
    return scores_under(policy.rollouts, config.reward, judge, normalization, scored)


def _own_again(planned: RescorePlan, policy: SampledPolicy) -> Scores:
    """The run's own settings once more, from the judgements stored with the rollouts alone; others
    come from the lexical judge, which costs nothing."""
    config, normalization = policy.config, policy.config.grpo.advantage_normalization_type
    rest = build_judge(config.judge) if config.judge.kind == "lexical" else None
    judge = RecordedJudge(planned.recorded[policy.name], rest)
    return scores_under(policy.rollouts, config.reward, judge, normalization)


def _compare_all(planned: RescorePlan, scores: ScoresOf) -> Iterator[dict[str, Any]]:
    """Each setting compared with its baseline, on each policy."""
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


def _matrix(planned: RescorePlan, scores: ScoresOf) -> dict[str, Any] | None:
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


DOCUMENT, REWARDS = "rescore.json", "rewards.parquet"


def _policy(policy: SampledPolicy) -> dict[str, Any]:
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


def _setting(setting: RewardSetting) -> dict[str, Any]:
    judge = setting.config.judge
    return {
        "name": setting.name,
        "reward": to_json(setting.config.reward),
        "judge": judge_identity(judge, "-") | {"prompt": judge.prompt},
    }


def write(
    planned: RescorePlan, scores: ScoresOf, document: Mapping[str, Any], folder: Path
) -> None:
    """Write all files, replacing those of an earlier call.

    Raises
    ------
    NoSpaceError
        They did not fit.
    """
    with no_space_guard(folder, "writing the results of a rescoring"):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(folder / REWARDS, encode_rollouts(list(_rows(planned, scores))))
        atomic.write_json(folder / DOCUMENT, document)


def _rows(planned: RescorePlan, every: ScoresOf) -> Iterator[dict[str, Any]]:
    """One row per rollout and setting."""
    for policy in planned.policies:
        for setting, scores in every[policy.name].items():
            columns = zip(policy.rollouts, scores.results, scores.advantages, strict=True)
            for rollout, result, advantage in columns:
                yield {
                    "policy": policy.name,
                    "run": policy.run,
                    "setting": setting,
                    "step": rollout.step,
                    "group": rollout.group,
                    "sample_id": rollout.prompt.sample_id,
                    "sample_index": rollout.sample_index,
                    "status": result.status,
                    "total": result.total,
                    "advantage": advantage,
                    **{f"reward/{k}": v for k, v in result.components.items()},
                    "judgements": json.dumps(result.judgements, ensure_ascii=False),
                }


def plan_lines(planned: RescorePlan) -> Iterator[str]:
    """Lines on the plan: rollouts, questions, calls."""
    for policy in planned.policies:
        steps = f", steps {policy.steps[0]} to {policy.steps[-1]}" if policy.steps else ""
        groups = len({r.group for r in policy.rollouts})
        yield f"{policy.name}: {len(policy.rollouts)} rollouts in {groups} groups{steps}"
    yield "settings: " + "; ".join(setting.name for setting in planned.settings)
    for plan in planned.judges.values():
        number = plan.figures()
        known = f"{number['reused']} of {number['questions']} questions are already answered"
        if plan.unknown and not plan.served:
            yield f"{plan.name}: {known}, {plan.asked} are judged here, without calls"
        elif number["questions"]:
            kept = f", {n} are in the workspace's store" if (n := number["stored"]) else ""
            yield f"{plan.name}: {known}{kept}; {number['calls']} calls"


def document_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The results as lines."""
    for place, section in enumerate(sections(document)):
        if place:
            yield from ("", f"{section.title}:")
        if section.rows:
            yield from table_lines(section.rows, section.header, "  ")
        yield from section.words


def next_lines(document: Mapping[str, Any], folder: Path, words: Sequence[str]) -> Iterator[str]:
    """Lines with the paths of the files, and a suggested command; ``words`` are those of this
    call."""
    yield ""
    yield f"Files: {folder}/ ({DOCUMENT}, {REWARDS})"
    if not document["comparisons"]:
        tried = ["--rubrics", "v3", "--citation-weight", "0.5"]
        yield "Next:"
        yield f"  {shlex.join(['refiner', 'rescore', *words, *tried])}"


#: Version of ``rescore.json``. Raised when an older reader would misread it.
DOCUMENT_VERSION = 1
_COMPARISON = (
    *("setting", "kendall's tau", "best changes", "sign changes", "no signal", "mean total"),
    "unscored",
)
_AGREEMENT = ("question", "pairs", "same score", "kappa", "quadratic kappa", "milder by")
_COUNTED = ("questions", "reused", "stored", "asked", "failed")


def sections(document: Mapping[str, Any]) -> Iterator[Section]:
    """All displayed sections, in order."""
    fidelity = document["fidelity"].items()
    yield Section("Stored rewards", tuple(fidelity_line(*each) for each in fidelity))
    for policy in (p["name"] for p in document["policies"]):
        entries = [c for c in document["comparisons"] if c["policy"] == policy]
        if entries:
            yield Section(
                f"{policy}, compared with {entries[0]['baseline']}",
                (
                    "(best changes: groups that share no best sample with the baseline; no signal: "
                    "groups without spread; in brackets 95 % over prompts)",
                ),
                _COMPARISON,
                tuple(map(_comparison_row, entries)),
            )
    for entry in document["comparisons"]:
        if entry["agreement"]:
            title = f"Agreement of the judges: {entry['policy']}, {entry['setting']}"
            yield Section(title, (), _AGREEMENT, tuple(map(_agreement_row, entry["agreement"])))
    if (matrix := document["matrix"]) is not None:
        title = f"Policies under each setting (mean {matrix['metric']})"
        header = ("policy", *matrix["ranks"])
        yield Section(title, (), header, tuple(_matrix_rows(matrix)))
    if document["judging"]:
        header = ("judge", *_COUNTED, "tokens")
        rows = tuple(map(_judging_row, document["judging"]))
        yield Section("Judging", (judged_line(document),), header, rows)


def _comparison_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """A row with arrows from baseline to setting."""
    return (
        entry["setting"],
        measured(entry["kendall"] or {}, MISSING),
        share(entry["best_changed"]),
        share(entry["sign_changed"]),
        _moved(entry["no_signal"], "{:.0%}"),
        _moved(entry["means"]["total"], "{:.3f}"),
        f"{entry['unscored']['baseline']} → {entry['unscored']['setting']}",
    )


def _agreement_row(found: Mapping[str, Any]) -> tuple[str, ...]:
    """One kind of question."""
    return (
        found["kind"],
        str(found["pairs"]),
        share(found["raw"]),
        measured(found["kappa"], MISSING),
        measured(found["quadratic"], MISSING),
        _number(found["mean_difference"], "{:+.3f}"),
    )


def _judging_row(bill: Mapping[str, Any]) -> tuple[str, ...]:
    tokens = f"{bill['prompt_tokens']} + {bill['completion_tokens']}" if bill["calls"] else MISSING
    counts = (str(bill[name]) for name in _COUNTED)
    return (bill["judge"], *counts, tokens)


def _matrix_rows(matrix: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for policy, cells in matrix["cells"].items():
        ranks = {s: f"  #{r[policy]}" if policy in r else "" for s, r in matrix["ranks"].items()}
        yield (policy, *(measured(cells[s] or {}, MISSING) + rank for s, rank in ranks.items()))


def fidelity_line(name: str, found: Mapping[str, Any]) -> str:
    """Sentence on how well a policy's own settings reproduce the stored values."""
    if not found["exact"]:
        return f"warning: {name}: {found['warning']}"
    advantages = "" if found["advantages"] is None else " and advantages"
    return (
        f"{name}: the run's own settings give back all {found['rollouts']} stored totals"
        f"{advantages}, to the bit."
    )


def judged_line(document: Mapping[str, Any]) -> str:
    """Sentence on the calls to servers, if any."""
    bills = document["judging"]
    asked = sum(bill["asked"] for bill in bills if bill["calls"])
    if not asked:
        return "No server was asked: all judgements were known or not needed."
    calls = sum(bill["calls"] for bill in bills)
    failed = sum(bill["failed"] for bill in bills)
    lost = f"; {failed} failed, and their rollouts are unscored" if failed else ""
    return f"{asked} questions were asked in {calls} calls{lost}."


# ---------------------------------------------------------------- numbers


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def share(found: Mapping[str, Any] | None) -> str:
    """``12/40 = 30 % [18, 45]``."""
    if found is None:
        return MISSING
    text = f"{found['numerator']:.0f}/{found['denominator']} = {100 * found['value']:.0f} %"
    if found["low"] is None:
        return text
    return f"{text} [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def _moved(pair: Mapping[str, Any], form: str) -> str:
    values = [None if e is None else e["value"] for e in (pair["baseline"], pair["setting"])]
    return " → ".join(_number(value, form) for value in values)
