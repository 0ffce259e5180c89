"""Code that runs inside a rollout server: this folder is on its import path, refiner is not."""
