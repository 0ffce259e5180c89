"""`refiner completion`: what a shell needs to complete commands, fields, recipes and runs."""

from __future__ import annotations

import os

import click

from flows.cli.options import say, until_nobody_reads

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
