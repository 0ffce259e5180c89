"""Page over all runs of a workspace: a table, a selection's curves, sweeps and nights."""
