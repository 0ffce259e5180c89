"""What of this machine works for refiner, what does not, and what mends it."""
