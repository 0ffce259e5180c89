"""``publish``: weights and a card to a folder in Hub layout, or to the Hub."""

from refiner_core.contract.kinds.kind import Kind

KIND = Kind(
    "publish",
    order=90,
    run="flows.publishing:publish",
    fields=("publish",),
    sources=("card_template",),
    needs_network=lambda config: config.publish.target == "hub",
)
