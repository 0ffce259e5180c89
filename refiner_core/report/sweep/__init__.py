"""The report of a sweep: its arms, compared and drawn."""
