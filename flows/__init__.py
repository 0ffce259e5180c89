"""The wiring: Prefect flows, the `refiner` command, recipes, and the worker that a job runs."""
