"""Part of a test double; see the README beside the package."""
