"""Build the wheel of the last commit in dist/, and try it in an empty environment of each Python that is on PATH.

    python -m tests.release [python3.12 ...] [--lower-bounds]

`--lower-bounds` tries only the oldest packages that pyproject.toml allows; without it they are tried last, with the oldest Python. An
environment takes about 2 GB, one at a time, and pip's usual index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement

from gossamer.peer.machine.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
LISTEN = ("--listen", "127.0.0.1")
MANY_S = 1800.0
PROGRAM = """
import torch
import gossamer

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
settings = {"alone": True, "listen": "127.0.0.1"}
run = gossamer.Run("release", steps=20)
with gossamer.host(run, model, optimizer, evaluate=lambda: model.weight.square().mean(), home="program", settings=settings) as swarm:
    for batch in swarm.batches([torch.ones(4, 8)]):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(loss=loss, tokens=len(batch))
print(swarm.clock.steps, "steps of the run")
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "GOSSAMER"))}


class Failed(Exception):
    """A command that did not do what it should."""


def run(*command: str | Path, code: int = 0, home: Path | None = None, cwd: Path | None = None) -> str:
    """Run a command and return its output, stdout before stderr. Raises Failed for another exit code."""
    environment = ENVIRONMENT if home is None else ENVIRONMENT | {"HOME": str(home)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=MANY_S, stdin=subprocess.DEVNULL)
    output = done.stdout + done.stderr
    if done.returncode != code:
        raise Failed(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{output[-2000:]}")
    return output


def built(folder: Path) -> Path:
    """Build the wheel of the last commit in dist/."""
    run("git", "-C", ROOT, "archive", "--output", folder / "source.tar", "HEAD")
    source = folder / "source"
    source.mkdir()
    run("tar", "--extract", "--file", folder / "source.tar", "--directory", source)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", ROOT / "dist", source)
    return max((ROOT / "dist").glob("gossamer_peer-*.whl"), key=lambda path: path.stat().st_mtime)


def requirements(wheel: Path) -> list[Requirement]:
    """Return the packages that the wheel needs, also for its extras."""
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(packed.read(name).decode())
    named = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return [one for one in named if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in EXTRAS)]


def lowest(requirements: Iterable[Requirement]) -> list[str]:
    """Return a constraint for the oldest version of each package that has a lower bound."""
    bounds = {one.name: part.version for one in requirements for part in one.specifier if part.operator in (">=", "==")}
    return [f"{name}=={version}" for name, version in sorted(bounds.items())]


def need_one_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    if tops != {"gossamer"} or "gossamer/py.typed" not in names:
        raise Failed(f"the wheel installs {', '.join(sorted(tops))}; py.typed is {'there' if 'gossamer/py.typed' in names else 'missing'}")


def megabytes(folder: Path) -> int:
    return int(run("du", "--summarize", "--block-size=1M", folder).split()[0])


def install(python: Path, wheel: str, constraints: Path | None) -> None:
    run(python, "-m", "pip", "install", *(("--constraint", constraints) if constraints else ()), wheel)


def smoke_core(bin: Path, folder: Path) -> None:
    """Train a program of a user, which needs no extra."""
    (folder / "program.py").write_text(PROGRAM)
    printed = run(bin / "python", folder / "program.py", home=folder, cwd=folder)
    if "20 steps of the run" not in printed:
        raise Failed(f"the program ended otherwise:\n{printed[-2000:]}")


def smoke(bin: Path, folder: Path) -> None:
    """Train a few steps from a manifest of its own, and fine-tune the result, as an operator would."""
    home, tuned = ("--home", folder / "home"), ("--home", folder / "tuned")

    def peer(*words: str | Path, code: int = 0) -> str:
        return run(bin / "peer", *words, code=code, home=folder, cwd=folder)

    def host(*words: str | Path) -> None:
        if "the run is over: step 20 of 20" not in (ended := peer("host", *words, "--alone", *LISTEN)):
            raise Failed(f"peer host --alone ended otherwise:\n{ended[-2000:]}")

    peer("init", "run.toml", "--steps", "20", *home)
    host("run.toml", *home)
    peer("eval", "--data", "absent", *home, code=2)  # an error of the command line
    peer("export", "model", "--tokens", "1024", *home)
    peer("init", "tuned.toml", "--from", "model", "--lora", "8", "--steps", "20", *tuned)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 3000)
    host("tuned.toml", "--model", "model", "--data", "text.txt", *tuned)
    peer("export", "adapter", *tuned)


def try_in(interpreter: str, wheel: Path, constraints: Path | None, folder: Path) -> str:
    """Install the core and then all extras into an environment, try both, and return the sizes."""
    run(interpreter, "-m", "venv", folder / "environment")
    bin = folder / "environment" / "bin"
    packages = Path(run(bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    before = megabytes(packages)
    install(bin / "python", str(wheel), constraints)
    core, torch = megabytes(packages) - before, megabytes(packages / "torch")
    run(bin / "python", "-c", "import gossamer", home=folder, cwd=folder)
    version = run(bin / "peer", "--version", home=folder, cwd=folder).strip()
    smoke_core(bin, folder)
    refusal = run(bin / "peer", "host", "--home", folder / "core", *LISTEN, code=2, home=folder, cwd=folder)
    if "pip install 'gossamer-peer[text]'" not in refusal:
        raise Failed(f"peer host without the extra `text`:\n{refusal}")
    install(bin / "python", f"{wheel}[all]", constraints)
    smoke(bin, folder)
    whole = megabytes(packages) - before
    return f"gossamer-peer {version}: core {core} MB (torch {torch} MB), all {whole} MB; a program, a text run and an adapter work"


def tried(interpreter: str, wheel: Path, lower_bounds: bool) -> bool:
    """Try one environment and print its line."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gossamer-release-") as name:
        folder = Path(name)
        constraints = folder / "lowest.txt" if lower_bounds else None
        if constraints is not None:
            constraints.write_text("\n".join(lowest(requirements(wheel))) + "\n")
        try:
            result, is_good = try_in(interpreter, wheel, constraints, folder), True
        except (Failed, OSError, subprocess.SubprocessError) as failure:
            result, is_good = str(failure), False
    which = f"{interpreter}{', lower bounds' if lower_bounds else ''}"
    print(f"{'ok' if is_good else 'fail':5}{which:26}{result}  ({time.monotonic() - began_s:.0f} s)", flush=True)
    return is_good


def found(interpreter: str) -> bool:
    """Return whether an interpreter of this name runs; a shim of a version manager may be there and not run."""
    try:
        return run(interpreter, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])").strip() == interpreter
    except (Failed, OSError):
        return False


def main(arguments: Sequence[str]) -> int:
    wanted = [name for name in arguments if name != "--lower-bounds"] or list(PYTHONS)
    there = [name for name in wanted if found(name)]
    for name in set(wanted) - set(there):
        print(f"{'':5}{name:26}not tried: there is none on PATH")
    if not there:
        return 1
    trials = [] if "--lower-bounds" in arguments else [(name, False) for name in there]
    with tempfile.TemporaryDirectory(prefix="gossamer-wheel-") as folder:
        wheel = built(Path(folder))
    need_one_top_level(wheel)
    return int(not all([tried(name, wheel, lower_bounds) for name, lower_bounds in [*trials, (there[0], True)]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
