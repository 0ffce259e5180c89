"""Sections of a recipe: fields with their marks, and the checks of one section alone."""
