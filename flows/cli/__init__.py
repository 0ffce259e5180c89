"""The `refiner` command. Commands import what they need when they run, so `--help` is quick."""
