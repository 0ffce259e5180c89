"""What each criterion of a judge teaches, from stored judgements.

In: stored rollouts. Out: a document (JSON-ready): per criterion its difficulty, discrimination,
variation and course over training; correlated pairs; a smaller set with the rank correlation that
it keeps on held-out prompts; and the document as Markdown sections.

A *credit* is a score, or one minus the score of a negative rubric. Definitions:

==============  ================================================================================
credit          mean credit, with its 95 % interval over prompts: low means difficult
discrimination  correlation of its credit with the weighted mean of the answer's other criteria
                (item-rest correlation; Nunnally & Bernstein 1994, "Psychometric Theory")
varies          share of groups (samples of one prompt that are compared) in which it differs: GRPO
                learns nothing from a criterion that is equal for all samples of a group
slope, place    discrimination and difficulty of a two-parameter logistic model
                (Birnbaum 1968), by marginal maximum likelihood (:func:`item_response`)
==============  ================================================================================

A criterion that all prompts share (a static set) has all of these numbers. Criteria of single
prompts (``instance``) have too few answers for numbers of their own: they are grouped by their
source, correlations are within prompts, and only the counts of saturated and dead ones are by
criterion. The same text in several prompts is one criterion of the table if at least
:data:`FEWEST_PROMPTS` have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from refiner_core.contract.fingerprint import derive_seed
from refiner_core.judge_report.measures import paired, plain
from refiner_core.report.people import shown
from refiner_core.report.printing import Section, number, short, with_interval
from refiner_core.rescoring.rollouts import StoredRollout, kendall_tau_b

Floats = npt.NDArray[np.float64]
Row = dict[str, Any]

#: A criterion with a higher mean credit in the last quarter of the steps is saturated; with a lower
#: one than the complement, dead.
SATURATED = 0.95
#: A pair of criteria with a larger correlation is redundant.
REDUNDANT = 0.8
#: A criterion with a smaller slope separates no answers, and has no place.
FLAT = 0.3
#: Fewest answers and criteria of a response model, and fewest prompts of a repeated criterion.
FEWEST_ANSWERS, FEWEST_CRITERIA, FEWEST_PROMPTS = 100, 3, 5
#: By how much the half of the prompts that chooses a set overrates it (`tests.prove.criteria`).
_MARGIN = 0.01
#: Most answers for fits: more cost time and add no digit.
_MOST = 4000
_RESAMPLES = 200
_KEY = ["source", "polarity", "criterion"]
_COUNTED = {"answers": "answer", "prompts": "sample_id"}
_SHOWN = 5
_STATES = ("saturated", "dead")


def rubric_credits(rollouts: Sequence[StoredRollout]) -> pd.DataFrame:
    """One row per answer and criterion; ``credit`` is NaN if the judge gave no score."""
    columns: dict[str, list[Any]] = {}
    for answer, rollout in enumerate(rollouts):
        for entry in rollout.result.judgements:
            if entry["kind"] != "rubric":
                continue
            score = np.nan if entry["score"] is None else float(entry["score"])
            row = {
                **{name: entry[name] for name in (*_KEY, "title", "weight")},
                **{"answer": answer, "group": rollout.group, "step": rollout.step},
                "sample_id": rollout.prompt.sample_id,
                "credit": 1.0 - score if entry["polarity"] == "negative" else score,
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    return pd.DataFrame(columns).astype({"step": float} if columns else {})


def criteria_report(rows: pd.DataFrame, *, keep: float = 0.95, seed: int = 0) -> Row:
    """Numbers of every criterion of :func:`rubric_credits`, which must have rows.

    Parameters
    ----------
    keep
        Rank correlation that a smaller set must keep.
    seed
        Of the split of prompts, and of resampling.
    """
    rows = rows.assign(key=rows.groupby(_KEY, sort=False).ngroup())
    unusable = rows["credit"].isna()
    scored = rows[~rows["answer"].isin(rows["answer"][unusable])]
    parts = scored.assign(whole=scored["weight"] * scored["credit"])[["weight", "whole"]]
    others = parts.groupby(scored["answer"]).transform("sum") - parts
    scored = scored.assign(rest=(others["whole"] / others["weight"]).where(others["weight"] > 0))
    static = scored["source"] != "instance"
    common = static | (scored.groupby("key")["sample_id"].transform("nunique") >= FEWEST_PROMPTS)
    table = [_criterion(part) for _, part in scored[common].groupby("key", sort=False)]
    matrix = _static_matrix(scored[static])
    found: Row = {
        "version": 1,
        **{name: int(rows[key].nunique()) for name, key in _COUNTED.items()},
        "steps": sorted({int(step) for step in rows["step"].dropna()}),
        **{"judgements": len(rows), "unusable": int(unusable.sum())},
        "criteria": table,
        "of_prompts": _of_prompts(scored[~common]),
        "redundant": [],
        "smaller": None,
    }
    by_key = {row.pop("key"): row for row in table}
    if matrix is not None:
        named = [by_key[key] for key in matrix["credit"].columns]
        _response_model(named, matrix["credit"].to_numpy(), seed)
        found["redundant"] = _redundant(matrix["credit"].to_numpy(), named)
        found["smaller"] = smaller = smaller_set(matrix, keep=keep, seed=seed)
        smaller["kept"] = [
            {**{name: named[i][name] for name in ("title", *_KEY)}, "weight": weight}
            for i, weight in smaller["kept"]
        ]
    return plain(found)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- one criterion


def _criterion(part: pd.DataFrame) -> Row:
    first, quarters = part.iloc[0], part["step"].quantile([0.25, 0.75])
    early, late = part[part["step"] <= quarters[0.25]], part[~(part["step"] < quarters[0.75])]
    return {
        **{name: first[name] for name in ("key", "title", *_KEY)},
        **{"weight": float(first["weight"]), "answers": len(part), **_numbers(part)},
        "discrimination": _correlation(part[["credit", "rest"]]),
        "first": float(early["credit"].mean()) if len(early) else None,
        "last": float(late["credit"].mean()),
        "by_step": {int(s): float(m) for s, m in part.groupby("step")["credit"].mean().items()},
        "state": _state(float(late["credit"].mean())),
        **{"slope": None, "place": None},
    }


def _numbers(part: pd.DataFrame) -> Row:
    """Prompts, credit, and share of groups of at least two answers with different credits."""
    spread = part.groupby(["group", "key"])["credit"].agg(["size", "min", "max"])
    spread = spread[spread["size"] > 1]
    varies = float((spread["max"] > spread["min"]).mean()) if len(spread) else None
    prompts = int(part["sample_id"].nunique())
    return {"prompts": prompts, "credit": paired(part, "credit"), "varies": varies}


def _state(credit: float) -> str:
    return "saturated" if credit >= SATURATED else "dead" if credit <= 1 - SATURATED else ""


def _correlation(pairs: pd.DataFrame) -> float | None:
    pairs = pairs.dropna()
    if len(pairs) < 3 or np.ptp(pairs.to_numpy(), axis=0).min() < 1e-9:
        return None
    return float(pairs.corr().iloc[0, 1])


def _of_prompts(rows: pd.DataFrame) -> list[Row]:
    """Criteria of single prompts, by their source."""
    found = []
    for source, part in rows.groupby("source", sort=False):
        late = part[~(part["step"] < part["step"].quantile(0.75))]
        states = late.groupby(["key", "criterion"], sort=False)["credit"].mean().map(_state)
        named = {s: [*states.index[states == s].get_level_values(1)] for s in _STATES}
        both = part[["credit", "rest"]]
        found.append(
            {
                **{"source": source, "criteria": int(part["key"].nunique()), **_numbers(part)},
                "discrimination": _correlation(both - both.groupby(part["key"]).transform("mean")),
                "judged_late": len(states),
                **{state: len(texts) for state, texts in named.items()},
                "examples": {state: texts[:_SHOWN] for state, texts in named.items()},
            }
        )
    return found


# ---------------------------------------------------------------- criteria together


def _static_matrix(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Credits and weights of the answers that have all static criteria, with two levels of columns;
    None with fewer than two criteria or answers."""
    if rows["key"].nunique() < 2:
        return None
    index = ["answer", "group", "sample_id"]
    wide = rows.pivot_table(index=index, columns="key", values=["credit", "weight"], sort=False)
    wide = wide.dropna()
    return wide if len(wide) > 1 else None


