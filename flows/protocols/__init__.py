"""Shipped protocols (YAML). `evaluate.protocols` takes the name of a file here."""
