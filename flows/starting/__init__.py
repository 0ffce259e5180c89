"""Beginning: a folder with a recipe of one's own, what its fields mean, completion in shells."""
