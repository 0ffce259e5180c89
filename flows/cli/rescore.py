"""`refiner rescore`: stored rollouts under other settings, before a GPU is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    json_option,
    output_folder,
    progress,
    say,
    show,
    split_overrides,
    split_workspace,
)
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import picked

if TYPE_CHECKING:
    from flows.rescoring.planning import Planned

#: More new calls than this are made only by who has been asked.
ASK_ABOVE = 5000


@click.command("rescore", context_settings={"ignore_unknown_options": False})
@click.argument("words", nargs=-1, metavar="[RUN]... [workspace=DIR] [KEY=VALUE]...")
@click.option(
    "--judge",
    "judges",
    multiple=True,
    metavar="SPEC",
    help="`lexical`, a YAML file with a judge section, or model=NAME,base_url=URL,…",
)
@click.option(
    "--rubrics",
    multiple=True,
    metavar="SET",
    help="a rubric set by name or file, beside instance rubrics where the run has them "
    "(static:SET: alone); `instance`; `none`",
)
@click.option("--citation-weight", "weights", multiple=True, type=float, metavar="W")
@click.option("--cross", is_flag=True, help="all combinations, not one option at a time")
@click.option(
    "--from",
    "source",
    type=click.Choice(["rollouts", "evaluation"]),
    default="rollouts",
    help="what is rescored: rollouts of training, or samples of evaluations",
)
@click.option("--steps", metavar="STEPS", help="all, last:5, 40-50 (default: all; of several "
              "runs last:5)")  # fmt: skip
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="at most N groups")
@click.option("--model", "models", multiple=True, help="of evaluations: only this model")
@click.option("--decoding", "decodings", multiple=True, type=click.Choice(["greedy", "sampled"]))
@click.option("--baseline", default="own", metavar="SETTING", help="what the others are compared "
              "with (default: own)")  # fmt: skip
@click.option("--common", is_flag=True, help="several runs: use the prompts that all have")
@click.option("--metric", type=click.Choice(["total", "rubric", "citation"]), default="total",
              help="of the judge x policy matrix")  # fmt: skip
@click.option("--price-in", type=float, metavar="P", help="per million tokens read")
@click.option("--price-out", type=float, metavar="P", help="per million tokens written")
@click.option("--dry-run", is_flag=True, help="say what would be asked; ask and write nothing")
@click.option("--yes", is_flag=True, help=f"do not ask before more than {ASK_ABOVE} calls")
@click.option("--out", metavar="DIR", help="where the files go (default: WORKSPACE/rescores/ID)")
@json_option
def rescore_command(words: tuple[str, ...], **options: Any) -> None:
    """Score stored rollouts of RUNs again under other settings (default: the newest run).

    Each --judge, --rubrics and --citation-weight is a setting of its own and is compared with what
    the run itself gave; KEY=VALUE of `reward` and `judge` apply to all of them. Judgements that the
    run has stored are used again where the judge is the same, so that another weight, gate or
    aggregation asks nobody. Several RUNs make a judge x policy matrix.
    """
    from flows.rescoring.results import document_lines, next_lines, plan_lines, rescore

    planned = _planned(words, options)
    as_json = bool(options["as_json"])
    if options["dry_run"]:
        ending = "Nothing was asked or written. Next: the same command without --dry-run."
        show(as_json, lambda: _plan_json(planned), lambda: [*plan_lines(planned), ending])
        return
    for line in plan_lines(planned):
        say(line)
    _ask_leave(planned, yes=bool(options["yes"]))
    out = output_folder(options["out"]) if options["out"] else None
    try:
        document, folder = rescore(planned, out, _Bar())
    except KeyboardInterrupt:
        say("What was judged is kept: the same command goes on from there.")
        raise
    show(
        as_json,
        lambda: {**document, "folder": str(folder)},
        lambda: ["", *document_lines(document)],
    )
    if not as_json:
        for line in next_lines(document, folder, words, planned.wanted.runs[0].overrides):
            say(line)


def _planned(words: Sequence[str], options: dict[str, Any]) -> Planned:
    from flows.rescoring.asking import Prices
    from flows.rescoring.planning import Options, plan_rescoring
    from flows.rescoring.reading import Part

    where, rest = split_workspace(words)
    names, overrides = split_overrides(rest)
    part = {name: options[name] for name in ("source", "sample", "models", "decodings")}
    judges, rubrics, weights = (options[name] for name in ("judges", "rubrics", "weights"))
    more = {name: options[name] for name in ("steps", "baseline", "metric", "common")}
    return plan_rescoring(
        names,
        where,
        options=Options(judges, rubrics, weights, tuple(overrides), options["cross"]),
        part=Part(**part),
        prices=Prices(options["price_in"], options["price_out"]),
        **more,
    )


def _plan_json(planned: Planned) -> dict[str, Any]:
    return {
        "version": 1,
        "dry_run": True,
        "id": planned.short_id,
        "policies": [
            {**picked(p, "name", "run", "steps"), "rollouts": len(p.rollouts)}
            for p in planned.policies
        ],
        "settings": [setting.name for setting in planned.settings],
        "judging": [
            {
                **{"judge": plan.name, "questions": len(plan.questions), "stored": plan.kept},
                **picked(plan, "identity", "reused", "calls"),
                "unknown": len(plan.unknown) - plan.kept,
                "prompt_tokens_about": plan.prompt_tokens,
            }
            for plan in planned.judges.values()
            if plan.questions
        ],
        "calls": planned.new_calls,
    }


def _ask_leave(planned: Planned, *, yes: bool) -> None:
    """Before many calls, ask; where nobody can answer, refuse."""
    calls = planned.new_calls
    if yes or calls <= ASK_ABOVE:
        return
    if sys.stdin.isatty() and click.confirm(f"Make {calls} calls?", err=True):
        return
    raise ConfigurationError(
        f"This takes {calls} new calls of judges, and nobody has said yes to that.",
        expected=f"at most {ASK_ABOVE} calls, or leave to make more",
        fix="add --yes; or judge fewer rollouts with --steps last:5 or --sample 200",
    )


class _Bar:
    """Progress of judging, on standard error."""

    def __init__(self) -> None:
        self._waiting = False
        self.scored = progress("scorings")

    def paused(self, why: str) -> None:
        """All servers are gone, which the log says; or that is over, with an answer or without."""
        self._waiting = self._waiting or bool(why)

    def judged(self, judge: str, done: int, total: int) -> None:
        """So many judgements of a judge have come."""
        if self._waiting:
            say("A server answers again.")
            self._waiting = False
        progress(f"judgements of {judge}")(done, total)
        if done == total:
            say(f"{judge}: {done} judgements")
