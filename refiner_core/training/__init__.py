"""Training in plain torch: packs, losses, optimisers, SFT and GRPO. Importing this is light.

In: prepared rows, a model folder and a :class:`~refiner_core.contract.types.StageIO`.
Out: an exported model folder and a JSON-ready report.

Who calls whom: ``sft`` and ``grpo`` are the loops; both use ``order`` (which row when), ``packing``
(rows to tensors), ``logprobs`` (tensors to log-probabilities), ``optim`` (gradients to weights),
``engine`` (model in, model out) and ``checkpoint`` (state in, state out). ``grpo`` adds ``rollout``
(prompts to rewarded samples), ``advantages``, ``losses`` and ``grpo_update``.
"""
