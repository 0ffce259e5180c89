"""Checks of this machine: what works for refiner, what does not, and how to fix it."""
