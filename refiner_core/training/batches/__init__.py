"""Rows to tensors: packs of several sequences, the order of rows, and which rank takes which.

In order of reading: ``packing`` (sequences to rows of tokens, isolated from each other), ``order``
(which row when, as a function of seed and step), ``shares`` (a step shared out over ranks).
"""
