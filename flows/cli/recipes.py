"""`refiner list`, `show`, `completion`: what is shipped, what a field is, and what a
shell needs to complete both.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    Listing,
    command_line,
    json_option,
    misuse,
    print_json,
    say,
    show,
    show_listing,
    split_overrides,
    until_nobody_reads,
)

if TYPE_CHECKING:
    from refiner_core.contract.config import RecipeConfig


def _recipes() -> Listing:
    """With the GPUs that the largest stage of each asks for."""
    from flows.plans import list_recipes

    found = list_recipes()
    rows = [(name, _gpus(config), config.description) for name, config in found.items()]
    following = ("refiner plan tiny", "refiner init DIR --help", "refiner show SECTION RECIPE")
    value = {"recipes": {name: config.description for name, config in found.items()}}
    return value, rows, ("name", "GPUs", "for"), following


def _gpus(config: RecipeConfig) -> str:
    """Of the largest of its stages, over all its nodes."""
    stages = [getattr(config, name).resources for name in config.stages]
    return str(max((r.gpus * r.nodes for r in stages), default=0) or "none")


def _profiles() -> Listing:
    from infra.slurm.profiles import list_profiles

    found = list_profiles()
    following = ("refiner plan RECIPE dispatch.executor=slurm dispatch.profile=NAME",)
    return {"profiles": found}, list(found.items()), ("name", "for"), following


def _rubrics() -> Listing:
    from flows.checking.sets import list_rubric_sets
    from flows.cli.sets import set_json

    def count(polarity: str) -> int:
        return sum(r.polarity == polarity for r in one.rubrics)

    sets, rows = list_rubric_sets(), []
    for one in sets:
        size = f"{count('positive')} + {count('negative')}"
        rows.append((one.name, str(one.version), size, one.digest()[:12], one.description))
    header = ("name", "version", "rubrics (+ -)", "digest", "for")
    following = ("refiner rubrics show NAME", "refiner plan RECIPE reward.static_rubrics=NAME")
    return {"sets": [set_json(one) for one in sets]}, rows, header, following


def _protocols() -> Listing:
    from flows.checking.sets import list_protocols

    found = list_protocols()
    rows = [
        (k.protocol.name, k.fingerprint, ", ".join(k.protocol.sections), k.description)
        for k in found
    ]
    following = ("refiner protocols show NAME", "refiner plan RECIPE evaluate.protocols=[NAME]")
    value = {"protocols": [known.as_json() for known in found]}
    return value, rows, ("name", "fingerprint", "fixes", "for"), following


def _environments() -> Listing:
    from flows.checking.sets import list_environments

    known = dict(list_environments())
    following = ("refiner environments show desk", "refiner plan tiny-tools")
    return {"environments": known}, list(known.items()), ("name", "for"), following


_LISTINGS = {
    **{"recipes": _recipes, "profiles": _profiles, "rubrics": _rubrics},
    **{"protocols": _protocols, "environments": _environments},
}


@click.command("list")
@click.argument("kind", type=click.Choice(tuple(_LISTINGS)), metavar="KIND")
@json_option
def list_command(kind: str, as_json: bool) -> None:
    """List what comes with refiner of KIND: recipes, profiles (of Slurm), rubrics, protocols,
    environments.

    A recipe of your own is a YAML file with `include: NAME` and the fields that differ (`refiner
    init` writes one); a profile, a rubric set and a protocol of your own is a YAML file, too.
    """
    value, rows, header, following = _LISTINGS[kind]()
    show_listing(as_json, lambda: {"version": 1, **value}, rows, header, following)


@click.command("show")
@click.argument("words", nargs=-1, metavar="[FIELD] [RECIPE] [KEY=VALUE]...")
@click.option("--all", "every", is_flag=True, help="every field, with a line each")
@click.option("--search", metavar="WORD", default="", help="fields that speak of WORD")
@click.option("--schema", is_flag=True, help="the JSON Schema of a recipe file, for editors")
@json_option
def show_command(
    words: tuple[str, ...], every: bool, search: str, schema: bool, as_json: bool
) -> None:
    """Explain FIELD: `grpo.beta`, a last part such as `beta`, or a section such as `grpo`.

    Its type, default and mark: an identity field decides what is computed (with another value
    stages run again), an execution field only where and how. With RECIPE, its value there, and the
    file and line, or the override, that has set it. Without FIELD, list the sections.
    """
    from flows.starting.fields import explain_fields, field_json, field_lines, field_rows
    from refiner_core.contract.field_facts import fields_below, sections

    if schema:
        from refiner_core.contract.field_facts import recipe_schema

        print_json(recipe_schema())
        return
    names, overrides = split_overrides(words)
    # FIELD comes first, unless all or a search make it needless.
    field = "" if every or search or not names else names.pop(0)
    recipe = names.pop(0) if names else ""
    if names or (overrides and not recipe):
        raise misuse(f"It was given {' '.join(words)}; overrides follow a recipe.")
    facts, found = explain_fields(field, recipe, overrides, search=search)

    def again(name: str) -> str:
        return command_line("show", name, *[recipe] * bool(recipe), *overrides)

    if not (field or every or search):
        listed: list[dict[str, Any]] = [
            {"section": n, "doc": doc, "fields": fields_below(n)} for n, doc in sections().items()
        ]
        show_listing(
            as_json,
            lambda: {"version": 1, "sections": listed},
            [(s["section"], str(len(s["fields"])), s["doc"]) for s in listed],
            ("section", "fields", "what it is"),
            ("refiner show SECTION", "refiner show FIELD RECIPE", "refiner show --search WORD"),
        )
        return

    def value() -> dict[str, object]:
        return {"version": 1, "fields": [field_json(one, found) for one in facts]}

    if len(facts) > 1:
        with_value = ("value", "source") if found else ("default",)
        header = ("field", "mark", *with_value, "what it is")
        rows = field_rows(facts, found)
        show_listing(as_json, value, rows, header, [again(facts[0].path)])
        return
    path = facts[0].path
    section = path.rpartition(".")[0]
    following = [again(section)] if section else ["refiner show"]
    if not recipe:
        following = [command_line("show", path, "tiny"), *following]
    show(as_json, value, lambda: field_lines(facts[0], found), following, gap=True)


# ---------------------------------------------------------------- completion


# Bash parts words at `=` and `:`, and puts in only what comes behind the last of them.
_BASH = """\
_refiner_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" head="" breaks="" sign word reply
    word="${line##*[[:space:]]}"
    for sign in = :; do
        [[ $COMP_WORDBREAKS == *"$sign"* ]] && breaks+="$sign"
    done
    if [[ -n $breaks && $word == *[$breaks]* ]]; then
        head="${word%"${word##*[$breaks]}"}"
    fi
    COMPREPLY=()
    while IFS= read -r reply; do
        COMPREPLY+=("${reply#"$head"}")
    done < <("$1" completion bash --line "$line" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/.,] ]]; then
        compopt -o nospace 2>/dev/null
    fi
    return 0
}
complete -F _refiner_complete refiner
"""
_ZSH = """\
#compdef refiner
_refiner() {
    local -a open closed
    local reply
    while IFS= read -r reply; do
        case "$reply" in
            *[=/.,]) open+=("$reply") ;;
            ?*) closed+=("$reply") ;;
        esac
    done < <("$words[1]" completion zsh --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)
    (( $#open )) && compadd -Q -S '' -- "${open[@]}"
    (( $#closed )) && compadd -Q -- "${closed[@]}"
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _refiner "$@"
else
    compdef _refiner refiner
fi
"""
_FISH = """\
complete -c refiner -f -a '(refiner completion fish --line (commandline -cp) 2>/dev/null)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_INSTALL = {
    "bash": """echo 'eval "$(refiner completion bash)"' >> ~/.bashrc""",
    "zsh": """echo 'eval "$(refiner completion zsh)"' >> ~/.zshrc    # behind its compinit""",
    "fish": "refiner completion fish > ~/.config/fish/completions/refiner.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(tuple(_SCRIPTS)), metavar="[SHELL]", required=False)
@click.option("--install", is_flag=True, help="only print the line that sets it up for good")
@click.option("--line", hidden=True, help="answer a shell: what may follow on this line?")
def completion_command(shell: str | None, install: bool, line: str | None) -> None:
    """Print what SHELL (bash, zsh, fish; default: yours) needs to complete `refiner`.

    Completed are commands, options, recipes, sweeps, runs, stages, files, and fields with their
    values: `refiner run tiny grpo.kl_` and the tabulator key.
    """
    used = shell or os.path.basename(os.environ.get("SHELL", ""))  # noqa: PTH119 - a name
    used = used if used in _SCRIPTS else "bash"
    with until_nobody_reads():
        if line is not None:
            from flows.cli.main import cli
            from flows.starting.completing import candidates

            for value, about in candidates(cli, line):
                click.echo(f"{value}\t{about}" if used == "fish" and about else value)
        elif install:
            click.echo(_INSTALL[used])
        else:
            click.echo(_SCRIPTS[used], nl=False)
            say(f"\nNext (once; new shells then complete):\n  {_INSTALL[used]}")