def _redundant(credits: Floats, named: Sequence[Row]) -> list[Row]:
    """Pairs of criteria with correlated credits, the most correlated first."""
    with np.errstate(invalid="ignore", divide="ignore"):
        correlations = np.atleast_2d(np.corrcoef(credits, rowvar=False))
    above = np.argwhere(np.triu(np.nan_to_num(correlations) >= REDUNDANT, 1))
    pairs = sorted(((float(correlations[i, j]), i, j) for i, j in above), reverse=True)
    return [
        {"first": named[i]["title"], "second": named[j]["title"], "correlation": r}
        for r, i, j in pairs
    ]


def _response_model(named: Sequence[Row], credits: Floats, seed: int) -> None:
    """Set slope and place of the criteria that vary, if there are enough of them and of answers."""
    varying = np.flatnonzero(np.ptp(credits, axis=0) > 0).tolist()
    if len(credits) < FEWEST_ANSWERS or len(varying) < FEWEST_CRITERIA:
        return
    chosen = np.random.default_rng(seed).permutation(len(credits))[:_MOST]
    slopes, places = item_response(credits[chosen][:, varying])
    for i, slope, place in zip(varying, slopes, places, strict=True):
        named[i]["slope"] = float(slope)
        named[i]["place"] = float(place) if abs(slope) >= FLAT else None


