"""The program must not notice that it runs under torch-echo: each case runs plainly and launched, and is compared.

No torch here: programs that need it find a file ``torch.py`` beside them, and the session is a made-up one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import CodeType

import pytest

import torch_echo.launch
from torch_echo.launch import strip_traceback

SOURCE = Path(torch_echo.launch.__file__).parents[1]
BLOCK = "torch-echo: "

DRIVER = """
import sys
from torch_echo.launch import Target, launch
from torch_echo.options import Options
from torch_echo.report.summary import Summary

class Session:
    def __init__(self, options, *, name, on_event):
        self.options = options
    def watch_all(self):
        print("watching", file=sys.stderr)
    def summary(self):
        return Summary(steps=3, measured_peak=1 << 20, eager_peak=2 << 20)
    def close(self):
        print("closed", file=sys.stderr)

if __name__ == "__main__":
    args = sys.argv[1:]
    report = args.pop(0).partition("=")[2] if args[0].startswith("--report=") else None
    module = args[0] == "-m" and bool(args.pop(0))
    launch(Target(args[0], tuple(args[1:]), module), Options(), report_file=report, session_factory=Session)
"""

INSTALL = """
import sys
sys.path.insert(0, {driver!r})
import driver
from torch_echo import _autostart
_autostart.install(session_factory=driver.Session)
sys.path.remove({driver!r})
"""


class Runner:
    """Runs programs written into a folder of their own, plainly or launched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.driver = folder / "driver" / "driver.py"
        self.driver.parent.mkdir()
        self.driver.write_text(DRIVER)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_ECHO") and k != "RANK"}
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def plain(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, *args], env)

    def launched(self, *args: str, flags: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, *flags, str(self.driver), *args], env)

    def both(self, *args: str) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
        return self.plain(*args), self.launched(*args)

    def _run(self, command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env={**self.env, **env}, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def without_block(stderr: str) -> str:
    return stderr.partition(BLOCK)[0]


SHOW = """
    import sys
    def plain_value(v):
        return v if isinstance(v, (str, dict, type(None))) else type(v).__name__
    print([(k, plain_value(v)) for k, v in globals().items() if k not in ("sys", "plain_value")])
    print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
    if __spec__:
        print(__spec__.name, __spec__.origin, __spec__.parent, __spec__.cached)
"""


class TestMain:
    @pytest.mark.parametrize(
        "args",
        [
            ("show.py", "a", "--help", "-m"),
            ("./show.py",),
            ("../work/show.py",),
            ("sub/show.py",),
            ("link.py",),
            ("folder", "a"),
            ("-m", "show", "a", "--memory-budget", "1"),
            ("-m", "package", "a"),
            ("-m", "package.module", "a"),
            ("program.zip", "a"),
        ],
        ids=lambda args: " ".join(args),
    )
    def test_has_the_globals_argv_and_path_of_plain_python(self, runner: Runner, args: tuple[str, ...]) -> None:
        for name in ("show.py", "sub/show.py", "folder/__main__.py", "package/__main__.py", "package/module.py"):
            runner.write(name, SHOW)
        runner.write("package/__init__.py", "import sys; print(sys.argv)")
        (runner.folder / "link.py").symlink_to("sub/show.py")
        runner.plain("-m", "zipapp", "folder", "-o", "program.zip")
        plain, launched = runner.both(*args)
        assert plain.stdout == launched.stdout
        assert (plain.returncode, launched.returncode) == (0, 0), launched.stderr

    def test_compiled_script(self, runner: Runner) -> None:
        runner.write("show.py", SHOW)
        runner.plain("-c", "import py_compile; py_compile.compile('show.py', 'show.pyc')")
        plain, launched = runner.both("show.pyc")
        assert plain.stdout == launched.stdout != ""

    def test_isolated_path_is_left_alone(self, runner: Runner) -> None:
        if not hasattr(sys.flags, "safe_path"):
            pytest.skip("Python 3.10 has no -P")
        runner.write("path.py", "import sys; print(sys.path)")
        assert runner.plain("-P", "path.py").stdout == runner.launched("path.py", flags=("-P",)).stdout

    def test_pickles_classes_of_main(self, runner: Runner) -> None:
        runner.write(
            "program.py",
            """
            import pickle
            class A:
                pass
            data = pickle.dumps(A())
            print(type(pickle.loads(data)) is A, b"__main__" in data)
            """,
        )
        assert runner.launched("program.py").stdout == "True True\n"

    @pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
    @pytest.mark.parametrize("args", [("program.py",), ("-m", "program")], ids=["script", "module"])
    def test_workers_find_main_and_are_not_watched(self, runner: Runner, method: str, args: tuple[str, ...]) -> None:
        runner.write("torch.py", "")
        runner.write(
            "program.py",
            f"""
            import multiprocessing, os
            import torch
            def double(x):
                import sys, torch
                return 2 * x, any("torch_echo" in name for name in sys.modules)
            if __name__ == "__main__":
                context = multiprocessing.get_context({method!r})
                with context.Pool(2) as pool:
                    print([x for x, _ in pool.map(double, [1, 2, 3])])
            """,
        )
        done = runner.launched(*args)
        assert done.stdout == "[2, 4, 6]\n", done.stderr
        assert done.stderr.count("watching") == 1
        assert done.stderr.count("3 training steps") == 1

    def test_exit_handlers_run_before_the_report(self, runner: Runner) -> None:
        runner.write(
            "program.py",
            """
            import atexit, sys
            atexit.register(lambda: print("handler", file=sys.stderr))
            """,
        )
        stderr = runner.launched("program.py").stderr
        assert stderr.startswith("handler\n" + BLOCK)


ENDINGS = {
    "normal": "pass",
    "exit": "sys.exit()",
    "exit_3": "sys.exit(3)",
    "exit_none": "sys.exit(None)",
    "exit_text": "sys.exit('no data')",
    "exit_large": "sys.exit(256 + 7)",
    "os_exit": "os._exit(5)",
    "error": "def f():\n    raise ValueError('bad')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('bad') from e",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['a']",
    "import": "import no_such_module",
    "interrupt": "def f():\n    raise KeyboardInterrupt\nf()",
    "kill_int": "import signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "kill_term": "import signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)",
    "kill_segv": "import signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "own_hook": "sys.excepthook = lambda kind, e, tb: print(kind, tb.tb_frame.f_code.co_name)\nraise ValueError",
    "exit_in_hook": "def hook(*_):\n    sys.exit(9)\nsys.excepthook = hook\nraise ValueError('bad')",
    "at_exit": "import atexit\natexit.register(lambda: print(sys.excepthook is sys.__excepthook__))\nraise ValueError",
    "last": "import atexit\natexit.register(lambda: print(sys.last_traceback.tb_lineno))\nraise ValueError",
    "recursion": "import sys\ndef f(): return f()\ntry:\n    f()\nexcept RecursionError:\n    sys.exit(4)",
    "group": "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])",
    "thread": "import threading\nthreading.Thread(target=lambda: 1 / 0).start()",
    "syntax": "def f(:",
    "indent": "def f():\npass",
}


