"""Programs that stand in for others."""


def write_program(path, text):
    """A script that can be run; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
