"""Examples to read, run and change: notebooks as plain Python, with a cell at each ``# %%``."""
