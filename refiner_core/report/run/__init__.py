"""The report of a run: what it did, how it went, what it learned to say."""
