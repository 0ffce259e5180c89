"""``card``: the published card, with the evaluations' numbers in it."""

from refiner_core.contract.kinds.kind import Kind

KIND = Kind(
    "card",
    order=110,
    run="flows.publishing:refresh_card",
    section="publish",
    part_of="publish",
    fields=("publish.license", "publish.card_template"),
    sources=("card_template",),
    needs_network=lambda config: config.publish.target == "hub",
)
