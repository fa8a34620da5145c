"""What an error of this library looks like to its reader."""


class OneLine:
    """Mixed into an exception whose message says all there is to say, on one line.

    IPython shows the lines of ``_render_traceback_`` in place of a traceback, and papermill repeats
    them.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UnsupportedError(RuntimeError):
    """This implementation cannot run these inputs here; the message says why and what can."""
