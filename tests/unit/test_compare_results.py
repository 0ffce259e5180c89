"""Comparisons of two models, or two arms over seeds, from result files written by hand."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.results import RESULTS_VERSION, compare_results

PROTOCOLS: dict[str, Any] = {
    "p1": {"data": "here", "sampling": {"temperature": 1.0, "data": "x", "top_p": 1.0}, "judge": 1},
    "p2": {
        "data": "there",
        "sampling": {"temperature": 0.5, "data": "y", "top_p": 1.0},
        "judge": 1,
    },
}
METRICS = ("rubric_score", "reward", "oracle", "citation_f1")


def evaluated(folder: Path, shift: float = 0.0, **changed: Any) -> Path:
    """An evaluation of four prompts; ``changed`` gives metrics other protocols, None takes them."""
    folder.mkdir(parents=True)
    values = {"rubric_score": [0.5, 0.25, 0.75, None], "reward": [1.0, 2.0, 3.0, 4.0]}
    values |= {"oracle": [None] * 4, "citation_f1": [0.0, 1.0, 0.5, 0.5]}
    rows = [
        {"sample_id": f"s{i}", "response_text": "…"}
        | {m: None if v[i] is None else v[i] + shift * (i + 1) for m, v in values.items()}
        for i in range(4)
    ]
    columns = {m: pa.array([r[m] for r in rows], pa.float64()) for m in METRICS}
    texts = {k: pa.array([r[k] for r in rows]) for k in ("sample_id", "response_text")}
    pq.write_table(pa.table(texts | columns), folder / "sampled.parquet")
    entries = [
        {"decoding": "sampled", "metric": metric, "value": 0.5 + shift, "protocol_name": "judge@v1",
         "protocol": changed.get(metric, "p1"), "samples_file": "sampled.parquet"}
        for metric in METRICS
        if changed.get(metric, "p1")
    ]  # fmt: skip
    used = {e["protocol"]: PROTOCOLS[e["protocol"]] for e in entries}
    results = {"version": RESULTS_VERSION, "evaluations": entries, "protocols": used}
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_each_metric_of_both_is_compared_prompt_by_prompt(tmp_path: Path) -> None:
    a, b = evaluated(tmp_path / "a", 0.125), evaluated(tmp_path / "b")
    found = compare_results([a], [b])
    assert [row["metric"] for row in found] == ["rubric_score", "reward", "citation_f1"], (
        "no prompt has an oracle on both sides"
    )
    row = found[0]
    # 0.125 * (1, 2, 3): a mean of 0.25 and a deviation of 0.125, over three prompts.
    half = 4.302653 * 0.125 / 3**0.5
    assert (row.pop("low"), row.pop("high")) == pytest.approx((0.25 - half, 0.25 + half))
    assert row.pop("p_value") == pytest.approx(0.0742, abs=1e-4)
    assert row == {
        **{"decoding": "sampled", "metric": "rubric_score", "difference": 0.25},
        **{"protocol": "p1", "protocol_name": "judge@v1", "a": 0.625, "b": 0.5},
        **{"n": 3, "excluded": 1, "seeds": 1, "interval": "t over prompts"},
    }
    assert [r["metric"] for r in compare_results([a], [b], metrics=["citation_f1"])] == [
        "citation_f1"
    ]


def test_seeds_are_paired_in_order_and_means_are_over_them(tmp_path: Path) -> None:
    arm = [evaluated(tmp_path / f"a{s}", 0.125 * (s + 1)) for s in range(2)]
    base = [evaluated(tmp_path / f"b{s}", 0.125 * s) for s in range(2)]
    row = compare_results(arm, base, metrics=["reward"])[0]
    assert (row["seeds"], row["n"], row["difference"]) == (2, 4, 0.3125)
    assert (row["a"], row["b"]) == (0.5 + 0.1875, 0.5 + 0.0625)
    for other in ([], base[:1]):
        with pytest.raises(ConfigurationError, match="2 evaluations cannot be paired with"):
            compare_results(arm, other)
    with pytest.raises(ConfigurationError, match="0 evaluations cannot be paired with 0"):
        compare_results([], [])


def test_other_protocols_are_refused_with_all_fields_but_where_the_data_lie(tmp_path: Path) -> None:
    a, same = evaluated(tmp_path / "a"), evaluated(tmp_path / "same")
    b = evaluated(tmp_path / "b", citation_f1="p2")
    with pytest.raises(ConfigurationError) as caught:
        compare_results([a, a], [same, b])
    assert caught.value.what.endswith("differ in sampling.data, sampling.temperature")
    assert str(b) in caught.value.what
    other = evaluated(tmp_path / "c", **dict.fromkeys(METRICS, "p2"))
    with pytest.raises(ConfigurationError, match=r"reward .sampled. was measured in two ways"):
        compare_results([a], [other], metrics=["reward"])


def test_metrics_of_one_side_are_left_out(tmp_path: Path) -> None:
    a = evaluated(tmp_path / "a", 0.125)
    b = evaluated(tmp_path / "b", rubric_score=None, reward="p2")
    assert [row["metric"] for row in compare_results([a], [b])] == ["citation_f1"]
    reverse = evaluated(tmp_path / "c")
    results = json.loads((reverse / "results.json").read_text())
    results["evaluations"].reverse()
    (reverse / "results.json").write_text(json.dumps(results))
    assert [row["metric"] for row in compare_results([reverse], [a])] == [
        *("citation_f1", "reward", "rubric_score")
    ], "in the order of the first"
