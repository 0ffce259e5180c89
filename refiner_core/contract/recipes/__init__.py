"""Recipes and protocols as files: found by name or path, read, with whole paths in them."""
