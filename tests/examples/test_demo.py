"""What the demo tells and looks for before it begins."""

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

from cairn.service.sizes import size_text
from examples.demo import needs

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_what_it_takes_is_told_with_its_folder(tmp_path):
    told = needs.told(tmp_path)
    assert f"6 minutes on 2 cores, 6.0 GB of disk in {tmp_path} and 6.0 GB of memory" in told


def test_the_readme_says_beforehand_what_the_demo_says():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    disk, memory = (size_text(one) for one in (needs.DISK_BYTES, needs.MEMORY_BYTES))
    told = (f"up to {needs.MINUTES} minutes on two cores", f"{disk} of disk", f"{memory} of memory")
    assert [one for one in told if one.replace(".0", "") not in readme] == []


def test_too_little_disk_or_memory_is_told_with_what_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**10, 0, 5 * 10**9))
    monkeypatch.setattr(needs, "free_memory", lambda: 10**9)
    disk, memory = needs.lacking(tmp_path)
    assert f"{tmp_path}: expected 6.0 GB of free disk, found 5.0 GB" in disk
    assert "make demo DEMO_DIR=" in disk
    assert "expected 6.0 GB of memory to be had, found 1.0 GB" in memory
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**11, 0, 10**11))
    monkeypatch.setattr(needs, "free_memory", lambda: None)
    assert needs.lacking(tmp_path) == []


def test_a_container_may_have_less_than_its_machine(tmp_path):
    memory, limit, used = (tmp_path / name for name in ("meminfo", "max", "current"))
    assert needs.free_memory(memory, limit, used) is None  # no Linux
    memory.write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    assert needs.free_memory(memory, limit, used) == 8_192_000_000
    limit.write_text("max\n")
    used.write_text("1000\n")
    assert needs.free_memory(memory, limit, used) == 8_192_000_000
    limit.write_text("3000\n")
    assert needs.free_memory(memory, limit, used) == 2000


def test_it_ends_before_it_begins_where_there_is_too_little(tmp_path):
    code = (
        "import sys; from examples.demo import needs, __main__ as demo; "
        f"needs.DISK_BYTES = 10**18; sys.argv[1:] = ['--folder', {str(tmp_path)!r}]; "
        "sys.exit(demo.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    said = " ".join(done.stdout.split())  # whose lines are as wide as the terminal
    told = said.index(f"It takes up to {needs.MINUTES} minutes on 2 cores, ")
    assert told < said.index("of free disk, found")
    assert list((tmp_path / "file").iterdir()) == []
