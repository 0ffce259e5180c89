"""Training in plain torch: packs, losses, optimisers, SFT and GRPO. Importing this is light.

In: prepared rows, a model folder and a :class:`~refiner_core.contract.types.StageIO`.
Out: an exported model folder and a JSON-ready report.

The loops are ``sft`` and ``grpo``; ``export`` turns a checkpoint into a model folder, ``equality``
compares two trainings that should be equal, ``ranks`` holds the processes that train together,
``monitor`` looks at a gold reward beside GRPO's own.
Subpackages, each using only those before it: ``batches`` (rows to tensors), ``model`` (tensors to
log-probabilities, gradients to weights), ``engines`` (plain torch or DeepSpeed behind one
interface, with saved state), ``steps`` (around a step), ``rollouts`` (prompts to rewarded samples),
``updates`` (rewarded samples to weights).
"""
