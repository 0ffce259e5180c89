"""`refiner why`: from a printed number to what it was made of, in :mod:`flows.why.explanation`."""
