"""W&B as a second place for metrics and tables."""
