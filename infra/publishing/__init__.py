"""Publishing into places: folders, what they share with the Hub, and the rules of changing them.

``targets`` (a publication, and what takes one), ``rules`` (what a new one may change), ``folder``
(one kind of place; :mod:`infra.hub` is the other).
"""
