"""People's labels: a blind form to fill in, and what the filled forms say about the judge.

::

    runs ─> drawn answers ─> form.jsonl (shuffled), key.json ─> people ─> agreement · errors of the
                                                                judge · corrected means of each run

In: runs with evaluations; filled copies of a form. Out: ``forms/ID`` in the workspace; and
``people.json`` of each run, which report, comparison of a sweep and card show.

A form has one question per line; lines of one answer stand together, answers are shuffled over all
models and runs, and nothing tells where one comes from. One answer is drawn for each of the drawn
prompts, and the same prompts are drawn for every model.
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
from refiner_core.contract.fingerprint import derive_seed, digest
from refiner_core.contract.kinds import model_order
from refiner_core.contract.protocols import protocol_name
from refiner_core.contract.raw_rows import json_lines
from refiner_core.contract.records import RunRecord
from refiner_core.contract.types import Judgement, JudgeRequest
from refiner_core.evaluation.metric_names import BY_PEOPLE
from refiner_core.rescoring.labels import LabelledQuestion, corrected_mean, labels_report
from refiner_core.rescoring.rollouts import (
    Question,
    RecordedJudge,
    StoredRollout,
    items_of,
    questions_of,
    recorded,
)
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
#: Components of a reward that people's labels give, and their metrics.
_OF_RUBRICS = {"rubric": "rubric_score"}
_OF_ALL = {
    **{n: n for n in ("citation_precision", "citation_recall", "citation_f1")},
    "total": "reward",
}


class LabelForm(NamedTuple):
    """A written form: its file, the key, numbers of answers and questions."""

    form: Path
    key: Path
    answers: int
    questions: int


class _Drawn(NamedTuple):
    """A drawn answer with its questions, and the judge's judgements of them."""

    policy: SampledPolicy
    rollout: StoredRollout
    questions: Sequence[Question]
    judged: Mapping[JudgeRequest, Judgement]

    @property
    def place(self) -> dict[str, Any]:
        """Its place, as in a key."""
        return {
            **{"run": self.policy.run, "stage": self.policy.stage_id},
            **{"model": self.policy.model, "decoding": self.policy.name.split()[-1]},
            "sample_id": self.rollout.prompt.sample_id,
            "sample_index": self.rollout.sample_index,
        }


# ---------------------------------------------------------------- writing a form


