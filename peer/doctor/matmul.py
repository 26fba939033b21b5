"""`python -m peer.doctor.matmul DEVICE`: multiply two matrices of whole numbers on the device, and compare with the exact product."""

from __future__ import annotations

import sys
import time

import torch

from peer.doctor.machine_checks import UP
from peer.model.model import choose_device
from protocol.errors import ExitCode, GossamerError

SIZE = 256
LARGEST = 8  # products and sums of so small whole numbers are exact in any float


def computes(name: str) -> str:
    """Return what a device is and how fast it answered. Raises BadSettings where it is absent, ArithmeticError where it is wrong."""
    device, why = choose_device(name)
    left, right = (torch.randint(-LARGEST, LARGEST, (SIZE, SIZE), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    exact = left @ right
    began_s = time.monotonic()
    product = (left.float().to(device) @ right.float().to(device)).cpu().long()
    took_s = time.monotonic() - began_s
    if not torch.equal(product, exact):
        raise ArithmeticError(f"torch computes wrong results on {device}: the machine or its driver is broken")
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"{device} ({label}; {why}), torch {torch.__version__} computes right on it, in {1000 * took_s:.0f} ms"


if __name__ == "__main__":
    print(UP, flush=True)  # noqa: T201 - for the process that asked
    try:
        print(computes(sys.argv[1]), flush=True)  # noqa: T201
    except GossamerError as error:
        sys.exit(f"{error}")
    except (ArithmeticError, RuntimeError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())[:300]}\n")
        sys.exit(ExitCode.OUR_FAULT)
