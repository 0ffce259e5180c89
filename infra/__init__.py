"""The world outside: workspace, records, dispatch, disk, services, hub, tracking."""