class TestEnding:
    @pytest.mark.parametrize("ending", ENDINGS)
    def test_status_output_and_traceback_are_those_of_plain_python(self, runner: Runner, ending: str) -> None:
        if ending == "group" and sys.version_info < (3, 11):
            pytest.skip("no exception groups")
        code = ENDINGS[ending]
        if ending not in ("syntax", "indent"):
            code = "import os, sys\nprint('begins', flush=True)\n" + code
        (runner.folder / "program.py").write_text(code + "\n")
        plain, launched = runner.both("program.py")
        assert launched.returncode == plain.returncode
        assert launched.stdout == plain.stdout
        assert same_addresses(without_block(launched.stderr)) == same_addresses(plain.stderr)
        if not ending.startswith(("kill_term", "kill_segv", "os_exit")):
            assert launched.stderr.count(BLOCK) == 1

    @pytest.mark.parametrize("ending", ["exit_3", "error", "interrupt", "kill_int", "context"])
    def test_module(self, runner: Runner, ending: str) -> None:
        (runner.folder / "program.py").write_text("import os, sys\n" + ENDINGS[ending] + "\n")
        plain, launched = runner.both("-m", "program")
        assert launched.returncode == plain.returncode
        expected = re.sub(r'  File "(<frozen runpy>|.*/runpy\.py)".*\n(    .*\n)*', "", plain.stderr)
        assert without_block(launched.stderr) == expected

    def test_interrupt_from_outside(self, runner: Runner) -> None:
        runner.write("program.py", "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
        process = subprocess.Popen(
            [sys.executable, str(runner.driver), "program.py"],
            cwd=runner.folder,
            env=runner.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in stderr and "torch_echo" not in stderr and BLOCK in stderr

    def test_error_of_torch_echo_is_one_line(self, runner: Runner) -> None:
        runner.write(
            "program.py",
            """
            from torch_echo.errors import TorchEchoError
            raise TorchEchoError("the budget is\\n too small")
            """,
        )
        done = runner.launched("program.py")
        assert done.returncode == 2
        assert without_block(done.stderr.replace("torch-echo: error", "E", 1)) == "E: the budget is too small\n"

    def test_error_of_torch_echo_passes_through_the_program(self, runner: Runner) -> None:
        runner.write(
            "program.py",
            """
            from torch_echo.errors import TorchEchoError
            try:
                raise TorchEchoError("no")
            except Exception as e:
                print("caught", e)
            """,
        )
        done = runner.launched("program.py")
        assert (done.returncode, done.stdout) == (0, "caught no\n")

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("nope.py",), "can't find the script 'nope.py': no such file"),
            (("-m", "nope"), "can't run module 'nope': No module named nope"),
            (("-m", "a.b"), "can't run module 'a.b'"),
            (("empty",), "can't run 'empty': there is no __main__.py in it"),
        ],
    )
    def test_missing_program(self, runner: Runner, args: tuple[str, ...], message: str) -> None:
        (runner.folder / "empty").mkdir()
        done = runner.launched(*args)
        assert done.returncode == 2
        assert done.stderr.startswith("torch-echo: error: " + message)
        assert len(done.stderr.splitlines()) == 1


