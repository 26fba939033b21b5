from __future__ import annotations

import asyncio
import os
import signal

import pytest

from peer.machine.signals import ASKED, asked_to_leave


@pytest.mark.usefixtures("signals_of_a_terminal")
@pytest.mark.parametrize("number", ASKED)
def test_each_signal_is_handed_over_while_the_body_runs(number: signal.Signals) -> None:
    async def body() -> signal.Signals:
        heard: asyncio.Queue[signal.Signals] = asyncio.Queue()
        with asked_to_leave(heard.put_nowait):
            os.kill(os.getpid(), number)
            async with asyncio.timeout(10):
                return await heard.get()

    before = signal.getsignal(number)
    assert asyncio.run(body()) == number
    assert signal.getsignal(number) in (before, signal.SIG_DFL, signal.default_int_handler)


def test_one_that_is_ignored_stays_ignored() -> None:
    """Under nohup a closed terminal means nothing."""

    async def body() -> None:
        with asked_to_leave(lambda number: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(body())
    finally:
        signal.signal(signal.SIGHUP, before)
