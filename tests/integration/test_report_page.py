"""The page of a report in a real browser, as somebody uses it: from a file, without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from refiner_core.report.sweep.rendering import VIEWS, page
from tests.support import sweep_reports
from tests.support.browser import Page
from tests.support.looking import POOR_CONTRAST, assert_harmless, drawn, go, seen

pytestmark = pytest.mark.browser

Show = Callable[..., None]


@pytest.fixture
def show(browser: Page, tmp_path: Path) -> Iterator[Show]:
    """Opens a made-up report's page; afterwards nothing must have gone wrong or gone out."""
    made: dict[str, Path] = {}

    def opened(name: str, choice: str = "", *, reload_s: int = 0) -> None:
        if name not in made:
            made[name] = tmp_path / f"{name}.html"
            text = page(getattr(sweep_reports, name)(), reload_s=reload_s)
            made[name].write_text(text, encoding="utf-8")
        browser.show(f"{made[name].as_uri()}#{choice}")

    browser.events.clear()
    yield opened
    assert_harmless(browser)


def choose(browser: Page, field: str, value: str) -> None:
    """Choose an entry of a list, as a person does."""
    browser.run(
        f"(() => {{ const e = document.querySelector('select[data-state={field}]'); "
        f"e.value = [...e.options].find(o => o.text.startsWith({json.dumps(value)})).value; "
        "e.dispatchEvent(new Event('change', {bubbles: true})) })()"
    )


def test_every_view_opens_alone_and_can_be_linked_to(browser: Page, show: Show) -> None:
    show("full_report", "flips")
    assert seen(browser, ".view > h2") == ["Prompts that flip"]
    for view, title in VIEWS:
        go(browser, view)
        assert seen(browser, ".view > h2") == [title]
        assert seen(browser, "nav a[aria-current]")[0].startswith(title)


def test_the_summary_says_question_answer_and_warnings_first(browser: Page, show: Show) -> None:
    show("full_report")
    words = browser.text()
    assert words.index("Before you read on") < words.index("Do instance rubrics")
    assert "mixed-0 is better than static-0 by +0.029 [0.012, 0.046] (adjusted p = 0.038" in words
    assert "All its trials failed: no room left on the disk." in words


def test_a_number_is_chosen_among_all_that_were_measured(browser: Page, show: Show) -> None:
    show("full_report", "arms")
    assert seen(browser, ".cmp h3") == ["oracle of grpo (sampled, protocol held-out) decides"]
    choose(browser, "c", "citation_f1 of grpo (greedy, protocol own)")
    assert seen(browser, ".cmp h3") == ["citation_f1 of grpo (greedy, protocol own)"]
    assert "◆ judge moved" in seen(browser, ".cmp .says")


SORT = "document.querySelector('.cmp.on th[data-sort=difference] button').click()"


def test_arms_are_sorted_by_what_is_asked_and_missing_ones_come_last(
    browser: Page, show: Show
) -> None:
    show("full_report", "arms")
    browser.run(f"{SORT}; {SORT}")
    first = ["mixed-0", "static-0.2", "mixed-0.2", "instance-0.2"]
    assert seen(browser, ".cmp tbody .arm")[:4] == first
    assert set(seen(browser, ".cmp tbody .arm")[4:]) == {"static-0", "instance-0"}
    browser.show(browser.run("location.href"))
    assert seen(browser, ".cmp tbody .arm")[:4] == first, "what was chosen survives a reload"
    browser.run(SORT)
    assert seen(browser, ".cmp tbody .arm")[:2] == ["static-0", "static-0.2"]


def test_curves_of_arms_are_overlaid_put_out_and_chosen_by_metric(
    browser: Page, show: Show
) -> None:
    show("full_report", "curves")
    arms = ["static-0", "static-0.2", "mixed-0", "mixed-0.2", "instance-0.2"]
    assert [line[:2] for line in drawn(browser)] == [[arm, True] for arm in arms]
    browser.run("document.querySelector('.plot-of.on input[data-line=\"2\"]').click()")
    assert "x=2" in browser.run("location.hash")
    assert [line[1] for line in drawn(browser)] == [True, True, False, True, True]
    choose(browser, "m", "objective/kl3_avg")
    assert seen(browser, ".plot-of h3") == ["objective/kl3_avg (grpo)"]
    assert drawn(browser)[2][1] is False, "an arm is put out in all charts"
    browser.run("document.querySelector('.plot-of.on summary').click()")
    assert "step 100" in seen(browser, ".plot-of.on tbody tr:first-child td")[1]


def test_a_flipped_prompt_leads_to_its_answers(browser: Page, show: Show) -> None:
    show("full_report", "flips")
    browser.run("document.querySelectorAll('#flips a[data-goto]')[4].click()")
    assert seen(browser, ".prompt h3")[0].startswith("Who founded the observatory")
    assert [c.split()[0] for c in seen(browser, ".answer-card h4")] == ["static-0", "mixed-0"]
    assert seen(browser, ".answer-card .claim[title*='cites S_']")[0].startswith("<snippet id=S_")
    browser.run("document.querySelector('.prompt.on .answer-card:not([hidden]) summary').click()")
    assert "Answers first" in browser.text()


def test_answers_are_chosen_by_arm_and_seed_and_prompt(browser: Page, show: Show) -> None:
    show("full_report", "answers")
    choose(browser, "r", "instance-0.2")
    choose(browser, "s", "2")
    heads = seen(browser, ".answer-card h4")
    assert [" ".join(h.split()) for h in heads] == [
        "static-0 baseline seed 2",
        "instance-0.2 seed 2",
    ]
    choose(browser, "r", "instance-0")
    assert len(seen(browser, ".answer-card h4")) <= 1
    choose(browser, "l", "all arms")
    assert len(seen(browser, ".answer-card")) == 5
    browser.run("document.querySelector('#answers [data-step=\"1\"]').click()")
    assert seen(browser, ".prompt h3")[0].startswith("Who founded")


