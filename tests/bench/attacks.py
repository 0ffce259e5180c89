"""Attacks on the rewards of the shipped recipes: which pay, and which still pay with prices.

    python -m tests.bench attacks

The judge is the lexical one and the rows are synthetic, for recipes of large models too: the table
shows what the formulas of the rewards give away, not how a model as judge is fooled. For that, name
the judge: `refiner reward attack RECIPE judge.base_url=…`. Prints one Markdown table.
"""

from typing import Any

from flows.attacking import attack_reward
from refiner_core.contract.fingerprint import identity_values
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.recipes import shipped_recipes
from refiner_core.report.printing import with_interval

#: The judge and the rows, whatever the recipe says.
HERE = ("judge.kind=lexical", "judge.model=lexical-1", "data.rl_path=builtin:synthetic",
        "data.sft_path=builtin:synthetic", "data.held_out_fraction=0.2",
        "data.synthetic_rl_rows=1000",
        "workspace=/nonexistent/refiner")  # fmt: skip
#: A price for each measure.
PRICES = tuple(
    f"reward.penalties.{price}"
    for price in ("copied_sources=0.5", "uncited=0.5", "outside=0.1", "long_spans=0.2",
                  "long_span_words=12", "unsupported=0.1", "repeated=0.2", "abstention=0.2",
                  "length=0.2", "length_words=60")
)  # fmt: skip
ROWS = 200


def main(arguments: list[str]) -> int:
    """Attack each distinct reward; 0."""
    rewards: dict[str, list[str]] = {}
    for recipe in shipped_recipes():
        config = load_recipe(recipe)
        if not config.environment.name:
            rewards.setdefault(str(identity_values(config, ["reward"])), []).append(recipe)
    found: dict[str, dict[str, Any]] = {}
    for letter, recipes in zip("ABCDEFGH", rewards.values(), strict=False):
        print(f"{letter}: {', '.join(recipes)}  ")
        for name, prices in ((letter, ()), (f"{letter}, priced", PRICES)):
            found[name] = attack_reward(recipes[0], [*HERE, *prices, *arguments], count=ROWS)
    print(f"\nPriced: {' '.join(PRICES)}\n\n| attack | {' | '.join(found)} |")
    print(f"|---|{'---|' * len(found)}")
    honest = [f"{d['honest']['mean']:.2f}" for d in found.values()]
    print(f"| *honest answer* | {' | '.join(honest)} |")
    for row in zip(*(d["attacks"] for d in found.values()), strict=True):
        print(f"| {row[0]['name']} | {' | '.join(map(_gain, row))} |")
    return 0


def _gain(attack: dict[str, Any]) -> str:
    ends = attack["difference_low"], attack["difference_high"]
    text = with_interval(attack["difference"], *ends, 2, signed=True)
    return f"**{text}**" if attack["pays"] else text