def same_addresses(text: str) -> str:
    """Thread numbers and addresses differ from run to run."""
    return "\n".join(line for line in text.splitlines() if "0x" not in line and "Exception in thread" not in line)


class TestReport:
    def test_engine_starts_when_torch_has_been_imported(self, runner: Runner) -> None:
        runner.write("torch.py", "import sys; print('in torch', file=sys.stderr)")
        runner.write(
            "program.py",
            """
            import importlib.util, sys
            assert "torch" not in sys.modules
            assert importlib.util.find_spec("torch") is not None
            print("before", file=sys.stderr)
            import torch
            print("after", type(torch.__loader__).__name__, sorted(vars(torch.__loader__)), file=sys.stderr)
            assert torch.__spec__.loader is torch.__loader__
            assert not any("torch_echo" in type(f).__module__ for f in sys.meta_path)
            """,
        )
        lines = runner.launched("program.py").stderr.splitlines()
        assert lines[:5] == [
            "before",
            "in torch",
            "watching",
            "after SourceFileLoader ['name', 'path']",
            "closed",
        ], lines
        assert lines[5] == "torch-echo: 3 training steps"

    def test_torch_that_fails_to_import_can_be_imported_later(self, runner: Runner) -> None:
        runner.write(
            "torch.py",
            "import os\nif not os.environ.pop('OK', ''):\n    os.environ['OK'] = '1'\n    raise ImportError('no')",
        )
        runner.write(
            "program.py",
            """
            try:
                import torch
            except ImportError as e:
                print(e)
            import torch
            """,
        )
        done = runner.launched("program.py")
        assert done.stdout == "no\n"
        assert done.stderr.count("watching") == 1

    def test_without_torch(self, runner: Runner) -> None:
        runner.write("program.py", "")
        assert runner.launched("program.py").stderr == "torch-echo: no training step was seen, so nothing was changed\n"

    def test_file(self, runner: Runner) -> None:
        runner.write("torch.py", "")
        runner.write("program.py", "import torch, os, sys\nos.chdir('/')\nsys.exit(3)")
        path = runner.folder / "report.json"
        path.write_text("old")
        done = runner.launched(f"--report={path}", "program.py")
        assert done.returncode == 3
        written = json.loads(path.read_text())
        assert written["summary"]["measured_peak"] == 1 << 20
        assert written["options"]["policy"] == "echo"
        assert sorted(p.name for p in runner.folder.iterdir() if p.suffix == ".json") == ["report.json"]

    def test_forked_child_does_not_report(self, runner: Runner) -> None:
        runner.write("torch.py", "")
        runner.write(
            "program.py",
            """
            import os, sys, torch
            if os.fork() == 0:
                sys.exit(4)
            print(os.waitstatus_to_exitcode(os.wait()[1]))
            """,
        )
        done = runner.launched("program.py")
        assert done.stdout == "4\n"
        assert done.stderr.count("training steps") == 1

    @pytest.mark.parametrize("what", ["sys.stderr.close()", "sys.stderr = None", "os.close(2)"])
    def test_lost_stderr_changes_nothing(self, runner: Runner, what: str) -> None:
        runner.write("torch.py", "")
        runner.write("program.py", f"import os, sys, torch\n{what}\nsys.exit(3)")
        assert runner.launched("program.py").returncode == 3

    def test_only_the_first_rank_reports(self, runner: Runner) -> None:
        runner.write("torch.py", "")
        runner.write("program.py", "import torch")
        assert BLOCK in runner.launched("program.py", RANK="0").stderr
        assert BLOCK not in runner.launched("program.py", RANK="1").stderr


