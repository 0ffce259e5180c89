"""Cards as files, folders, repositories and records, and the command that a card gives.

``inspection`` is what `refiner card` does: it checks cards and the commands on them, and makes them
again; ``reproduction`` makes the command on a card and plans it again before the card is accepted.
"""
