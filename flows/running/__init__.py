"""Calls of `refiner run`: begun, worked on, shown, detached, cancelled."""
