"""Pages of runs and sweeps in a real browser: from a file, without a network."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from refiner_core.report.run import rendering as run_rendering
from refiner_core.report.sweep import rendering as sweep_rendering
from tests.support import run_reports, sweep_reports
from tests.support.browser import Page
from tests.support.command import wait_until
from tests.support.looking import POOR_CONTRAST, assert_harmless, drawn, go, seen

pytestmark = pytest.mark.browser

Show = Callable[..., None]
MAKERS = {"run": (run_reports, run_rendering), "sweep": (sweep_reports, sweep_rendering)}
WIDTH = "document.documentElement.scrollWidth"
FOCUSED = "document.activeElement"
both = pytest.mark.parametrize("kind", MAKERS)


def views(kind: str) -> tuple[tuple[str, str], ...]:
    """(name, title) of each view."""
    return MAKERS[kind][1].VIEWS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Path]:
    """Pages of made-up reports; each is made once."""
    folder = tmp_path_factory.mktemp("pages")

    def write(kind: str, name: str, reload_s: int) -> Path:
        path = folder / f"{kind}-{name}-{reload_s}.html"
        if not path.exists():
            reports, rendering = MAKERS[kind]
            text = rendering.page(getattr(reports, name)(), reload_s=reload_s)
            path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def show(browser: Page, made: Callable[[str, str, int], Path]) -> Iterator[Show]:
    """Opens the page of a report; afterwards no script has failed and no request has gone out."""

    def opened(kind: str, name: str, choice: str = "", *, reload_s: int = 0) -> None:
        browser.show(f"{made(kind, name, reload_s).as_uri()}#{choice}")

    browser.events.clear()
    yield opened
    assert_harmless(browser)


# ---------------------------------------------------------------- pages of both kinds


@both
def test_text_can_be_read_in_light_and_dark_on_narrow_and_wide_screens(
    browser: Page, show: Show, kind: str
) -> None:
    try:
        for width, scheme in ((400, "light"), (1600, "dark")):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            show(kind, "full_report", f"d={scheme}")
            for view, title in views(kind):
                go(browser, view)
                assert seen(browser, ".view > h2") == [title]
                browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
                assert browser.run(POOR_CONTRAST) == [], f"{scheme}, {view}"
                assert browser.run(WIDTH) <= width, f"{view} at {width}"
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


@both
def test_hostile_text_is_shown_and_does_nothing(browser: Page, show: Show, kind: str) -> None:
    show(kind, "hostile_report")
    for view, title in views(kind):
        go(browser, view)
        assert "</script>" in browser.run("document.title")
        assert browser.run("getComputedStyle(document.body).display") == "block"
        assert seen(browser, ".view > h2") == [title]
        assert browser.run(f"{WIDTH} - document.documentElement.clientWidth") <= 0
    assert browser.run("document.querySelectorAll('img, main script, main style').length") == 0
    on = "[...document.querySelectorAll('*')].filter(e => [...e.attributes].some("
    assert browser.run(f"{on}a => a.name.startsWith('on'))).length") == 0
    go(browser, "curves")
    drawn(browser)
    browser.hover(".chart")
    browser.run("new Promise(done => setTimeout(done, 300))")
    assert "</script>" in browser.run("document.title"), "a name in a chart's tooltip was run"
    go(browser, "examples" if kind == "run" else "answers")
    assert "characters more are in report.json" in browser.text()


@both
def test_a_running_page_loads_itself_again_and_stays_where_it_was(
    browser: Page, show: Show, kind: str
) -> None:
    view = {"run": "examples", "sweep": "cost"}[kind]
    show(kind, "running_report", f"v={view}&d=dark", reload_s=1)
    browser.run("window.first = true; scrollTo(0, 20)")
    loaded = "!window.first && document.readyState == 'complete'"
    wait_until(lambda: browser.run(loaded), "a reload")
    assert seen(browser, ".view > h2") == [dict(views(kind))[view]]
    assert browser.run("scrollY") == 20
    assert browser.run("document.documentElement.dataset.scheme") == "dark"
    pause = seen(browser, "#pause")
    browser.run("document.querySelector('#pause').click()")
    assert seen(browser, "#pause") != pause


@both
def test_a_finished_page_stays_is_printed_whole_and_needs_no_scripts(
    browser: Page, show: Show, kind: str
) -> None:
    show(kind, "full_report", reload_s=1)
    assert browser.run("document.body.dataset.reload") is None
    printed = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= len(views(kind))
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert seen(browser, ".view > h2") == [title for _, title in views(kind)]
    assert seen(browser, "nav, form, #scheme") == []
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show(kind, "full_report")
        words = browser.text()
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert [title for _, title in views(kind) if title not in words] == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("run", "empty_report"),
        *(("sweep", f"{n}_report") for n in ("one_arm", "nothing_done", "long_names")),
    ],
)
def test_small_and_strange_reports_have_a_whole_page(
    browser: Page, show: Show, kind: str, name: str
) -> None:
    show(kind, name)
    for view, title in views(kind):
        go(browser, view)
        assert seen(browser, ".view > h2") == [title]
        assert not re.search(r"\b(NaN|nan|None|undefined)\b", browser.text())


def test_large_reports_are_bounded_and_open(
    browser: Page, show: Show, made: Callable[[str, str, int], Path]
) -> None:
    assert made("run", "huge_report", 0).stat().st_size < 5_000_000
    show("run", "huge_report", "curves")
    assert browser.run("scrollY") == 0, "an anchor leaves the title in sight"
    assert len(seen(browser, "figure")) == 30
    for view, left in (
        ("stages", "The first 1900 attempts are in report.json"),
        ("incidents", "3600 more are in report.json"),
        ("settings", "2800 more are in report.json"),
        ("examples", "80 more examples are in report.json"),
    ):
        go(browser, view)
        assert left in browser.text(), view
    show("sweep", "large_report", "arms")
    assert len(seen(browser, ".cmp tbody tr")) == 200
    browser.run(
        "(() => { const q = document.querySelector('input[type=search]'); q.value = 'lr3-';"
        "q.dispatchEvent(new Event('input', {bubbles: true})) })()"
    )
    assert len(seen(browser, ".cmp tbody tr")) == 11, "ten arms and the baseline"


# ---------------------------------------------------------------- runs


def focus(browser: Page, selector: str) -> None:
    """Put the keyboard on the first element that fits and is seen."""
    browser.run(
        f"[...document.querySelectorAll('{selector}')].find(e => e.getClientRects().length).focus()"
    )


def test_the_views_of_a_run_are_walked_by_arrow_keys(browser: Page, show: Show) -> None:
    show("run", "full_report")
    browser.press("Tab")
    assert browser.run(f"{FOCUSED}.textContent") == "Skip to the content"
    browser.press("Enter")
    assert browser.run(f"{FOCUSED}.id") == "main"
    focus(browser, "nav a")
    for _, title in views("run"):
        assert seen(browser, ".view > h2") == [title]
        assert browser.run(f"{FOCUSED}.textContent").startswith(title)
        outline = browser.run(f"getComputedStyle({FOCUSED}).outlineStyle")
        assert outline == "solid", "nobody sees where the keyboard is"
        browser.press("ArrowDown")
    browser.press("ArrowUp")
    assert seen(browser, ".view > h2") == [views("run")[-2][1]]


def test_examples_are_walked_by_keys_and_chosen(browser: Page, show: Show) -> None:
    show("run", "full_report", "examples")
    heads = seen(browser, ".example h3")
    browser.press("j")
    browser.press("ArrowRight")
    browser.press("k")
    assert seen(browser, ".example .pill")[:2] == ["best", "rollout"]
    browser.press("ArrowLeft")
    assert seen(browser, ".example h3") == heads
    browser.run(
        "(() => { const e = document.querySelector('select[data-state=e]');"
        "e.value = [...e.options].find(o => o.text.includes('got worse most')).value;"
        "e.dispatchEvent(new Event('change', {bubbles: true})) })()"
    )
    assert seen(browser, ".example h3") == ["What is the observatory of Tel Ammar?"]
    models = [" ".join(h.split()[:1]) for h in seen(browser, ".answer-card h4")]
    assert models == ["sft", "grpo", "base"], "before and after stand side by side"
    browser.show(browser.run("location.href"))
    heads = seen(browser, ".example h3")
    assert heads == ["What is the observatory of Tel Ammar?"], "the choice survives a reload"


def test_a_claim_leads_to_the_snippet_that_it_cites_and_back(browser: Page, show: Show) -> None:
    show("run", "full_report", "examples")
    focus(browser, 'a.claim[data-n="4"]')
    browser.press("Enter")
    here = seen(browser, ".source.here")
    assert [text.split(">")[0] for text in here] == ["<snippet id=S_e8Q9", "<snippet id=S_w1"]
    assert browser.run(f"{FOCUSED}.matches('.source.here')")
    inside = browser.run(
        "(() => { const e = document.querySelector('.source.here').getBoundingClientRect(),"
        "p = document.activeElement.closest('pre').getBoundingClientRect();"
        "return e.top >= Math.max(0, p.top) && e.bottom <= Math.min(innerHeight, p.bottom) })()"
    )
    assert inside, "the snippet is not in sight"
    browser.press("Escape")
    assert browser.run(f"{FOCUSED}.dataset.n") == "4"


def test_claims_without_evidence_look_different(browser: Page, show: Show) -> None:
    show("run", "full_report", "examples")
    titles = browser.run(
        "[...document.querySelectorAll('.example.on .claim')].map(e => [e.className, e.title])"
    )
    assert ["claim unknown", "claim 2: cites S_x0; not in the prompt: S_x0"] in titles
    assert ["claim uncited", "claim 3: cites nothing"] in titles
    assert ["claim cites", "claim 4: cites S_e8Q9, S_w1"] in titles
    looks = browser.run(
        "['cites', 'uncited', 'unknown'].map(k => { const s = getComputedStyle("
        "document.querySelector('.example.on .claim.' + k));"
        "return [s.backgroundColor, s.borderBottomStyle, s.textDecorationLine].join() })"
    )
    assert len(set(looks)) == 3


def test_curves_are_smoothed_drawn_on_a_logarithmic_axis_and_listed(
    browser: Page, show: Show
) -> None:
    show("run", "full_report", "curves")
    ((name, _, first, last),) = drawn(browser)
    assert (name, first) == ("loss/train_avg", pytest.approx(4.6))
    for field, value in (("smooth", "0.9"), ("log", "1")):
        browser.run(
            f"(() => {{ const e = document.querySelector('input[data-state={field}]');"
            f"e.value = '{value}'; e.checked = true;"
            "e.dispatchEvent(new Event('change', {bubbles: true})) })()"
        )
    ((_, _, smooth_first, smooth_last),) = drawn(browser)
    assert smooth_first == first
    assert smooth_last > last * 1.2, "it follows slowly"
    assert {"smooth=0.9", "log=1"} <= set(re.split("[#&]", browser.run("location.hash")))
    browser.run("document.querySelectorAll('#curves summary')[1].click()")
    cells = [" ".join(c.split()) for c in seen(browser, "#curves tr:first-child td")]
    assert cells[0].endswith("step 1")
    assert cells[-1] == "3", "where nothing was logged is counted"


def test_a_change_is_called_better_only_where_its_interval_keeps_clear_of_0(
    browser: Page, show: Show
) -> None:
    show("run", "full_report")
    says = [" ".join(s.split()) for s in seen(browser, ".before-after tr td:nth-of-type(3)")]
    assert "▲ +0.170 [0.130, 0.210] better" in says
    assert says[-1] == "◆ +0.302 [0.262, 0.342] changed", "more claims are not better or worse"
    go(browser, "numbers")
    browser.run("document.querySelectorAll('#numbers details')[1].open = true")
    assert "■ +0.17 [−0.23, 0.57] not clear" in " ".join(browser.text().split())


# ---------------------------------------------------------------- sweeps


def choose(browser: Page, field: str, value: str) -> None:
    """Choose an entry of a list."""
    browser.run(
        f"(() => {{ const e = document.querySelector('select[data-state={field}]'); "
        f"e.value = [...e.options].find(o => o.text.startsWith({json.dumps(value)})).value; "
        "e.dispatchEvent(new Event('change', {bubbles: true})) })()"
    )


def test_the_summary_begins_with_warnings_question_and_answer(browser: Page, show: Show) -> None:
    show("sweep", "full_report")
    words = browser.text()
    assert words.index("was updated between night 1") < words.index("Do instance rubrics")
    assert "mixed-0 is better than static-0 by +0.029 [0.012, 0.046] (adjusted p = 0.038" in words
    assert "All its trials failed: no room left on the disk." in words


def test_a_number_is_chosen_among_all_that_were_measured(browser: Page, show: Show) -> None:
    show("sweep", "full_report", "arms")
    assert seen(browser, ".cmp h3") == ["oracle of grpo (sampled, protocol held-out) decides"]
    choose(browser, "c", "citation_f1 of grpo (greedy, protocol own)")
    assert seen(browser, ".cmp h3") == ["citation_f1 of grpo (greedy, protocol own)"]
    assert "◆ judge moved" in seen(browser, ".cmp .says")


SORT = "document.querySelector('.cmp.on th[data-sort=difference] button').click()"


def test_arms_are_sorted_and_missing_ones_come_last(browser: Page, show: Show) -> None:
    show("sweep", "full_report", "arms")
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
    show("sweep", "full_report", "curves")
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
    show("sweep", "full_report", "flips")
    browser.run("document.querySelectorAll('#flips a[data-goto]')[4].click()")
    assert seen(browser, ".prompt h3")[0].startswith("Who founded the observatory")
    assert [c.split()[0] for c in seen(browser, ".answer-card h4")] == ["static-0", "mixed-0"]
    assert seen(browser, ".answer-card .claim[title*='cites S_']")[0].startswith("<snippet id=S_")
    browser.run("document.querySelector('.prompt.on .answer-card:not([hidden]) summary').click()")
    assert "Answers first" in browser.text()


def test_answers_are_chosen_by_arm_and_seed_and_prompt(browser: Page, show: Show) -> None:
    show("sweep", "full_report", "answers")
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


def test_attempts_at_a_task_are_read_side_by_side(browser: Page, show: Show) -> None:
    show("sweep", "agents_report", "flips")
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


def test_failures_of_attempts_are_counted_by_domain_and_apart_from_errors(
    browser: Page, show: Show
) -> None:
    show("sweep", "agents_report", "attempts")
    heads = seen(browser, ".attempts-table thead th")
    assert heads[5:] == ["no call", "limit", "rule broken", "gave up", "incomplete",
                         "error: user down"]  # fmt: skip
    cells = seen(browser, ".attempts-table tr.whole td")
    assert cells[:10] == ["all", "40", "160", "74of 158", "11", "18", "12", "30", "13", "2"]
    names = seen(browser, "nav a")
    assert "Transcripts" in names
    assert "Rubrics" not in names, "nobody has judged"


def test_messages_of_agents_and_tools_are_shown_and_do_nothing(browser: Page, show: Show) -> None:
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.call("Emulation.setEmulatedMedia", features=[feature])
        for choice in ("attempts", "v=answers&p=1&a=&l=&r="):
            show("sweep", "agents_report", choice)
            assert browser.run("document.title") == "Rejection sampling before GRPO"
            assert browser.run("document.querySelectorAll('main img, main script').length") == 0
            assert browser.run(POOR_CONTRAST) == []
            assert browser.run(wide) <= 0
    browser.call("Emulation.setEmulatedMedia", features=[])
