"""The picture of a campaign in Prefect, drawn by a process of its own."""
