"""Shipped recipes (YAML). `refiner run NAME` takes the name of a file here."""
