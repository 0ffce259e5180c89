"""What runs inside a rollout server: this folder is on its import path, and refiner is not."""
