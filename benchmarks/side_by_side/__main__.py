"""`python -m benchmarks.side_by_side COMMAND`: run Gossamer beside the others, and draw the tables. As root, on a quiet machine.

    faultless | killed | slow | cut    one table: the runs that are still missing, then the table
    all                                the four tables
    report                             the tables again, from the runs that are there
    picture FILE.svg                   loss against wall time and against bytes
    clean                              remove what a killed run has left in the kernel

Runs are kept in a file (`--results`), one JSON object per line. A setting in that file is not run again without `--again`. On a slow line
local SGD and DDP run for `--sample` seconds and their time is extrapolated: their rate is constant, and their loss does not depend on the
network, so it is taken from the run without a limit.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.side_by_side.estimate import estimate_s, stop_after_s
from benchmarks.side_by_side.network import need_root, take_away
from benchmarks.side_by_side.picture import draw
from benchmarks.side_by_side.processes import left_behind
from benchmarks.side_by_side.report import table
from benchmarks.side_by_side.results import FAULTS, Run, Setting, keep, kept
from benchmarks.side_by_side.systems import FLOOR, GOSSAMER, SYSTEMS
from gossamer.protocol.errors import BadSettings, GossamerError

TABLES = {"faultless": "none", "killed": "kill", "slow": "slow", "cut": "cut"}
RATES = (0.0, 100.0, 20.0, 5.0, 2.0)  # Mbit/s; 0: no limit
FAULT_RATES = (20.0,)
FOLDER = "side-by-side-"  # of one run, in the folder for temporary files
RESULTS = Path(__file__).with_name("results.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    given = parser().parse_args(arguments)
    return interruptible(lambda: COMMANDS[given.command](given))


def interruptible(work: Callable[[], None]) -> int:
    """Do the work of a command, and report its errors and interruptions; return the exit code."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work()
    except GossamerError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted; nothing is left behind, and finished runs are kept", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("command", choices=COMMANDS)
    made.add_argument("file", nargs="?", type=Path, help="of `picture`")
    made.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME", help=", ".join(SYSTEMS))
    made.add_argument("--rates", nargs="+", type=float, metavar="MBIT", help=f"0 for no limit; without a fault {RATES}, else {FAULT_RATES}")
    made.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    made.add_argument("--steps", nargs="+", type=int, default=[300], metavar="N", help="lengths of the run")
    made.add_argument("--every", type=int, default=10, metavar="N", help="inner steps between two exchanges, of all but Gossamer")
    made.add_argument("--inner-steps", default="", metavar="N", help="Gossamer's: a number or auto; default: the manifest's")
    made.add_argument("--peers", type=int, default=4, metavar="N")
    made.add_argument("--limit", type=float, default=1200.0, metavar="S", help="longest run, in seconds")
    made.add_argument("--sample", type=float, default=100.0, metavar="S", help="how long the exact systems are watched on slow lines")
    made.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    made.add_argument("--again", action="store_true", help="run what is there already")
    made.add_argument("--keep", type=Path, metavar="DIR", help="keep the peers' folders in here")
    made.set_defaults(data=None)
    return made


def settings(given: argparse.Namespace, fault: str) -> list[Setting]:
    """Return the runs of one table."""
    rates = given.rates if given.rates is not None else RATES if fault == "none" else FAULT_RATES
    combined = itertools.product(given.seeds, given.steps, rates, given.systems)
    listed = [
        Setting(name, rate, fault, steps, seed, given.peers, given.every, given.inner_steps if name == GOSSAMER else "")
        for seed, steps, rate, name in combined
    ]
    cached = rates[0] if fault == "none" else None  # the floor: no line touches it, and no fault
    return [one for one in listed if one.system != FLOOR or one.mbit_per_s == cached]


def tables(given: argparse.Namespace, *, faults: Sequence[str], run: bool) -> None:
    """Run the missing runs, and print the tables."""
    wanted = [one for fault in faults for one in settings(given, fault)]
    if run:
        run_missing(wanted, given)
    runs = kept(given.results)
    for fault in faults:
        print(table(fault, [runs[one] for one in settings(given, fault) if one in runs], runs))


def run_missing(wanted: Sequence[Setting], given: argparse.Namespace) -> None:
    """Run what is not in the file `given.results` yet. A system that cannot be started here is skipped with a message."""
    need_root()
    known = kept(given.results)
    missing = [one for one in wanted if given.again or one not in known]
    left_s = sum(estimate_s(one, given.limit, given.sample) for one in missing)
    print(f"{len(missing)} runs of {len(wanted)} to do, about {left_s / 60:.0f} minutes", file=sys.stderr)
    for number, setting in enumerate(missing, 1):
        left_s -= estimate_s(setting, given.limit, given.sample)
        try:
            SYSTEMS[setting.system].python()
            run = run_one(setting, given)
        except BadSettings as error:
            print(f"not run: {setting}: {error}\nhint: {error.hint}", file=sys.stderr)
            continue
        keep(given.results, run)
        result = f"{run.outcome} after {run.wall_s:.0f} s, loss {run.loss_average or float('nan'):.3f}"
        print(f"{number} of {len(missing)}: {setting}: {result}; about {left_s / 60:.0f} minutes left", file=sys.stderr, flush=True)


def run_one(setting: Setting, given: argparse.Namespace) -> Run:
    """Run once, in a folder that is removed afterwards unless it is to be kept."""
    from benchmarks.side_by_side.measure import perform  # torch

    folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=given.keep))
    try:
        return perform(setting, folder, stop_after_s(setting, given.limit, given.sample), given.data)
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def picture(given: argparse.Namespace) -> None:
    """Draw the runs without a fault."""
    if given.file is None:
        raise BadSettings("no file was named", hint="python -m benchmarks.side_by_side picture side_by_side.svg")
    runs = kept(given.results)
    given.file.write_text(draw([runs[one] for one in settings(given, "none") if one in runs]))


def clean(given: argparse.Namespace) -> None:
    """Remove what a killed run has left in the kernel."""
    need_root()
    for group in left_behind():
        group.remove()
    take_away()
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        shutil.rmtree(folder, ignore_errors=True)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    **{name: partial(tables, faults=[fault], run=True) for name, fault in TABLES.items()},
    "all": partial(tables, faults=FAULTS, run=True),
    "report": partial(tables, faults=FAULTS, run=False),
    "picture": picture,
    "clean": clean,
}

if __name__ == "__main__":
    sys.exit(main())
