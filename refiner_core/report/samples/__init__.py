"""The page of all samples of a run: a list to filter and search, and one sample in full."""
