"""Rollouts from vLLM servers over HTTP, and how new weights get there."""
