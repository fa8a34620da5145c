"""What is free for a trial on the CPU."""

from a2lib.measure import memory


def test_a_container_has_what_its_limit_leaves(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    monkeypatch.setattr(memory, "_free_on_host", lambda: 2**40)
    host = memory.available_bytes()
    files = {"memory.max": 1000, "memory.current": 700, "memory.stat": "anon 1\ninactive_file 200"}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert memory.available_bytes() == 0.8 * (1000 - 700 + 200) < host
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() == memory.free_bytes("cpu") == host
