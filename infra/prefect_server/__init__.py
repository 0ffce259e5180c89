"""One local Prefect server per user and node."""
