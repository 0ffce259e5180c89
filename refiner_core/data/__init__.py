"""From raw rows to prepared rows.

``sources`` (files and data sets of rows) → ``rows`` (validation of rows) → ``prepare`` (chat
template, filters, split, loss mask) → ``prepared`` (the files for training and evaluation).
``synthetic`` generates the synthetic rows.
"""
