"""The model: loading and export, log-probabilities, optimisers.

In order of reading: ``loading`` (from a folder to a trainable model and back; parameters by
name), ``logprobs`` (a batch to log-probabilities of its targets), ``optim`` (gradients to weights,
schedules).
"""
