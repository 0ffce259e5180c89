"""Training in plain torch: packs, losses, optimisers, SFT and GRPO. Importing this is light.

In: prepared rows, a model folder and a :class:`~refiner_core.contract.types.StageIO`.
Out: an exported model folder and a JSON-ready report.

The loops are ``sft`` and ``grpo``; ``export`` makes a model folder of a checkpoint, ``equality``
compares two trainings that should be one, ``ranks`` are the processes that train together. Rooms,
each of which uses those before it: ``batches`` (rows to tensors), ``model`` (tensors to
log-probabilities, gradients to weights), ``engines`` (plain torch or DeepSpeed, with one interface,
and their state out and in), ``steps`` (around a step), ``rollouts`` (prompts to rewarded samples),
``updates`` (these to weights).
"""
