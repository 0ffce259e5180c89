"""The model itself: in and out of a folder, its log-probabilities, tensors and optimisers.

In order of reading: ``loading`` (a folder to a model that may be trained, and back; parameters by
name), ``logprobs`` (a batch to log-probabilities of its targets), ``optim`` (gradients to weights,
schedules).
"""
