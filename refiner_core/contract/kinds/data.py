"""``data``: rows, or an environment's tasks, to tokenised sets for training and evaluation."""

from refiner_core.contract.kinds.kind import ENVIRONMENT_DATA, TOKENIZER, Kind

DATA = Kind(
    "data",
    order=10,
    run="flows.stages.data:run_data",
    version=2,
    version_of_agents=1,
    changes={
        2: "questions that differ in punctuation, quotes or invisible characters alone are one "
        "question, held out or not"
    },
    fields=(
        "data",
        *TOKENIZER,
        "sft.pack_length",
        "grpo.response_length",
        "grpo.max_token_length",
        *ENVIRONMENT_DATA,
    ),
    sources=("data.sft", "data.rl", "model", "environment"),
    hub_reads=("model", "tokenizer", "data.sft", "data.rl"),
)

KINDS = (DATA,)
