"""Evaluation: weights and held-out prompts go in, numbers with intervals and evidence come out."""