def write_label_form(
    runs: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    samples: int = SAMPLES,
    model: str = "",
    decoding: str = "",
    citations: bool = False,
    seed: int = 0,
) -> LabelForm:
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
    LabelForm
        ``form.form`` is for people; its key stays in the workspace.

    Raises
    ------
    ConfigurationError
        A run has no such evaluation, or its answers have no questions.
    DataError, NoSpaceError, UnsupportedError
        Files are gone or do not fit on the disk, or a run trains an agent.
    """
    ws = Workspace.read_only(workspace)
    policies = [_policy(ws, run, model, decoding) for run in _runs(ws, runs)]
    drawn = [one for policy in policies for one in _draw(policy, samples, seed)]
    name = digest([[one.place for one in drawn], citations, seed])[:12]
    order = list(range(len(drawn)))
    random.Random(derive_seed(seed, "form", name)).shuffle(order)
    rows: list[dict[str, Any]] = []
    key = {}
    for place in order:
        for request, _ in drawn[place].questions:
            if request.kind == "rubric" or citations:
                number = f"{len(rows) + 1:04d}"
                rows.append(_row(name, number, request, drawn[place].rollout))
                key[number] = {"answer": place, "question": list(_identity(request))}
    if not rows:
        raise ConfigurationError(
            "The drawn answers have no questions for people.",
            expected="answers with an answer block, and rubrics (or --citations)",
            fix="draw more with --samples, or add --citations",
        )
    folder = ws.layout.forms / name
    answers = [one.place for one in drawn]
    content = {"version": 1, "form": name, "citations": citations, "answers": answers, "rows": key}
    with no_space_guard(folder, "writing a form for labels"):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_json(folder / KEY, content)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        atomic.write_text(folder / FORM, "".join(lines))
    return LabelForm(folder / FORM, folder / KEY, len(drawn), len(rows))


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
    what = "a run with evaluated answers"
    records = [required_run(workspace, name, what) for name in found]
    return list({record.run: record for record in records}.values())


def _policy(workspace: Workspace, run: RunRecord, model: str, decoding: str) -> SampledPolicy:
    """The evaluated answers of one model of a run."""
    done = [
        name.removeprefix("evaluate-")
        for name, stage in run.stages.items()
        if name.startswith("evaluate-") and workspace.read_result(stage) is not None
    ]
    trained = [name for name in done if not protocol_name(name)]
    chosen = model or max(trained, key=model_order, default="")
    part = RolloutSelection(
        "evaluation", models=(chosen,) if chosen else (), decodings=(decoding,) if decoding else ()
    )
    policies = read_policies(workspace, [run], part)
    return max(policies, key=lambda policy: policy.name.endswith("sampled"))


def _draw(policy: SampledPolicy, samples: int, seed: int) -> Iterator[_Drawn]:
    """One scored answer for each of so many prompts, drawn by the prompts' names."""
    by_prompt: dict[str, list[StoredRollout]] = {}
    for rollout in policy.rollouts:
        if rollout.result.total is not None:
            by_prompt.setdefault(rollout.prompt.sample_id, []).append(rollout)
    names = sorted(by_prompt, key=lambda name: derive_seed(seed, "label", name))
    chosen = []
    for name in names[:samples]:
        answers = by_prompt[name]
        chosen.append(answers[derive_seed(seed, "answer", name) % len(answers)])
    return _with_questions(policy, chosen)


def _with_questions(policy: SampledPolicy, chosen: Sequence[StoredRollout]) -> Iterator[_Drawn]:
    asked = questions_of(items_of(chosen), policy.config.reward)
    for rollout, questions in zip(chosen, asked, strict=True):
        judged = recorded([rollout], [questions])
        if any(request not in judged for request, _ in questions):
            raise DataError(
                f"The questions on answers of run {policy.run} are not those that were judged",
                expected=f"the rubric set {policy.config.reward.static_rubrics} as it was",
                fix="put the file back as it was",
            )
        yield _Drawn(policy, rollout, questions, judged)


def _identity(request: JudgeRequest) -> tuple[str, str, str]:
    return request.kind, request.text, request.reference


