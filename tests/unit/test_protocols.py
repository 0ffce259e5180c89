"""Protocol files: the settings that they fix, refusals, their stages, and cards.

Whole runs are in ``tests/integration/test_protocol_runs.py``.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.cards.reproduction import recipe_text, restated, stands_for
from flows.checking.sources import protocol_sources, resolve_sources
from flows.running.calls import make_recipe_plan
from flows.why.explanation import figures_of_stages, parse_query
from refiner_core.cards.public import public_protocol
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.marks import walk
from refiner_core.contract.plan import make_plan
from refiner_core.contract.protocols import (
    FIELDS,
    ProtocolFile,
    configs_under,
    parse_protocol,
    protocol_fingerprint,
)
from refiner_core.contract.recipes import load_protocol, shipped_protocols
from refiner_core.contract.records import from_json, to_json
from refiner_core.evaluation.protocol import make_protocol
from refiner_core.rubrics import rubric_set_path
from tests.support.recorded_run import RecordedRun

LEXICAL = "judge: {kind: lexical, model: lexical-1}"
SERVED = "judge: {kind: openai, model: %s, base_url: 'http://127.0.0.1:9/v1'}"


def write(folder: Path, text: str, name: str = "mine") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(f"name: {name}\n{text}\n")
    return str(path)


def tiny(*protocols: str, more: tuple[str, ...] = ()) -> RecipeConfig:
    return load_recipe("tiny", [f"evaluate.protocols=[{','.join(protocols)}]", *more])


def plan_of(config: RecipeConfig, sources: Mapping[str, str] | None = None) -> dict[str, Any]:
    return dict(make_plan(check_config(config), sources or {}).by_name)


def fingerprint(protocol: ProtocolFile) -> str:
    return protocol_fingerprint(protocol, protocol_sources(protocol.over(RecipeConfig())))


# ---------------------------------------------------------------- settings of a file


@pytest.mark.parametrize("name", list(shipped_protocols()))
def test_a_shipped_protocol_can_be_used_with_every_shipped_recipe(name: str) -> None:
    for recipe in ("tiny", "refiner-answer-only"):
        config = check_config(load_recipe(recipe, [f"evaluate.protocols=[{name}]"]))
        assert list(configs_under(config)) == [name], "the file is called as its protocol is"


def test_a_named_section_is_fixed_as_a_whole(tmp_path: Path) -> None:
    """Arms that change their judge are then measured alike."""
    file = write(tmp_path, f"reward: {{rubric_source: instance}}\n{LEXICAL}")
    served = ("judge.kind=openai", "judge.model=m", "judge.base_url=http://127.0.0.1:9/v1")
    arms = [
        tiny(file),
        tiny(file, more=("reward.paper_citation_weight=0.5", "reward.static_rubrics=reader-v1")),
        tiny(file, more=(*served, "judge.form=batched", "judge.max_tokens=99")),
    ]
    measured = [configs_under(arm)["mine"] for arm in arms]
    assert len({(m.reward, replace(m.judge, resources=m.judge.resources)) for m in measured}) == 1
    assert len({make_protocol(m, [], "greedy", "d").fingerprint for m in measured}) == 1
    own = {make_protocol(arm, [], "greedy", "d").with_reward(arm).fingerprint for arm in arms}
    assert len(own) == 3, "by their own protocols the arms cannot be compared"


def test_a_protocol_uses_the_recipes_servers_of_its_judge_unless_it_names_its_own(tmp_path) -> None:
    file = write(tmp_path, "judge: {kind: openai, model: m, form: batched}")
    where = ("judge.kind=openai", "judge.base_url=http://10.0.0.7:8000/v1", "judge.concurrency=7")
    mine = configs_under(tiny(file, more=(*where, "judge.model=m")))["mine"].judge
    assert (mine.base_url, mine.concurrency, mine.form) == (where[1][15:], 7, "batched")
    with pytest.raises(ConfigurationError, match=r"mine: `judge.kind` is 'openai'"):
        check_config(tiny(file, more=(*where, "judge.model=other")))
    file = write(tmp_path, SERVED % "m", "own")
    more = ("judge.kind=openai", "judge.model=m", "judge.base_urls=[http://10.0.0.7:8000/v1]")
    judge = configs_under(tiny(file, more=more))["own"].judge
    assert (judge.base_url, judge.base_urls) == ("http://127.0.0.1:9/v1", ()), "one set of servers"


def test_a_fingerprint_depends_on_the_measurement_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        text = rubric_set_path("reader-v1").read_text().replace("name: reader-v1", "name: mine")
        (folder / "rubrics.yaml").write_text(text)
    rubrics = "reward: {rubric_source: static, static_rubrics: rubrics.yaml}"
    one = load_protocol(write(tmp_path, f"{rubrics}\n{LEXICAL}"))
    same = [
        load_protocol(write(tmp_path, f"{rubrics}\n{LEXICAL}", "another-name")),
        load_protocol(write(tmp_path / "other", f"{LEXICAL}\n{rubrics}\ndescription: x")),
        load_protocol(write(tmp_path, f"{rubrics[:-1]}, combination: convex}}\n{LEXICAL}", "c")),
    ]
    assert {fingerprint(p) for p in same} == {fingerprint(one)}
    (tmp_path / "rubrics.yaml").write_text(text.replace("reader", "person"))
    assert fingerprint(one) not in {fingerprint(p) for p in same[1:2]}


def test_a_configuration_holds_the_text_of_its_protocols(tmp_path: Path) -> None:
    """The file may go away, and variables of a shell in it stay as they are."""
    file = write(tmp_path, "judge:\n  kind: openai\n  model: m\n  serve:\n    engine: command\n"
                 "  serve_command: serve \\${HOME:-x} --port {port}\n"
                 "reward: {rubric_source: instance}")  # fmt: skip
    config = tiny(file)
    Path(file).unlink()
    judge = configs_under(config)["mine"].judge
    assert judge.serve_command == "serve ${HOME:-x} --port {port}"
    again = from_json(RecipeConfig, json.loads(json.dumps(to_json(config))))
    assert again == config
    assert configs_under(again) == configs_under(config)
    assert tiny(*(json.dumps(t) for t in config.evaluate.protocols)) == config


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grpo: {beta: 0.1}", "grpo.beta"),
        ("evaluate: {decodng: [greedy]}", "Did you mean 'evaluate.decoding'"),
        ("evaluate: {num_samples: many}", "Under protocol mine: `evaluate.num_samples` is 'many'"),
        ("reward: {static_rubrics: gone.yaml, rubric_source: static}", "mine: .*rubric"),
        ("data: {rl_path: some/set}", "Under protocol mine: .* has no revision"),
        ("judge: {kind: openai, model: m}", "a running server"),
        ("evaluate:", "fixes nothing"),
    ],
)
def test_an_invalid_protocol_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RefinerError, match=said):
        make_recipe_plan("tiny", [f"evaluate.protocols=[{write(tmp_path, text)}]"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("evaluate.protocols=[held-out-greedy-v1,held-out-greedy-v1]", "held-out-greedy-v1 twice"),
        ("evaluate.protocols=[held-out-gredy-v1]", "Did you mean 'held-out-greedy-v1'"),
        ("evaluate.protocols=[{name: 2nd, evaluate: {num_samples: 2}}]", "has the name '2nd'"),
        ("data.all_held_out=true", "all_held_out"),
    ],
)
def test_an_invalid_list_of_protocols_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_config(load_recipe("tiny", [given]))


# ---------------------------------------------------------------- the stages


def test_each_model_is_evaluated_under_each_protocol() -> None:
    before, after = plan_of(load_recipe("tiny")), plan_of(tiny("held-out-greedy-v1"))
    new = {f"evaluate-{m}@held-out-greedy-v1" for m in ("base", "sft", "grpo")}
    assert after.keys() - before.keys() == new
    assert {n for n in before if before[n].id != after[n].id} == {"card"}, "nothing is done again"
    assert {f"evaluation-{m}@held-out-greedy-v1" for m in ("base", "sft", "grpo")} < set(
        after["card"].inputs
    )


def test_a_name_is_no_part_of_a_stage_and_equal_measurements_share_one(tmp_path: Path) -> None:
    """Two names of one stage would make two orchestrators compete for it."""
    one = plan_of(tiny(write(tmp_path, "evaluate: {num_samples: 2}", "one")))
    two = plan_of(tiny(write(tmp_path, "evaluate: {num_samples: 2}", "two")))
    assert one["evaluate-sft@one"].id == two["evaluate-sft@two"].id
    same = write(tmp_path, "evaluate: {num_samples: 4}")
    other = write(tmp_path, f"evaluate: {{num_samples: 2}}\n{LEXICAL}", "other")
    twin = write(tmp_path, "evaluate: {num_samples: 2}", "twin")
    names = plan_of(tiny(same, other, twin))
    assert sorted(n for n in names if "@" in n) == [
        f"evaluate-{m}@other" for m in ("base", "grpo", "sft")
    ]
    assert len({stage.id for stage in names.values()}) == len(names)


def test_a_protocols_own_set_is_prepared_and_held_out_whole(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    own = write(tmp_path, "data: {rl_path: rows.jsonl}", "own")
    both = write(tmp_path, "data: {rl_path: rows.jsonl}\nevaluate: {num_samples: 2}", "both")
    config = tiny(own, both)
    stages = plan_of(config, {"data.rl": "a", "data.rl@own": "b", "data.rl@both": "b"})
    assert stages["evaluate-sft@own"].inputs == {"data": "data@own", "weights": "sft"}
    assert stages["evaluate-sft@both"].inputs["data"] == "data@own", "prepared once"
    measured = configs_under(config)["own"]
    assert (measured.data.all_held_out, measured.data.sft_path) == (True, None)
    assert measured.data.rl_path == str(tmp_path / "rows.jsonl"), "a job works in another folder"
    assert stages["sft"].inputs == {"data": "data"}


def test_a_served_judge_has_its_own_server_unless_an_equal_one_exists(tmp_path: Path) -> None:
    serve = "serve: {engine: vllm}, resources: {gpus: 1}"
    own = write(tmp_path, f"judge: {{kind: openai, model: own, {serve}}}", "own")
    shared = write(tmp_path, f"judge: {{kind: openai, model: mine, form: batched, {serve}}}", "sh")
    mine = ("judge.kind=openai", "judge.model=mine", "judge.serve.engine=vllm")
    stages = plan_of(tiny(own, shared, more=(*mine, "judge.resources.gpus=1")))
    assert sorted(n for n, s in stages.items() if s.kind == "serve") == ["judge", "judge@own"]
    assert stages["evaluate-sft"].after == stages["evaluate-sft@sh"].after == ("judge",)
    assert stages["evaluate-sft@own"].after == ("judge@own",)
    only = plan_of(tiny(own, more=("only=[evaluate-base@own]",)))
    assert "judge@own" in only, "who asks for one evaluation gets the judge that it needs"


def test_sources_of_a_protocol_are_found_and_fetched_as_its_own(tmp_path: Path) -> None:
    file = write(tmp_path, "reward: {rubric_source: static, static_rubrics: reader-v1}\n"
                 "data: {rl_path: some/set, rl_revision: abc, rl_split: test}\n"
                 "judge: {kind: openai, model: some/judge, revision: r, serve: {engine: vllm, "
                 "where: beside}}")  # fmt: skip
    config = check_config(tiny(file))
    sources = resolve_sources(config)
    assert {k.removesuffix("@mine") for k in sources if k.endswith("@mine")} == {
        *("data.rl", "rubrics", "judge_prompt", "judge.weights")
    }
    stages = make_plan(config, sources).by_name
    assert set(stages["fetch"].sources) == {"data.rl@mine", "judge.weights@mine"}
    assert "fetch" in stages["data@mine"].after
    assert "fetch" not in stages["evaluate-base"].after
    assert stages["evaluate-base@mine"].sources["rubrics"] == sources["rubrics@mine"]
    assert "rubrics" not in stages["evaluate-base"].sources


# ---------------------------------------------------------------- cards


def test_a_card_has_the_numbers_of_every_protocol_each_under_its_own(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "ws", "evaluate.protocols=[held-out-reader-v1]")
    run.data()
    run.train("sft")
    run.train("grpo")
    for model in ("base", "sft", "grpo"):
        run.evaluate(f"evaluate-{model}", quality=0.5)
        run.evaluate(f"evaluate-{model}@held-out-reader-v1", quality=0.5)
    run.carry_out("publish")
    run.carry_out("card")
    card = (run.published("card") / "README.md").read_text()
    own, other = card.split("### held-out-reader-v1/", 1)
    assert "### held-out/greedy/" in own
    assert "static (`reader-v1`)" in other
    assert "static (`reader-v1`)" not in own
    for word in ("", "held-out-reader-v1"):
        query = parse_query(["rubric_score", "grpo", "greedy", *([word] if word else [])])
        found = figures_of_stages(query, run.workspace, run.run.stages.values())
        assert {figure.entry.get("under", "") for figure in found} == {word}
    facts = json.loads((run.published("card") / "refiner.json").read_text())["facts"]
    files = {p.get("file", "") for p in facts["protocols"].values()}
    assert files == {"", "held-out-reader-v1"}


def test_published_protocols_hold_neither_addresses_nor_folders(tmp_path: Path) -> None:
    (tmp_path / "rubrics.yaml").write_text("x")
    file = write(tmp_path, f"{SERVED % 'm'}\nreward: {{static_rubrics: rubrics.yaml}}")
    config = tiny(file, more=("judge.kind=lexical",))
    (text,) = config.evaluate.protocols
    public = public_protocol(text)
    for private in (str(tmp_path), "127.0.0.1:9"):
        assert private in text
        assert private not in public
    assert public_protocol(public) == public
    assert parse_protocol(public).fields["judge.model"] == "m"
    said = restated([f"evaluate.protocols=[{file}]"], config, load_recipe("tiny"))
    assert str(tmp_path) not in said[0]
    assert ":9/" not in said[0]
    given = tmp_path / "recipe.yaml"
    given.write_text(recipe_text(config))
    assert str(tmp_path) not in given.read_text()
    again = load_recipe(str(given)).evaluate.protocols
    assert stands_for("evaluate.protocols", again, config.evaluate.protocols)
    there = load_recipe("tiny", said).evaluate.protocols
    assert stands_for("evaluate.protocols", there, again)
    shipped = "evaluate.protocols=[held-out-greedy-v1]"
    assert restated([shipped], tiny("held-out-greedy-v1"), load_recipe("tiny")) == (shipped,)


def test_fields_are_those_of_measuring() -> None:
    """A new field of `reward` or `judge` is one at once; one of `evaluate` has to be decided on."""
    assert {p.partition(".")[0] for p in FIELDS} == {"data", "grpo", "reward", "judge", "evaluate"}
    known = {f"evaluate.{n}" for n in ("models", "protocols", "occasion", "generation_backend")}
    left = {
        p
        for p, info in walk(RecipeConfig)
        if p.startswith("evaluate.") and info.mark == "identity" and p not in FIELDS
    }
    assert left == known, "say in contract/protocols.py whether a protocol fixes it"
    assert parse_protocol(tiny("held-out-greedy-v1").evaluate.protocols[0]).over(RecipeConfig())
