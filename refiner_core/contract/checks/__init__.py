"""Checks of a recipe's fields in combination, section by section."""
