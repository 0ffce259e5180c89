"""From raw rows to prepared rows.

``sources`` (where rows come from) → ``rows`` (what a row must be) → ``prepare`` (chat template,
filters, split, loss mask) → ``prepared`` (the files that training and evaluation read).
``synthetic`` makes the rows of the embedded world.
"""
