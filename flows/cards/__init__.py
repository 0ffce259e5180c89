"""Cards as files, folders, repositories and records, and the command on a card.

``inspection`` implements `refiner card`: it checks cards and their commands, and renders cards
again. ``reproduction`` makes the command on a card and plans it before the card is accepted.
"""