def _row(form: str, number: str, request: JudgeRequest, rollout: StoredRollout) -> dict[str, Any]:
    """One line of a form. The prompt has the evidence, which the judge of a rubric does not see."""
    rubric = request.kind == "rubric"
    return {
        **{"form": form, "id": number, "asks": ASKS[request.kind], "question": request.question},
        **({"prompt": rollout.prompt.prompt_text} if rubric else {}),
        "answer": request.text,
        "criterion" if rubric else "reference": request.reference,
        "label": None,
    }


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
        ``people``, ``pairs``, ``alpha``; ``judge``: its sensitivity and specificity by kind of
        question; ``corrected``: means as entries of evaluations, each with ``judged``, the judge's
        own mean; ``unlabelled`` questions.

    Raises
    ------
    DataError
        A row is invalid; the message has all of them.
    """
    ws = Workspace.read_only(workspace)
    key, labels = _labels(ws, files)
    policies = _policies_of(ws, key)
    drawn = [_found(policies, place) for place in key["answers"]]
    by_answer: dict[int, dict[tuple[str, ...], dict[str, float]]] = {}
    for number, row in key["rows"].items():
        given = {person: found[number] for person, found in labels.items() if number in found}
        by_answer.setdefault(row["answer"], {})[tuple(row["question"])] = given
    questions = [
        question
        for place, one in enumerate(drawn)
        for question in _labelled(one, by_answer.get(place, {}))
    ]
    corrected = [
        entry
        for (run, _, _), policy in policies.items()
        for entry in _corrected(ws, policy, run, drawn, by_answer, citations=key["citations"])
    ]
    document = {
        **{"version": 1, "form": key["form"], "at": now_text()},
        **labels_report(questions),
        "corrected": corrected,
        "unlabelled": sum(not given for rows in by_answer.values() for given in rows.values()),
    }
    for run in dict.fromkeys(place["run"] for place in key["answers"]):
        own = [entry for entry in corrected if entry["run"] == run]
        rows = [row for row in _unblinded(key, labels) if row["run"] == run]
        ws.write_people(run, key["form"], {**document, "corrected": own, "labels": rows})
    return document


def _labels(
    workspace: Workspace, files: Sequence[str | Path]
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """The key, and labels by person and row."""
    key: dict[str, Any] = {}
    labels: dict[str, dict[str, float]] = {}
    faults: list[str] = []
    for file in map(Path, files):
        if not file.is_file():
            raise ConfigurationError(
                f"There is no form {file}", expected="a filled form", fix="correct the path"
            )
        if file.stem in labels:
            faults.append(f"{file}: {file.stem} has another file; a file has the name of a person")
        own = labels.setdefault(file.stem, {})
        for line, row, error in json_lines(file):
            what = error or _fault(row, own)
            if not what and not key:
                key = _key(workspace, row["form"])
            if not what and row["form"] != key["form"]:
                faults.append(
                    f"{file}:{line}: it is of form {row['form']}, others of {key['form']}"
                )
                break
            if not what and str(row["id"]) not in key["rows"]:
                what = f"the form has no id {row['id']}"
            if what:
                faults.append(f"{file}:{line}: {what}")
            elif row["label"] is not None:
                own[str(row["id"])] = float(row["label"])
    if faults:
        raise DataError(
            f"{len(faults)} rows cannot be read:\n  " + "\n  ".join(faults),
            expected="rows of one form as written, each with a label from 0 to 1, or null",
            fix="correct these rows",
        )
    if not any(labels.values()):
        raise DataError(
            f"{', '.join(map(str, files))}: no row has a label",
            expected='"label": 1 for yes, 0 for no, or a number between',
            fix="fill in the form",
        )
    return key, labels


def _fault(row: Any, own: Mapping[str, float]) -> str:
    """What is wrong with a row by itself; empty if nothing is."""
    if not isinstance(row, dict) or not {"form", "id", "label"} <= row.keys():
        return "it is no row of a form (it lacks form, id or label)"
    label = row["label"]
    known = label is None or (isinstance(label, int | float) and 0 <= label <= 1)
    if not known:
        return f"the label of {row['id']} is {label!r}, not a number from 0 to 1"
    return f"{row['id']} has a label already" if str(row["id"]) in own else ""


def _key(workspace: Workspace, form: Any) -> dict[str, Any]:
    path = workspace.layout.forms / str(form) / KEY
    known = str(form).isalnum() and path.is_file()
    if not known:
        raise ConfigurationError(
            f"{workspace.root} has no form {form}",
            expected=f"the workspace in which it was written, with {KEY} of the form",
            fix="name it with workspace=DIR",
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _unblinded(
    key: Mapping[str, Any], labels: Mapping[str, Mapping[str, float]]
) -> Iterator[dict[str, Any]]:
    for person, given in labels.items():
        for number, label in given.items():
            row = key["rows"][number]
            kind, text, reference = row["question"]
            said = {"kind": kind, "answer": text, "criterion": reference}
            yield {"person": person, **key["answers"][row["answer"]], **said, "label": label}


Policies = Mapping[tuple[str, str, str], SampledPolicy]


def _policies_of(workspace: Workspace, key: Mapping[str, Any]) -> Policies:
    """The evaluated answers of the form's runs, by run, stage and decoding."""
    places = {(p["run"], p["stage"], p["decoding"]): p["model"] for p in key["answers"]}
    found = {}
    for (run, stage, decoding), model in places.items():
        record = required_run(workspace, run, "the run of the form")
        part = RolloutSelection("evaluation", models=(model,), decodings=(decoding,))
        found[run, stage, decoding] = read_policies(workspace, [record], part)[0]
    return found


