"""The command ``torch-echo``.

The command line is only read here; what it asks for is done after click has returned, so that nothing of click stands
between a script and the interpreter: no exception of the script is caught, no signal handled.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from torch_echo._autostart import engine as choose_engine
from torch_echo._version import __version__
from torch_echo._workers import is_launcher, to_workers
from torch_echo.errors import GraphFileError, OptionError, TorchEchoError
from torch_echo.launch import Target, fail, launch
from torch_echo.options import Options

__all__ = ["main"]

_Action = Callable[[], None]
_PLAN = (
    click.option(
        "--memory-budget", metavar="SIZE", help="Peak to stay under: 8GiB, or a fraction of the device (0.5)."
    ),
    click.option("--max-overhead", metavar="FRACTION", help="Time that rebuilding may add to a step; default 0.05."),
    click.option("--policy", metavar="echo|paper", help="echo: minimum cut and search; paper: the rule of the paper."),
    click.option(
        "--on-infeasible",
        metavar="raise|least",
        help="Budget below what is reachable: an error, or the least reachable.",
    ),
)


def _plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_PLAN):
        command = option(command)
    return command


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"torch-echo {__version__}")
        ctx.exit()


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def _cli() -> None:
    """Train PyTorch models in less memory, without a change to their code."""


@_cli.command(
    "run",
    options_metavar="[OPTIONS]",
    context_settings={"allow_interspersed_args": False},
    short_help="Run a training script in less memory.",
)
@_plan_options
@click.option("--cost", metavar="measured|analytic", help="Where the durations of ops come from.")
@click.option(
    "--reorder", is_flag=True, default=None, help="Allow sums in another order: equal up to rounding, not to the bit."
)
@click.option(
    "--check", is_flag=True, default=None, help="Compare one step under the plan with plain PyTorch, to the bit."
)
@click.option(
    "--memory-limit", metavar="SIZE", help="For tests: allocations beyond this fail, as on a device that has no more."
)
@click.option(
    "--strict", is_flag=True, default=None, help="What can't be handled is an error, not left to plain PyTorch."
)
@click.option(
    "--report",
    "report_file",
    metavar="FILE.json",
    help="Write the final report to this file too; with {rank} in its name, one per rank.",
)
@click.option(
    "--graph",
    "graph_file",
    metavar="FILE",
    help="Write the recorded training graph, for torch-echo explain; {rank} as above.",
)
@click.option("--engine", metavar="tape|compile", help="tape: eager ops as they run; compile: torch.compile.")
@click.option("-m", "module", is_flag=True, help="Run a module, as python -m does.")
@click.argument("program", metavar="SCRIPT|MODULE [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def _run(
    program: tuple[str, ...],
    module: bool,
    report_file: str | None,
    graph_file: str | None,
    engine: str | None,
    **given: Any,
) -> _Action:
    """Run a training script, unmodified, in less memory.

    Everything after the script belongs to the script. Options can also be set in the environment
    (TORCH_ECHO_MEMORY_BUDGET and so on); TORCH_ECHO=1 does the same for commands that can't be changed,
    TORCH_ECHO=0 turns torch-echo off.
    """
    if not program:
        what = "module" if module else "script"
        raise click.UsageError(
            f"no {what} given: torch-echo run [options] {'-m module' if module else 'script.py'} [args]"
        )
    options: Options | None = Options.from_env(os.environ, **_given(given))
    if report_file is not None:
        report_file = _writable("--report", report_file)
    if graph_file is not None:
        graph_file = _writable("--graph", graph_file)
    if os.environ.get("TORCH_ECHO") == "0":
        print("torch-echo: off, because TORCH_ECHO=0 is set: the script runs as plain PyTorch", file=sys.stderr)
        options = None
    factory = choose_engine(engine)
    target = Target(program[0], program[1:], module)
    if options is not None and is_launcher(target.name, module):
        to_workers(os.environ, options, engine, report_file, graph_file)
        options = None
    return lambda: launch(target, options, report_file=report_file, graph_file=graph_file, session_factory=factory)


@_cli.command("explain", short_help="What would be done about a saved training graph.")
@_plan_options
@click.option(
    "--bound", is_flag=True, help="Also how far the plan is from the best: an integer program, minutes at most."
)
@click.argument("graph_file", metavar="GRAPHFILE")
def _explain(graph_file: str, bound: bool, **given: Any) -> None:
    """Show where the memory of a saved training graph goes, and what would be kept and rebuilt with these options."""
    options = Options.from_env({}, **_given(given))
    from torch_echo.report.explanation import Explanation

    try:
        explanation = Explanation.of_file(graph_file, options)
    except OSError as error:
        raise GraphFileError(f"can't read the graph file {graph_file!r}: {error.strerror}") from error
    click.echo(str(explanation))
    if bound:
        click.echo(explanation.distance())


@_cli.command("env", short_help="What a bug report needs to say of this machine.")
def _env() -> None:
    """Print versions, devices and settings, for a bug report."""
    from torch_echo.report.environment import environment

    for name, value in environment().items():
        click.echo(f"{name + ':':26} {value}")


_BENCHES = {"planner": "benchmarks.planner.__main__", "--predict": "benchmarks.predicted"}
"""What has a command line of its own, by the first argument."""


@_cli.command(
    "bench",
    options_metavar="",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    short_help="Compare with what people use instead.",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def _bench(args: tuple[str, ...]) -> _Action:
    """Measure side by side; see torch-echo bench --help. `bench planner`: plans alone, for joint graphs. The benchmarks are part
    of the source tree, not of the installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise TorchEchoError("bench: the benchmarks are in torch-echo's source tree; install from there, with -e")
    sys.path.insert(0, str(root))

    part = _BENCHES.get(args[0]) if args else None

    def run() -> None:
        main: Callable[[Sequence[str]], None] = importlib.import_module(part or "benchmarks.__main__").main
        main(args[1:] if part else args)

    return run


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _writable(option: str, path: str) -> str:
    """The absolute path of a file that is to be written at the end (the script may change folders), or an error now."""
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise OptionError(f"{option}: {path!r} is a folder: give the name of a file")
    if not os.path.isdir(folder):
        raise OptionError(f"{option}: the folder {folder!r} does not exist")
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{option}: no permission to write in the folder {folder!r}")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``torch-echo`` and ``python -m torch_echo``; a user's mistake ends in one line and status 2."""
    try:
        result = _cli.main(args=argv, prog_name="torch-echo", standalone_mode=False)
    except click.ClickException as error:
        fail(error.format_message())
    except TorchEchoError as error:
        fail(error)
    if callable(result):
        result()
    else:  # the command has done its work
        raise SystemExit(result)
