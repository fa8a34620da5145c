"""What an executed notebook shows."""


def texts(notebook):
    """Each output as text: what was printed, or shown beside an image or as a table."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.get("text", "") + output.get("data", {}).get("text/plain", "")