def item_response(credits: Floats) -> tuple[Floats, Floats]:
    """Slopes a and places b of a two-parameter logistic model of credits [answers, criteria]:
    P(met) = 1 / (1 + exp(-a (quality - b))), quality standard normal over answers.

    Marginal maximum likelihood (Bock & Lieberman 1970, "Fitting a response model for n
    dichotomously scored items", Psychometrika 35:179-197) over 21 Gauss-Hermite points, with weak
    normal priors on a and on the intercept, so that criteria that are nearly always met have finite
    parameters. A credit between 0 and 1 counts as a share of a success. Slopes of criteria that
    repeat each other come out too high: the model takes them as independent at a given quality.
    """
    from scipy.optimize import minimize

    points, weights = np.polynomial.hermite_e.hermegauss(21)
    patterns, counts = np.unique(credits, axis=0, return_counts=True)
    items = credits.shape[1]

    def loss(values: Floats) -> tuple[float, Floats]:
        slope, intercept = values[:items], values[items:]
        logits = np.outer(points, slope) + intercept
        met, unmet = -np.logaddexp(0, -logits), -np.logaddexp(0, logits)
        joint = patterns @ met.T + (1 - patterns) @ unmet.T + np.log(weights / weights.sum())
        top = joint.max(axis=1, keepdims=True)
        size = np.exp(joint - top)
        of_pattern = size.sum(axis=1, keepdims=True)
        posterior = counts[:, None] * size / of_pattern
        off = posterior.T @ patterns - posterior.sum(axis=0)[:, None] * np.exp(met)
        gradient = np.concatenate([(off * points[:, None]).sum(axis=0), off.sum(axis=0)])
        likelihood = float(counts @ (np.log(of_pattern) + top)[:, 0])
        away = np.concatenate([slope - 1.0, intercept / 3.0])
        pull = np.concatenate([slope - 1.0, intercept / 9.0])
        return float(away @ away) / 2 - likelihood, pull - gradient

    found = minimize(loss, np.repeat([1.0, 0.0], items), jac=True, method="L-BFGS-B").x
    slope, intercept = found[:items], found[items:]
    return slope, -intercept / np.where(np.abs(slope) < 1e-6, 1e-6, slope)


# ---------------------------------------------------------------- a smaller set


