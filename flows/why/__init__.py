"""`refiner why`: from a printed number to its origin, in :mod:`flows.why.explanation`."""
