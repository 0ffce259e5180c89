"""What a recipe's fields must be together, section by section."""
