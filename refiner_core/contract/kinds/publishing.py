"""Kinds that publish a model to a Hub or folder, with its card."""

from refiner_core.contract.kinds.kind import MODEL_READS, Kind

#: ``export``: a checkpoint, possibly of a running training, to weights in the Hub's layout.
EXPORT = Kind(
    "export",
    order=80,
    run="flows.stages.export:run_export",
    section="publish",
    part_of="publish",
    hub_reads=MODEL_READS,
)

#: ``publish``: weights and a card to a folder in Hub layout, or to the Hub.
PUBLISH = Kind(
    "publish",
    order=90,
    run="flows.publishing:publish",
    fields=("publish",),
    sources=("card_template",),
    needs_network=lambda config: config.publish.target == "hub",
)

#: ``card``: the published card, with the evaluations' numbers in it.
CARD = Kind(
    "card",
    order=110,
    run="flows.publishing:refresh_card",
    section="publish",
    part_of="publish",
    fields=("publish.license", "publish.card_template"),
    sources=("card_template",),
    needs_network=lambda config: config.publish.target == "hub",
)

KINDS = (EXPORT, PUBLISH, CARD)