class TestEnvironment:
    @pytest.fixture
    def started(self, runner: Runner) -> Runner:
        """Python starts as with the installed .pth file and TORCH_ECHO=1, but for the made-up session."""
        site = runner.driver.parent / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(INSTALL.format(driver=str(runner.driver.parent)))
        runner.env["PYTHONPATH"] = os.pathsep.join([str(site), runner.env["PYTHONPATH"]])
        runner.env["TORCH_ECHO"] = "1"
        runner.write("torch.py", "")
        return runner

    def test_any_command_is_watched(self, started: Runner) -> None:
        started.write("program.py", "import torch, sys\nsys.exit(3)")
        done = started.plain("program.py")
        assert done.returncode == 3
        assert done.stderr.splitlines()[:3] == ["watching", "closed", "torch-echo: 3 training steps"]

    def test_a_launcher_is_not(self, started: Runner) -> None:
        started.write("torchrun", "import torch, sys\nprint(sys.argv)")
        done = started.plain("torchrun", "train.py")
        assert (done.stdout, done.stderr) == ("['torchrun', 'train.py']\n", "")

    def test_report_file(self, started: Runner) -> None:
        started.write("program.py", "import torch, os\nos.chdir('/')")
        for rank in ("0", "1"):
            started.plain("program.py", TORCH_ECHO_REPORT="report-{rank}.json", RANK=rank)
            assert json.loads((started.folder / f"report-{rank}.json").read_text())["summary"]["steps"] == 3
        started.plain("program.py", TORCH_ECHO_REPORT="report.json", RANK="1")
        assert not (started.folder / "report.json").exists()

    def test_without_torch_nothing_is_said(self, started: Runner) -> None:
        started.write("program.py", "")
        assert started.plain("program.py").stderr == ""

    def test_no_double_activation(self, started: Runner) -> None:
        started.write("program.py", "import torch")
        done = started.launched("program.py")
        assert done.stderr.count("watching") == done.stderr.count("training steps") == 1
        started.write("sooner.py", "import torch")
        done = started.plain(
            "-c",
            "import torch, runpy, sys; sys.argv = ['driver', 'program.py']; import driver; "
            "runpy.run_path(driver.__file__, run_name='__main__')",
            PYTHONPATH=os.pathsep.join([started.env["PYTHONPATH"], str(started.driver.parent)]),
        )
        assert done.stderr.count("watching") == 2
        assert done.stderr.count("training steps") == 1

    @pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
    def test_workers_are_not_watched(self, started: Runner, method: str) -> None:
        started.write(
            "program.py",
            f"""
            import multiprocessing, torch
            def double(x):
                import torch
                return 2 * x
            if __name__ == "__main__":
                with multiprocessing.get_context({method!r}).Pool(2) as pool:
                    print(pool.map(double, [1, 2]))
            """,
        )
        done = started.plain("program.py")
        assert done.stdout == "[2, 4]\n", done.stderr
        assert done.stderr.count("watching") == done.stderr.count("training steps") == 1

    @pytest.mark.parametrize(
        ("error", "status", "stderr"),
        [
            (
                "ValueError('bad')",
                1,
                'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n    raise E\n',
            ),
            ("TorchEchoError('too small')", 2, "torch-echo: error: too small\n"),
            ("KeyboardInterrupt()", -2, 'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n'),
        ],
    )
    def test_errors(self, started: Runner, error: str, status: int, stderr: str) -> None:
        path = started.write(
            "program.py", f"import torch\nfrom torch_echo.errors import TorchEchoError\nE = {error}\nraise E\n"
        )
        done = started.plain("program.py")
        assert done.returncode == status
        assert done.stderr.removeprefix("watching\n").startswith(stderr.format(path=path))
        assert done.stderr.count("training steps") == 1

    def test_bad_option(self, started: Runner) -> None:
        started.write("program.py", "import torch\nprint('trained')")
        done = started.plain("program.py", TORCH_ECHO_POLICY="best")
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.splitlines()[0] == "torch-echo: error: policy='best': must be 'echo' or 'paper'"

    def test_pth_line(self, runner: Runner) -> None:
        folder = runner.folder / "site"
        folder.mkdir()
        (folder / "x.pth").write_text((SOURCE / "torch_echo_autostart.pth").read_text())
        code = (
            f"import site, sys; site.addsitedir({str(folder)!r}); m = sys.modules.get('torch_echo._autostart'); "
            "print(m is not None and m.current() is not None, 'torch' in sys.modules)"
        )
        assert runner.plain("-c", code).stdout == "False False\n"
        assert runner.plain("-c", code, TORCH_ECHO="0").stdout == "False False\n"
        done = runner.plain("-c", code, TORCH_ECHO="1")
        assert (done.stdout, done.stderr) == ("True False\n", "")


