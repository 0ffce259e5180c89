"""People's labels: a blind form to fill in, and what the filled forms say about the judge.

::

    runs ─> drawn answers ─> form.jsonl (shuffled), key.json ─> people ─> agreement · errors of the
                                                                judge · corrected means of each run

In: runs with evaluations; filled copies of a form. Out: ``forms/ID`` in the workspace; and
``people.json`` of each run, which report, comparison of a sweep and card show.

A form has one question per line; lines of one answer stand together, answers are shuffled over all
models and runs, and nothing tells where one comes from. One answer is drawn for each of the drawn
prompts, and the same prompts are drawn for every model. The draw depends on the key alone, so that
reading a form repeats it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flows.rescoring.reading import RolloutSelection, SampledPolicy, read_policies
from flows.running.status import required_run
from flows.stored import results_of
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.sweep_records import read_sweep, sweep_versions, trial_run
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.files import json_lines
from refiner_core.contract.fingerprint import derive_seed, digest
from refiner_core.contract.kinds import model_order
from refiner_core.contract.protocols import protocol_name
from refiner_core.contract.records import RunRecord
from refiner_core.contract.types import Judgement, JudgeRequest
from refiner_core.evaluation.metric_names import BY_PEOPLE
from refiner_core.rescoring import rollouts as stored
from refiner_core.rescoring.labels import LabelledQuestion, corrected_mean, labels_report
from refiner_core.rewards import compute_rewards

#: Default number of answers of each model.
SAMPLES = 50
FORM, KEY = "form.jsonl", "key.json"
#: What a person is asked, by kind of question; 1 is yes, 0 no, numbers between are allowed.
ASKS = {
    "rubric": "Does the criterion hold of the answer?",
    "citation_recall": "Does the reference (the cited evidence) support the answer (a claim)?",
    "citation_precision": "Is the reference (a cited source) relevant to the answer (a claim)?",
    "citation_needed": "Does the answer (a passage of the reference) need a citation?",
}
#: Metrics that people's labels give, with their component of the reward; all but the first need
#: labels of citations.
METRICS = {
    "rubric_score": "rubric",
    **{n: n for n in ("citation_precision", "citation_recall", "citation_f1")},
    "reward": "total",
}
#: Labels of one question by person, and those of an answer by question.
Labels = Mapping[str, float]
OfAnswer = dict[JudgeRequest, dict[str, float]]


class _Drawn(NamedTuple):
    """A drawn answer, its questions, and the judge's judgements of them."""

    policy: SampledPolicy
    rollout: stored.StoredRollout
    questions: Sequence[stored.Question]
    judged: Mapping[JudgeRequest, Judgement]


class _Material(NamedTuple):
    """Drawn answers, and rows of a form: the place of an answer, and a question."""

    drawn: list[_Drawn]
    rows: list[tuple[int, JudgeRequest]]

    def lines(self) -> Iterator[dict[str, Any]]:
        """The rows without the form's id. The prompt has the evidence, which the judge of a rubric
        does not see."""
        for number, (place, request) in enumerate(self.rows, start=1):
            rubric = request.kind == "rubric"
            prompt = {"prompt": self.drawn[place].rollout.prompt.prompt_text} if rubric else {}
            yield {
                **{"id": f"{number:04d}", "asks": ASKS[request.kind]},
                **{"question": request.question, **prompt, "answer": request.text},
                **{"criterion" if rubric else "reference": request.reference, "label": None},
            }

    def places(self) -> Iterator[dict[str, Any]]:
        """What each row is."""
        for place, request in self.rows:
            policy, rollout = self.drawn[place][:2]
            yield {
                **{"run": policy.run, "evaluation": policy.stage_id, "answers": policy.name},
                "sample_id": rollout.prompt.sample_id,
                **{"sample_index": rollout.sample_index, "kind": request.kind},
            }


# ---------------------------------------------------------------- writing a form


