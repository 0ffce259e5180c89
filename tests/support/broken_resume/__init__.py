"""A folder for PYTHONPATH: its `sitecustomize` breaks what resumes in every worker."""
