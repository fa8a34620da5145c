"""One module per notebook: parameters in, measured rows out. Nothing here draws for the book."""
