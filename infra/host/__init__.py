"""This machine: its processes and file systems, and the masking of secrets.

``processes`` (identity of a process, holder of a port), ``gpus`` (who uses which), ``files`` (reads
with retries, mounts), ``secrets`` (texts without credentials), ``terminal`` (texts without control
sequences). The lowest package: it knows no workspace.
"""