def _found(policies: Policies, place: Mapping[str, Any]) -> _Drawn:
    policy = policies[place["run"], place["stage"], place["decoding"]]
    wanted = place["sample_id"], place["sample_index"]
    rollout = next(r for r in policy.rollouts if (r.prompt.sample_id, r.sample_index) == wanted)
    return next(_with_questions(policy, [rollout]))


Given = Mapping[tuple[str, ...], Mapping[str, float]]


def _labelled(one: _Drawn, given: Given) -> Iterator[LabelledQuestion]:
    for request, detail in one.questions:
        labels, score = given.get(_identity(request)), one.judged[request].score
        if labels and score is not None:
            fault = detail.get("polarity") == "negative" or request.kind == "citation_needed"
            prompt = one.rollout.prompt.sample_id
            yield LabelledQuestion(prompt, request.kind, fault, score, labels)


def _by_people(one: _Drawn, given: Given) -> Mapping[str, float] | None:
    """Components of the reward with people as the judge; None if a question has no label. Kinds
    that the form does not ask keep the judge's score."""
    known = dict(one.judged)
    for request, _ in one.questions:
        if _identity(request) in given:
            labels = [*given[_identity(request)].values()]
            if not labels:
                return None
            known[request] = Judgement("scored", float(np.mean(labels)))
    items = items_of([one.rollout])
    return compute_rewards(items, one.policy.config.reward, RecordedJudge(known))[0].components


def _corrected(
    workspace: Workspace,
    policy: SampledPolicy,
    run: str,
    drawn: Sequence[_Drawn],
    by_answer: Mapping[int, Given],
    *,
    citations: bool,
) -> Iterator[dict[str, Any]]:
    """Corrected means of a policy, as entries of its evaluation."""
    results = results_of(workspace, policy.stage_id) or {}
    decoding = policy.name.split()[-1]
    entries = {e["metric"]: e for e in results["evaluations"] if e["decoding"] == decoding}
    own = [
        (one, people)
        for place, one in enumerate(drawn)
        if one.policy is policy and (people := _by_people(one, by_answer.get(place, {})))
    ]
    for component, metric in {**_OF_RUBRICS, **(_OF_ALL if citations else {})}.items():
        if metric not in entries:
            continue
        means = _means(policy.rollouts, component)
        rows = [
            (means[one.rollout.prompt.sample_id], judged, people[component])
            for one, people in own
            if (judged := _value(one.rollout, component)) is not None
        ]
        if not rows:
            continue
        of_labelled, judged, labels = np.array(rows, dtype=np.float64).T
        found = corrected_mean(np.array([*means.values()]), of_labelled, judged, labels)
        entry = entries[metric]
        kept = ("stage", "protocol", "protocol_name", "decoding", "under")
        yield {
            **{name: entry[name] for name in kept if name in entry},
            **{name: getattr(found, name) for name in ("value", "low", "high", "n", "interval")},
            **{"metric": f"{metric}/{BY_PEOPLE}", "run": run, "evaluation": policy.stage_id},
            "judged": {name: entry[name] for name in ("value", "low", "high", "n")},
        }


def _means(rollouts: Sequence[StoredRollout], component: str) -> dict[str, float]:
    """The judge's mean of a component by prompt."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        if (value := _value(rollout, component)) is not None:
            found.setdefault(rollout.prompt.sample_id, []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _value(rollout: StoredRollout, component: str) -> float | None:
    result = rollout.result
    return result.total if component == "total" else result.components.get(component)
