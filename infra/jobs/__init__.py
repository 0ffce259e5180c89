"""Jobs: what is asked of whatever runs them, this machine's own, and what they run."""