class TestStrip:
    """Frames of torch-echo, in a made-up call chain: each name is a file that calls the next one."""

    @pytest.mark.parametrize(
        ("chain", "kept"),
        [
            ("user user", "user user"),
            ("user own user", "user user"),
            ("user own own user own user", "user user user"),
            ("user own", "user own"),
            ("user own user own", "user user own"),
            ("user own ops user", "user user"),
            ("user ops user", "user ops user"),
            ("user own ops", "user"),
        ],
    )
    def test_chain(self, chain: str, kept: str) -> None:
        root = os.path.dirname(torch_echo.launch.__file__)
        files = {"user": "/home/me/train.py", "own": f"{root}/tape/_mode.py", "ops": "/lib/torch/_ops.py"}
        names = chain.split()

        def call(i: int) -> CodeType:
            return compile(
                "raise ValueError" if i == len(names) - 1 else "exec(call(i + 1), {**globals(), 'i': i + 1})",
                files[names[i]],
                "exec",
            )

        try:
            exec(call(0), {"call": call, "i": 0})
        except ValueError as error:
            assert error.__traceback__ is not None
            error.__traceback__ = error.__traceback__.tb_next  # this test's own frame
            traceback = strip_traceback(error)
            found = []
            while traceback is not None:
                found.append(traceback.tb_frame.f_code.co_filename)
                traceback = traceback.tb_next
            assert found == [files[name] for name in kept.split()]

    def test_cycle_of_causes(self) -> None:
        a, b = ValueError("a"), ValueError("b")
        a.__context__, b.__context__ = b, a
        assert strip_traceback(a) is None
