"""Pictures that the READMEs show, and what makes them."""
