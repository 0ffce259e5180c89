"""Cards as files, folders, repositories and records, and the command that a card gives.

``calls`` is what `refiner card` does; ``recipe_text`` -> ``reproduction`` -> ``commands`` make the
command on a card and plan it again before the card is accepted.
"""
