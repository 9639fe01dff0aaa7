"""A forked program is one like those that `subprocess` starts."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.devices import QUICKLY, xla_flags
from tests.programs.interpreter import FINALIZED
from tests.programs.program import Program, run


def test_it_has_the_arguments_folder_variables_and_streams_that_it_was_given(tmp_path):
    code = """
import os, sys
print(sys.argv, os.getcwd(), os.environ.get("ONE"), os.environ.get("HOME"), sys.path[0])
print(__name__, sys.modules["__main__"].__dict__ is globals(), sys.stdin.read(), file=sys.stderr)
"""
    variables = {key: text for key, text in os.environ.items() if key != "HOME"}
    done = run(["-c", code, "a", "b c"], cwd=tmp_path, env={**variables, "ONE": "1"})
    assert done.stdout == f"['-c', 'a', 'b c'] {tmp_path} 1 None \n"
    assert done.stderr == "__main__ True \n"
    assert done.returncode == 0


@pytest.mark.parametrize("module", [True, False], ids=["module", "script"])
def test_a_module_and_a_script_import_what_lies_beside_them(tmp_path, module):
    (tmp_path / "beside.py").write_text("NAME = __name__")
    (tmp_path / "program.py").write_text("import beside, sys; print(beside.NAME, sys.argv[1:])")
    started = ["-m", "program"] if module else [tmp_path / "program.py"]
    done = run([*started, "--flag"], cwd=tmp_path if module else None)
    assert done.stdout == "beside ['--flag']\n", done.stderr


def test_each_has_devices_of_its_own():
    code = "import jax; print(jax.device_count())"
    programs = [
        Program(
            ["-c", code],
            env={**os.environ, "XLA_FLAGS": xla_flags(count)},
            stdout=subprocess.PIPE,
        )
        for count in (2, 3)
    ]
    assert [program.communicate()[0] for program in programs] == ["2\n", "3\n"]


@pytest.mark.parametrize("finalized", [False, True])
def test_it_ends_as_an_interpreter_does(finalized):
    env = {**os.environ, FINALIZED: "1"} if finalized else None
    code = """
import atexit, sys, threading, time
atexit.register(print, "exit handler")
def late():
    time.sleep(0.1)
    print("thread")
threading.Thread(target=late).start()
"""
    for last, status in (("7", 7), ("-1", 255), ("None", 0), ("'said'", 1)):
        ended = run(["-c", f"{code}sys.exit({last})"], env=env)
        assert (ended.returncode, ended.stdout) == (status, "thread\nexit handler\n")
        assert ended.stderr == ("said\n" if last == "'said'" else "")
    failed = run(["-c", f"{code}raise OSError('the end')"], env=env)
    assert (failed.returncode, failed.stdout) == (1, "thread\nexit handler\n")
    assert failed.stderr.endswith("OSError: the end\n")
    full = ["-c", "import sys; sys.stdout = open('/dev/full', 'w'); print('lost')"]
    assert run(full, env=env).returncode == 120


def test_signals_reach_it_and_are_its_exit_status():
    code = "import time; print('here', flush=True); time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        with Program(["-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
            assert program.stdout.readline() == "here\n"
            assert program.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                program.wait(0.01)
            program.send_signal(number)
            assert program.wait() == -number
            assert program.poll() == program.returncode


def test_one_that_takes_too_long_is_ended():
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run(["-c", "import time; time.sleep(60)"], timeout=0.2)
    assert time.monotonic() - start < 30


def test_other_variables_of_jax_than_it_was_imported_with_are_refused():
    with pytest.raises(ValueError, match="Start the program with subprocess"):
        run(["-c", ""], env={**os.environ, "JAX_ENABLE_X64": "1"})


def test_a_process_that_this_one_starts_shares_its_interpreter():
    code = "import os; print(os.getppid())"
    program = f"from tests.programs.program import run; print(run(['-c', {code!r}]).stdout, end='')"
    nested = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert nested.stdout == run(["-c", code]).stdout, nested.stderr


def test_none_outlives_the_process_that_started_it(tmp_path):
    code = """
from tests.programs.program import Program
program = Program(["-c", "import time; time.sleep(600)"])
print(program.pid, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(200):
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


@pytest.mark.parametrize("own", ["", "--xla_force_host_platform_device_count=3"])
def test_it_is_compiled_quickly_whatever_flags_it_sets_itself(own):
    code = f"""
import os
os.environ["XLA_FLAGS"] = {own!r}
import jax
print(jax.device_count(), jax.jit(lambda x: x + 1).lower(1.0).compile() and os.environ["XLA_FLAGS"])
"""
    count, *flags = run(["-c", code]).stdout.split()
    assert int(count) == (3 if own else 1)
    assert flags == [*own.split(), *QUICKLY]


def test_it_lowers_its_programs_in_one_context():
    code = """
import jax
one, other = (jax.jit(lambda x: x + n).lower(1.0).compiler_ir("stablehlo") for n in (1, 2))
print(one.context == other.context)
"""
    assert run(["-c", code]).stdout == "True\n"