def smaller_set(matrix: pd.DataFrame, *, keep: float, seed: int) -> Row:
    """The fewest static criteria, with new weights, that order answers as all of them do.

    Criteria are added one by one, each the one that leaves the smallest squared error of the
    weighted sum, with non-negative least squares for the weights, on half of the prompts. The
    first size that reaches ``keep`` there, with a margin, is taken. Numbers are those of the other
    half: ``spearman`` over all answers, with an interval over prompts, and ``kendall``, the mean
    tau-b within groups, which decides advantages. ``kept`` has positions and weights.
    """
    prompts = matrix.index.get_level_values("sample_id")
    held = np.array([derive_seed(seed, "criteria", str(prompt)) % 2 == 1 for prompt in prompts])
    credits, weights = (
        matrix["credit"].to_numpy(),
        matrix["weight"][matrix["credit"].columns].iloc[0].to_numpy(),
    )
    found: Row = {"of": len(weights), "keep": keep, "reached": False, "kept": []}
    if min(held.sum(), (~held).sum()) < 2:
        return found
    rng = np.random.default_rng(seed)
    fitted = rng.permutation(np.flatnonzero(~held))[:_MOST]
    full = credits @ weights
    for chosen, new in _orders(credits[fitted], weights):
        smaller = credits[:, chosen] @ new
        if _spearman(smaller[fitted], full[fitted]) < min(keep + _MARGIN, 1.0):
            continue
        low, high = _spearman_interval(smaller[held], full[held], prompts[held], rng)
        return found | {
            "reached": len(chosen) < len(weights),
            **{"spearman": _spearman(smaller[held], full[held]), "low": low, "high": high},
            "kendall": _within(smaller[held], full[held], matrix[held]),
            "kept": [(i, float(w)) for i, w in zip(chosen, new, strict=True)],
            "answers": int(held.sum()),
            "prompts": int(prompts[held].nunique()),
        }
    return found


def _orders(credits: Floats, weights: Floats) -> Iterator[tuple[list[int], Floats]]:
    """Sets of growing size with their weights."""
    from scipy.optimize import nnls

    centred = credits - credits.mean(axis=0)
    wanted = centred @ weights
    gram, against = centred.T @ centred, centred.T @ wanted
    # The same least squares in as many rows as criteria.
    root = np.linalg.cholesky(gram + 1e-9 * np.eye(len(gram)) * max(np.trace(gram), 1.0))
    target = np.linalg.solve(root, against)
    chosen: list[int] = []
    while len(chosen) < len(weights):
        options = [i for i in range(len(weights)) if i not in chosen]
        fits = {i: nnls(root.T[:, [*chosen, i]], target) for i in options}
        best = min(options, key=lambda i: fits[i][1])
        chosen.append(best)
        used = [i for i, w in zip(chosen, fits[best][0], strict=True) if w > 0]
        yield used, fits[best][0][fits[best][0] > 0]


def _spearman(a: Floats, b: Floats) -> float:
    """Rank correlation; 0 if a side is constant."""
    ranks = pd.DataFrame({"a": a, "b": b}).round(9).rank()
    return _correlation(ranks) or 0.0


def _spearman_interval(
    a: Floats, b: Floats, prompts: pd.Index, rng: np.random.Generator
) -> tuple[float, float]:
    """Percentiles over resampled prompts."""
    places = list(pd.Series(range(len(a))).groupby(prompts).indices.values())
    draws = rng.integers(len(places), size=(_RESAMPLES, len(places)))
    chosen = (np.concatenate([places[i] for i in draw]) for draw in draws)
    low, high = np.quantile([_spearman(a[c], b[c]) for c in chosen], [0.025, 0.975])
    return float(low), float(high)


def _within(a: Floats, b: Floats, matrix: pd.DataFrame) -> Any:
    """Mean tau-b within groups, over prompts."""
    index = matrix.index.to_frame(index=False)
    rows = [
        {"sample_id": prompt, "tau": kendall_tau_b(a[places], b[places])}
        for (prompt, _), places in index.groupby(["sample_id", "group"]).indices.items()
        if len(places) > 1
    ]
    taus = pd.DataFrame(rows, columns=["sample_id", "tau"]).astype({"tau": float})
    return paired(taus, "tau")


