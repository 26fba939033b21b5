"""`python -m gossamer.peer.doctor.matmul DEVICES`: multiply two integer matrices on each device and check the product."""

from __future__ import annotations

import sys
import time

import torch

from gossamer.peer.doctor.machine_checks import UP
from gossamer.peer.model.accelerator import choose_devices, product_name
from gossamer.protocol.errors import ExitCode, GossamerError

SIZE = 256
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


if __name__ == "__main__":
    print(UP, flush=True)  # noqa: T201 - for the process that asked
    try:
        print(_check_devices(sys.argv[1]), flush=True)  # noqa: T201
    except GossamerError as error:
        sys.exit(f"{error}")
    except (ArithmeticError, RuntimeError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())[:300]}\n")
        sys.exit(ExitCode.OUR_FAULT)
