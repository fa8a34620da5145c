"""One module a page of the book: the columns that it derives, and drawings of its own. No text."""
