"""Proof that training resumes exactly, for `refiner prove-resume`."""
