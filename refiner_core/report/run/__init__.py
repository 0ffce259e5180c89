"""The report of a run: its stages, cost, numbers and examples."""
