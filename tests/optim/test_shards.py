"""MasterAdamW over FSDP's parameters, in two ranks."""

from pathlib import Path

from forked import run_script

SCRIPT = Path(__file__).with_name("shards_script.py")


def test_over_shards_it_is_that_of_one_process(tmp_path):
    done = run_script(SCRIPT, folder=tmp_path, ranks=2, seconds=240)
    assert done.returncode == 0, done.printed
