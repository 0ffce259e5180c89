"""Publishing into places: folders, what they share with the Hub, and the rules of changing them."""
