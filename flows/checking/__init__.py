"""What a plan is checked against before anything runs: files, models, memory."""
