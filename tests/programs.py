"""Programs that stand in for others, and what one has said."""


def write_program(path, text):
    """A script that can be run; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def printed(child, seconds=120):
    """Return what a child of the fixture ``python`` has printed, once it has ended well."""
    out, errors = child.communicate(timeout=seconds)
    assert child.returncode == 0, errors[-3000:]
    return out
