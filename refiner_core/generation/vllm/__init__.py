"""Rollouts from vLLM servers over HTTP, and the transfer of new weights to them."""