# ---------------------------------------------------------------- text


def sections(document: Mapping[str, Any]) -> Iterator[Section]:
    """The document as tables, without commands."""
    if document["criteria"]:
        header = ("criterion", "source", "credit", "first to last quarter", "discrimination",
                  "varies in", "slope", "place", "")  # fmt: skip
        yield Section("Criteria", _WORDS, header, tuple(map(_cells, document["criteria"])))
    for one in document["of_prompts"]:
        yield _section_of_prompts(one)
    pairs = tuple(
        (pair["first"], pair["second"], number(pair["correlation"], 2))
        for pair in document["redundant"]
    )
    if pairs:
        words = ("Their slopes come out too high.",)
        yield Section("Redundant pairs", words, ("criterion", "criterion", "correlation"), pairs)
    if document["smaller"] is not None:
        yield _section_of_set(document["smaller"], document)


_WORDS = (
    "Credit is the mean share of full marks, with its 95 % interval over prompts; a low one is "
    "difficult. Discrimination is the correlation with the other criteria of an answer. GRPO "
    "learns from a criterion in the share of groups in which it varies. Slope and place are those "
    "of a two-parameter logistic model.",
)


_BATCHED = (
    "This judge is asked about all criteria of an answer in one call: a smaller set makes calls "
    "shorter, not fewer, and may change its scores."
)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    sign = "-" if row["polarity"] == "negative" else "+"
    first, last = (number(row[name], 2) for name in ("first", "last"))
    return (
        f"{sign} {row['title']}",
        row["source"],
        shown(row["credit"], 2),
        f"{first} to {last}",
        number(row["discrimination"], 2),
        _percent(row["varies"]),
        *(number(row[name], 2) for name in ("slope", "place")),
        row["state"],
    )


def _percent(share: float | None) -> str:
    return number(None) if share is None else f"{share:.0%}"


def _section_of_prompts(one: Mapping[str, Any]) -> Section:
    words = [
        f"{one['criteria']} criteria ({one['source']}) of {one['prompts']} prompts. They are shown "
        "together: each has too few answers for numbers of its own. Discrimination is within "
        "prompts."
    ]
    for state, examples in one["examples"].items():
        if examples:
            words.append(f"Some that are {state}: " + "; ".join(map(repr, examples)) + ".")
    header = ("credit", "discrimination", "varies in", "judged in the last quarter", "saturated",
              "dead")  # fmt: skip
    cells = (
        *(shown(one["credit"], 2), number(one["discrimination"], 2), _percent(one["varies"])),
        *(str(one[name]) for name in ("judged_late", "saturated", "dead")),
    )
    return Section("Criteria of single prompts", tuple(words), header, (cells,))


def _section_of_set(smaller: Mapping[str, Any], document: Mapping[str, Any]) -> Section:
    title, count, of = "A smaller set", len(smaller["kept"]), smaller["of"]
    if not smaller["reached"]:
        text = f"No smaller set keeps a rank correlation of {smaller['keep']:g}."
        return Section(title, (text,))
    spearman = with_interval(smaller["spearman"], smaller["low"], smaller["high"], 2)
    words = (
        f"{count} of {of} static criteria ({count / of:.0%} of their questions), with new weights, "
        f"keep a rank correlation of {spearman} "
        f"(Spearman, {smaller['answers']} answers to {smaller['prompts']} prompts that did not "
        f"choose it); within groups, Kendall's tau-b is {shown(smaller['kendall'], 2)}. Both "
        "compare the part of the reward that these criteria make.",
        *[_BATCHED] * bool(document.get("batched")),
        f"Try it on stored answers: `{document.get('command', '')}`",
    )
    rows = tuple((kept["title"], short(kept["weight"])) for kept in smaller["kept"])
    return Section(title, words, ("criterion", "weight"), rows)
