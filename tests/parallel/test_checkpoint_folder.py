"""The folder that a checkpoint is written to belongs to one save."""

import fcntl

from a2lib.parallel.fsdp.checkpoint import LOCK, _new_folder


def test_a_save_that_begins_is_not_taken_for_one_that_was_killed(tmp_path, monkeypatch):
    """Another save looks for unfinished ones just before this one has its lock."""
    real, others = fcntl.flock, []

    def flock(file, how):
        if how == fcntl.LOCK_EX and not others:
            others.append("other")
            with _new_folder(tmp_path / "other", tmp_path / "other.part"):
                pass
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with _new_folder(tmp_path / "mine", tmp_path / "mine.part"):
        assert others and (tmp_path / "mine.part" / LOCK).exists()