def write_label_form(
    runs: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    samples: int = SAMPLES,
    model: str | None = None,
    decoding: str | None = None,
    citations: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Write a blind form for people's labels of evaluated answers.

    Parameters
    ----------
    runs
        Runs, or a sweep for all of its trials (default: the newest run).
    workspace
        The folder that has their records.
    samples
        Number of answers of each run, one per prompt.
    model, decoding
        Whose answers (default: the last trained model, sampled).
    citations
        Also ask the questions on citations, so that ``reward`` can be corrected.
    seed
        Of the draw and the order.

    Returns
    -------
    dict
        ``file`` is for people, ``key`` says what its rows are; numbers of ``answers`` and
        ``questions``.

    Raises
    ------
    ConfigurationError
        A run has no such evaluation, or its answers have no questions.
    DataError, NoSpaceError, UnsupportedError
        Files are gone or do not fit on the disk, or a run trains an agent.
    """
    ws = Workspace.read_only(workspace)
    options = {"samples": samples, "model": model, "decoding": decoding, "citations": citations}
    key: dict[str, Any] = {"runs": [run.run for run in _runs(ws, runs)], "seed": seed, **options}
    material = _material(ws, key)
    if not material.rows:
        raise ConfigurationError(
            "The drawn answers have no questions for people.",
            expected="answers with an answer block, and rubrics (or --citations)",
            fix="draw more with --samples, or add --citations",
        )
    lines = list(material.lines())
    name = digest(lines)[:12]
    key |= {"version": 1, "form": name, "rows": list(material.places())}
    folder = ws.layout.forms / name
    text = "".join(json.dumps({"form": name, **x}, ensure_ascii=False) + "\n" for x in lines)
    with no_space_guard(folder, "writing a form for labels"):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_json(folder / KEY, key)
        atomic.write_text(folder / FORM, text)
    counts = {"answers": len(material.drawn), "questions": len(lines)}
    return {"version": 1, "file": str(folder / FORM), "key": str(folder / KEY), **counts}


def _runs(workspace: Workspace, names: Sequence[str]) -> list[RunRecord]:
    """Runs by name; a sweep's trials for the name of a sweep."""
    found: list[str | None] = []
    for name in names or (None,):
        if name is not None and "/" not in name and sweep_versions(workspace, name):
            trials = read_sweep(workspace, name).trials
            started = (trial_run(workspace, name, f"{t.arm}/seed{t.seed}") for t in trials)
            found += [run for run in started if run is not None]
        else:
            found.append(name)
    records = [required_run(workspace, name, "a run with evaluated answers") for name in found]
    return list({record.run: record for record in records}.values())


def _material(workspace: Workspace, key: Mapping[str, Any]) -> _Material:
    """The answers of a key, and the rows of its form."""
    runs, seed = _runs(workspace, key["runs"]), key["seed"]
    policies = [_policy(workspace, run, key["model"], key["decoding"]) for run in runs]
    drawn = [one for policy in policies for one in _draw(policy, key["samples"], seed)]
    order = list(range(len(drawn)))
    random.Random(derive_seed(seed, "form")).shuffle(order)
    rows = [
        (place, request)
        for place in order
        for request, _ in drawn[place].questions
        if request.kind == "rubric" or key["citations"]
    ]
    return _Material(drawn, rows)


def _policy(
    workspace: Workspace, run: RunRecord, model: str | None, decoding: str | None
) -> SampledPolicy:
    """The evaluated answers of one model of a run."""
    done = [
        name.removeprefix("evaluate-")
        for name, stage in run.stages.items()
        if name.startswith("evaluate-") and workspace.read_result(stage) is not None
    ]
    chosen = model or max((n for n in done if not protocol_name(n)), key=model_order, default="")
    models, decodings = ((name,) if name else () for name in (chosen, decoding))
    part = RolloutSelection("evaluation", models=models, decodings=decodings)
    policies = read_policies(workspace, [run], part)
    return max(policies, key=lambda policy: policy.name.endswith("sampled"))


def _draw(policy: SampledPolicy, samples: int, seed: int) -> Iterator[_Drawn]:
    """One scored answer for each of so many prompts, drawn by the prompts' names."""
    by_prompt: dict[str, list[stored.StoredRollout]] = {}
    for rollout in policy.rollouts:
        if rollout.result.total is not None:
            by_prompt.setdefault(rollout.prompt.sample_id, []).append(rollout)
    names = sorted(by_prompt, key=lambda name: derive_seed(seed, "label", name))
    places = {name: derive_seed(seed, "answer", name) for name in names[:samples]}
    chosen = [by_prompt[name][place % len(by_prompt[name])] for name, place in places.items()]
    asked = stored.questions_of(stored.items_of(chosen), policy.config.reward)
    for rollout, questions in zip(chosen, asked, strict=True):
        judged = stored.recorded([rollout], [questions])
        if any(request not in judged for request, _ in questions):
            raise DataError(
                f"The questions on answers of run {policy.run} are not those that were judged",
                expected=f"the rubric set {policy.config.reward.static_rubrics} as it was",
                fix="put the file back as it was",
            )
        yield _Drawn(policy, rollout, questions, judged)


# ---------------------------------------------------------------- reading forms


def read_label_forms(
    files: Sequence[str | Path], workspace: str | Path = RecipeConfig.workspace
) -> dict[str, Any]:
    """Read filled forms, and record what they say for their runs.

    Parameters
    ----------
    files
        All copies of one form; the name of a file is that of a person.
    workspace
        The workspace in which the form was written.

    Returns
    -------
    dict
        ``people``, ``pairs``; ``judge``: its sensitivity and specificity by kind of question;
        ``corrected``: means as entries of evaluations, each with ``judged``, the judge's own mean;
        ``unlabelled`` questions.

    Raises
    ------
    ConfigurationError
        There is no such file or form.
    DataError
        A row is invalid; the message has all of them.
    """
    ws = Workspace.read_only(workspace)
    key, labels = _labels(ws, files)
    material = _material(ws, key)
    if digest(list(material.lines()))[:12] != key["form"]:
        raise DataError(
            f"The form {key['form']} is not about the answers that its runs have now",
            expected="evaluations and code as they were when it was written",
            fix="write a new form",
        )
    given: list[OfAnswer] = [{} for _ in material.drawn]
    for number, (place, request) in enumerate(material.rows, start=1):
        own = {person: x[f"{number:04d}"] for person, x in labels.items() if f"{number:04d}" in x}
        given[place][request] = own
    own_answers = list(zip(material.drawn, given, strict=True))
    policies = {id(one.policy): one.policy for one in material.drawn}.values()
    wanted = [*METRICS][: None if key["citations"] else 1]
    corrected = [x for policy in policies for x in _corrected(ws, policy, own_answers, wanted)]
    document = {
        **{"version": 1, "form": key["form"], "at": now_text()},
        **labels_report([q for one, found in own_answers for q in _labelled(one, found)]),
        "corrected": corrected,
        "unlabelled": sum(not found for answer in given for found in answer.values()),
    }
    places = {f"{i:04d}": place for i, place in enumerate(key["rows"], start=1)}
    rows = [
        {"person": person, "id": number, **places[number], "label": label}
        for person, found in labels.items()
        for number, label in found.items()
    ]
    for run in key["runs"]:
        own_part = {
            name: [row for row in part if row["run"] == run]
            for name, part in (("corrected", corrected), ("labels", rows))
        }
        ws.write_people(run, key["form"], {**document, **own_part})
    return document


def _labels(
    workspace: Workspace, files: Sequence[str | Path]
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """The key, and labels by person and row."""
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.is_file() or [p.stem for p in paths].count(path.stem) > 1:
            raise ConfigurationError(
                f"{path} is no file, or not the only one of {path.stem}",
                expected="filled forms, each with the name of a person",
                fix="correct the path, or rename one",
            )
    lines = [(path, *line) for path in paths for line in json_lines(path)]
    rows = [row for _, _, row, _ in lines if isinstance(row, dict)]
    if len(forms := {str(row.get("form")) for row in rows}) != 1:
        raise DataError(
            f"The files have rows of {len(forms)} forms: {', '.join(sorted(forms))}",
            expected="copies of one form",
            fix="read the copies of each form together",
        )
    key = _key(workspace, forms.pop())
    ids = {f"{number:04d}" for number in range(1, len(key["rows"]) + 1)}
    labels: dict[str, dict[str, float]] = {path.stem: {} for path in paths}
    faults: list[str] = []
    for path, line, row, error in lines:
        own = labels[path.stem]
        if what := error or _fault(row, own, ids):
            faults.append(f"{path}:{line}: {what}")
        elif row["label"] is not None:
            own[row["id"]] = float(row["label"])
    if not faults and not any(labels.values()):
        faults = [f"{', '.join(map(str, paths))}: no row has a label"]
    if faults:
        raise DataError(
            f"{len(faults)} rows cannot be read:\n  " + "\n  ".join(faults) + "\n",
            expected="rows of one form, each with a label from 0 (no) to 1 (yes), or null",
            fix="correct these rows",
        )
    return key, labels


def _fault(row: Any, own: Labels, ids: set[str]) -> str:
    """What is wrong with a row; empty if nothing is."""
    if not isinstance(row, dict) or not {"form", "id", "label"} <= row.keys():
        return "it is no row of a form (it lacks form, id or label)"
    if row["id"] not in ids:
        return f"the form has no id {row['id']}"
    label = row["label"]
    if label is not None and not (isinstance(label, int | float) and 0 <= label <= 1):
        return f"the label of {row['id']} is {label!r}, not a number from 0 to 1"
    return f"{row['id']} has a label already" if row["id"] in own else ""


def _key(workspace: Workspace, form: str) -> dict[str, Any]:
    path = workspace.layout.forms / form / KEY
    if not form.isalnum() or not path.is_file():
        raise ConfigurationError(
            f"{workspace.root} has no form {form}",
            expected=f"the workspace in which it was written, with {KEY} of the form",
            fix="name it with workspace=DIR",
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _labelled(one: _Drawn, given: OfAnswer) -> Iterator[LabelledQuestion]:
    for request, detail in one.questions:
        labels, score = given.get(request), one.judged[request].score
        if labels and score is not None:
            fault = detail.get("polarity") == "negative" or request.kind == "citation_needed"
            prompt = one.rollout.prompt.sample_id
            yield LabelledQuestion(prompt, request.kind, fault, score, labels)


def _by_people(one: _Drawn, given: OfAnswer) -> Mapping[str, float]:
    """Components of the reward with people as the judge; empty if a question has no label. Kinds
    that the form does not ask keep the judge's score."""
    if not all(given.values()):
        return {}
    means = {r: Judgement("scored", float(np.mean([*x.values()]))) for r, x in given.items()}
    judge = stored.RecordedJudge({**one.judged, **means})
    items = stored.items_of([one.rollout])
    return compute_rewards(items, one.policy.config.reward, judge)[0].components


def _corrected(
    workspace: Workspace,
    policy: SampledPolicy,
    answers: Sequence[tuple[_Drawn, OfAnswer]],
    metrics: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Corrected means of a policy, as entries of its evaluation."""
    decoding = policy.name.split()[-1]
    results = (results_of(workspace, policy.stage_id) or {})["evaluations"]
    entries = {e["metric"]: e for e in results if e["decoding"] == decoding}
    people = [(one.rollout, _by_people(one, x)) for one, x in answers if one.policy is policy]
    for metric in (metric for metric in metrics if metric in entries):
        component, means = METRICS[metric], dict[str, list[float]]()
        for rollout in policy.rollouts:
            if (value := _value(rollout, component)) is not None:
                means.setdefault(rollout.prompt.sample_id, []).append(value)
        of_prompt = {name: float(np.mean(values)) for name, values in means.items()}
        rows = [
            (of_prompt[rollout.prompt.sample_id], judged, found[component])
            for rollout, found in people
            if found and (judged := _value(rollout, component)) is not None
        ]
        if rows:
            mean = corrected_mean(np.array([*of_prompt.values()]), *np.array(rows, dtype=float).T)
            entry = entries[metric]
            same = ("stage", "protocol", "protocol_name", "decoding", "under")
            yield {
                **{name: entry[name] for name in same if name in entry},
                **{n: getattr(mean, n) for n in ("value", "low", "high", "n", "interval")},
                "metric": f"{metric}/{BY_PEOPLE}",
                **{"run": policy.run, "evaluation": policy.stage_id},
                "judged": {name: entry[name] for name in ("value", "low", "high", "n")},
            }


def _value(rollout: stored.StoredRollout, component: str) -> float | None:
    result = rollout.result
    return result.total if component == "total" else result.components.get(component)
