"""This machine: its processes and file systems, and what must not be shown of its environment.

``processes`` (is one still the same, who listens at a port), ``files`` (reads that are asked again,
where a folder lies), ``secrets`` (texts without credentials), ``terminal`` (texts without control
sequences). The lowest room: it knows no workspace.
"""
