"""Training stages in one process or many: what the worker starts, and what each rank runs."""
