"""Brings the world to a plan: looks, reconciles, acts; and says why attempts ended and what came
of it."""
