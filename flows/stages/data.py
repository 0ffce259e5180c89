"""``data``: rows, or an environment's tasks, to tokenised training and held-out sets."""

from __future__ import annotations

from typing import Any

from flows.stages.work import StageWork, as_planned


def run_data(work: StageWork) -> dict[str, Any]:
    """Rows, or an environment's tasks, to tokenised training, validation and held-out sets."""
    from refiner_core.data.prepare import prepare_data
    from refiner_core.generation.load import load_tokenizer

    tokenizer = load_tokenizer(work.config.model.name_or_path, work.config.model)
    if work.config.environment.name:
        from refiner_core.data.tasks import prepare_tasks
        from refiner_core.environments.registry import open_environment

        return prepare_tasks(
            work.config,
            environment=open_environment(work.config, evaluation=False),
            digest=as_planned(work.spec.sources, work.config),
            tokenizer=tokenizer,
            output_dir=work.output_dir,
            io=work.io,
        )
    return prepare_data(work.config, tokenizer=tokenizer, output_dir=work.output_dir, io=work.io)
