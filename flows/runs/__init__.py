"""Runs of a workspace, all together: ``run_table`` lists them, ``run_filter`` chooses among them,
``removing`` deletes them, ``bundling`` takes one along, ``ui`` shows them in a browser."""
