"""An attempt from the inside: its IO, its sign of life, requests to stop, its log."""
