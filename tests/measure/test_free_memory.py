"""What tells that the memory ran out."""

import pytest

from a2lib.measure import memory


@pytest.fixture
def system(monkeypatch, tmp_path):
    """``system(groups, {path: text})`` is a /proc/self/cgroup and files below /sys/fs/cgroup."""

    def make(groups, files, vmstat="oom_kill 7\n"):
        (tmp_path / "cgroup").write_text(groups)
        (tmp_path / "vmstat").write_text(vmstat)
        for path, text in files.items():
            path = tmp_path / "fs" / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(memory, "_ROOT", tmp_path / "fs")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_VMSTAT", tmp_path / "vmstat")
    return make


EVENTS = "low 0\nhigh 0\nmax 3\noom 2\noom_kill {}\noom_group_kill 9\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/a/b\n", {"a/b/memory.events": EVENTS.format(3)}, 3),
        ("0::/\n", {"memory.events": EVENTS.format(4)}, 4),  # a container of version 2
        ("0::/host/x\n", {"memory.events": EVENTS.format(5)}, 5),
        ("5:cpu,memory:/a\n0::/\n", {"memory/a/memory.oom_control": CONTROL.format(6)}, 6),
        ("5:memory:/docker/x\n", {"memory/memory.oom_control": CONTROL.format(2)}, 2),
        ("0::/a\n", {}, 7),
        ("", {}, 7),
    ],
)
def test_kills_are_counted_where_the_system_counts_them(system, groups, files, count):
    system(groups, files)
    assert memory.oom_kills() == count


def test_a_system_that_counts_nothing_gives_no_evidence(system, tmp_path):
    system("", {}, vmstat="")
    assert memory.oom_kills() == 0
    assert memory.Watch().reason() == ""
    for path in ("cgroup", "vmstat"):
        (tmp_path / path).unlink()
    assert memory.oom_kills() == 0


@pytest.mark.parametrize("share, said", [(0.09, "1.44 GiB of memory were left"), (0.11, "")])
def test_little_memory_left_at_any_look_is_evidence(system, monkeypatch, share, said):
    system("", {}, vmstat="")
    free = iter((2**34, int(share * 2**34), 2**34))
    monkeypatch.setattr(memory, "_free_on_host", lambda: next(free))
    monkeypatch.setattr(memory, "_free_in_container", lambda: 1 << 62)
    watch = memory.Watch()  # which looks itself
    watch.look()
    watch.look()
    assert watch.reason() == said
