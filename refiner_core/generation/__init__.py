"""Sampling: prompts as token ids go in, completions with their log-probabilities come out."""