def test_a_page_of_a_running_sweep_loads_itself_again_and_stays_where_it_was(
    browser: Page, show: Show
) -> None:
    show("running_report", "cost", reload_s=1)
    assert "refreshes itself every 1 s" in browser.text()
    before = len(browser.events)
    browser.run("window.first = true; scrollTo(0, 300)")
    browser.wait_for("Page.loadEventFired", before)
    assert browser.run("window.first") is None
    assert seen(browser, ".view > h2") == ["Cost and waste"]
    assert browser.run("scrollY") == 300
    assert browser.run("document.querySelector('#pause').click(), true")
    assert seen(browser, "#pause") == ["Go on"]


def test_hostile_text_is_shown_and_does_nothing(browser: Page, show: Show) -> None:
    show("hostile_report")
    for view, _ in VIEWS:
        go(browser, view)
        assert browser.run("document.title").startswith("Rubrics </script>")
        assert browser.run("getComputedStyle(document.body).display") == "block"
    assert browser.run("document.querySelectorAll('img, main script, main style').length") == 0
    go(browser, "answers")
    assert "characters more are in report.json" in browser.text()
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.run(wide) <= 0


@pytest.mark.parametrize("name", ["one_arm_report", "nothing_done_report", "long_names_report"])
def test_small_and_strange_sweeps_have_a_whole_page(browser: Page, show: Show, name: str) -> None:
    show(name)
    for view, title in VIEWS:
        go(browser, view)
        assert seen(browser, ".view > h2") == [title]
        assert not re.search(r"\b(NaN|nan|None|undefined)\b", browser.text())


def test_attempts_at_a_task_are_read_side_by_side(browser: Page, show: Show) -> None:
    show("agents_report", "flips")
    browser.run("document.querySelector('#flips a[data-goto]').click()")
    heads = [" ".join(h.split()) for h in seen(browser, ".answer-card h4")]
    assert heads == ["sft baseline seed 1, attempt 1", "sft-rft seed 1, attempt 1"]
    assert seen(browser, ".outcome") == ["✓ passed"] * 2
    choose(browser, "r", "sft")
    choose(browser, "a", "all")
    outcomes = [o.split(":")[0] for o in seen(browser, ".outcome")]
    failed = ["✕ failed rule_broken", "✕ failed no_call"]
    assert outcomes == ["✓ passed", *failed, "◌ counts as none user_down"]
    missing = seen(browser, ".checks li.missing")
    assert ["the fee was told" in check for check in missing] == [True, True]
    assert seen(browser, ".trouble") == ["against the rules", "no tool call"]
    words = browser.text()
    for said in ("which order is it?", 'get_order(order="S_0", fields=["state", "lamp"])'):
        assert said in words
    assert "characters more are in report.json" in words
    browser.show(browser.run("location.href"))
    assert len(seen(browser, ".answer-card")) == 4, "the choice survives a reload"


def test_why_attempts_fail_is_counted_by_domain_and_errors_stand_apart(
    browser: Page, show: Show
) -> None:
    show("agents_report", "attempts")
    heads = seen(browser, ".attempts-table thead th")
    assert heads[5:] == ["no call", "limit", "rule broken", "gave up", "incomplete",
                         "error: user down"]  # fmt: skip
    cells = seen(browser, ".attempts-table tr.whole td")
    assert cells[:10] == ["all", "40", "160", "74of 158", "11", "18", "12", "30", "13", "2"]
    names = seen(browser, "nav a")
    assert "Transcripts" in names
    assert "Rubrics" not in names, "nobody has judged"


def test_what_agents_and_tools_say_is_shown_and_does_nothing(browser: Page, show: Show) -> None:
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.call("Emulation.setEmulatedMedia", features=[feature])
        for choice in ("attempts", "v=answers&p=1&a=&l=&r="):
            show("agents_report", choice)
            assert browser.run("document.title") == "Rejection sampling before GRPO"
            assert browser.run("document.querySelectorAll('main img, main script').length") == 0
            assert browser.run(POOR_CONTRAST) == []
            assert browser.run(wide) <= 0
    browser.call("Emulation.setEmulatedMedia", features=[])


def test_nothing_runs_out_of_a_narrow_screen(browser: Page, show: Show) -> None:
    size: dict[str, Any] = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    try:
        show("full_report")
        for view, _ in VIEWS:
            go(browser, view)
            assert browser.run("document.documentElement.scrollWidth") <= 400, view
        show("agents_report")
        for view in ("attempts", "answers"):
            go(browser, view)
            assert browser.run("document.documentElement.scrollWidth") <= 400, view
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_without_scripts_everything_can_be_read(browser: Page, show: Show) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show("full_report")
        words = browser.text()
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    for _, title in VIEWS:
        assert title in words
    assert "citation_f1 of grpo (greedy, protocol own)" in words
    assert "Which number" not in words


def test_a_thousand_trials_can_be_looked_at(browser: Page, show: Show) -> None:
    show("large_report", "arms")
    assert len(seen(browser, ".cmp tbody tr")) == 200
    browser.run(
        "(() => { const q = document.querySelector('input[type=search]'); q.value = 'lr3-';"
        "q.dispatchEvent(new Event('input', {bubbles: true})) })()"
    )
    assert len(seen(browser, ".cmp tbody tr")) == 11, "ten arms and the baseline"
