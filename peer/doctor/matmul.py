"""`python -m gossamer.peer.doctor.matmul DEVICES`: multiply two integer matrices on each device and check the product."""

from __future__ import annotations

import gc
import math
import sys
import time

import torch

from gossamer.peer.doctor.machine_checks import RATE, UP
from gossamer.peer.model.accelerator import choose_devices, product_name
from gossamer.protocol.errors import ExitCode, GossamerError

SIZE = 256
TIMED_SIZES = {"cpu": 1024}  # of other devices:
TIMED_SIZE = 4096
TRIES, PRODUCTS = 3, 4
LARGEST = 8  # products and sums of so small whole numbers are exact in any float


def _check_devices(name: str) -> str:
    """Return what the devices are and how fast they answered. Raises BadSettings where one is absent, ArithmeticError where it is wrong."""
    devices, why = choose_devices(name)
    left, right = (torch.randint(-LARGEST, LARGEST, (SIZE, SIZE), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    exact = left @ right
    began_s = time.monotonic()
    for device in devices:
        product = (left.float().to(device) @ right.float().to(device)).cpu().long()
        if not torch.equal(product, exact):
            raise ArithmeticError(f"torch computes wrong results on {device}: the machine or its driver is broken")
    took_s = time.monotonic() - began_s
    names = ", ".join(map(str, devices))
    labels = {f"{torch.get_num_threads()} threads" if one.type == "cpu" else product_name(one) for one in devices}
    return f"{names} ({', '.join(sorted(labels))}; {why}), torch {torch.__version__} computes right on it, in {1000 * took_s:.0f} ms"


def _operations_per_s(device: torch.device) -> float:
    """Return the rate of a device in matrix products, in the number format of its inner steps: the best of a few tries."""
    size, dtype = (TIMED_SIZES.get(device.type, TIMED_SIZE), torch.float32 if device.type == "cpu" else torch.bfloat16)
    left = torch.ones((size, size), dtype=dtype, device=device)
    (left @ left)[0, 0].item()  # the first one loads kernels
    best_s = math.inf
    for _ in range(TRIES):
        began_s = time.monotonic()
        for _ in range(PRODUCTS):
            product = left @ left
        product[0, 0].item()
        best_s = min(best_s, time.monotonic() - began_s)
    return 2 * PRODUCTS * size**3 / best_s


if __name__ == "__main__":
    gc.freeze()  # the end would scan all of torch
    print(UP, flush=True)  # noqa: T201 - for the process that asked
    try:
        found = _check_devices(sys.argv[1])
        print(f"{RATE}{_operations_per_s(choose_devices(sys.argv[1])[0][0])}")  # noqa: T201
        print(found, flush=True)  # noqa: T201
    except GossamerError as error:
        sys.exit(f"{error}")
    except (ArithmeticError, RuntimeError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())[:300]}\n")
        sys.exit(ExitCode.OUR_FAULT)
