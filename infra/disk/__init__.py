"""Disk as a resource: room and the lack of it, quotas, reservations, what can be reclaimed."""
