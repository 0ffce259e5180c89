"""This machine: its processes and file systems, and what must not be shown of its environment.

``processes`` (is one still the same), ``mounts`` (where a folder lies), ``secrets`` (texts without
credentials). The lowest room: it knows no workspace.
"""
