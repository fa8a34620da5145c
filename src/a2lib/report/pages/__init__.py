"""One module a page of the book: the columns that it derives, and charts of its own. No text."""
