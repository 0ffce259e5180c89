"""Ablations: expand a sweep into trials, forecast it, compare its arms."""
