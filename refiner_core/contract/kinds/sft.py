"""``sft``: demonstrations to weights."""

from refiner_core.contract.kinds.kind import MODEL_READS, CardWords, Kind

KIND = Kind(
    "sft",
    order=20,
    run="flows.ranks.training:run_training",
    fields=("seed", "model", "sft"),
    sources=("model",),
    hub_reads=MODEL_READS,
    trains="demonstrations",
    label="SFT",
    card=CardWords(
        algorithm="Supervised fine-tuning (SFT)",
        short="SFT",
        tags=("sft",),
        made="fine-tuned on demonstrations of cited answers",
        made_by_agents="fine-tuned on conversations with tools",
        sections=("model", "sft", "data", "seed"),
        silent=("grpo.", "reward.", "judge.", "command.", "publish.", "evaluate."),
    ),
)
