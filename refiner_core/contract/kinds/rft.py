"""``rft``: rejection fine-tuning, on those of the model's own attempts that were kept."""

from refiner_core.contract.kinds.kind import MODEL_READS, CardWords, Kind

KIND = Kind(
    "rft",
    order=50,
    run="flows.ranks.training:run_training",
    fields=("seed", "model", "rft"),
    sources=("model",),
    hub_reads=MODEL_READS,
    trains="demonstrations",
    learns_from="sample",
    on_prompts=True,
    shown_where_used=True,
    label="RFT",
    card=CardWords(
        algorithm="Rejection fine-tuning (RFT)",
        short="RFT",
        tags=("rft",),
        made="fine-tuned on its own best answers (rejection fine-tuning)",
        made_by_agents="fine-tuned on its own best attempts (rejection fine-tuning)",
        sections=("model", "sample", "rft", "reward", "judge", "data", "seed"),
        silent=("grpo.", "command.", "publish.", "evaluate."),
        data_sets=("sft", "rl"),
    ),
)
