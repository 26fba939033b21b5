"""Weights that move wholly, whenever Ctrl-C comes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gossamer.optim.codecs import codec
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import Fragment, split
from gossamer.peer.trainer.fragment_state import FragmentState, OuterStep
from gossamer.peer.trainer.open_meeting import acquire
from gossamer.peer.trainer.weights import Weights, uninterrupted


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_waits_for_the_end_and_comes_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        ctrl_c()
        with uninterrupted():
            ctrl_c()
        ctrl_c()
        done.append(1)
    assert done == [1]
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_a_program_that_ignores_ctrl_c_and_another_thread_are_let_be() -> None:
    def check() -> None:
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    found: list[object] = []
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        check()
        assert found == [signal.SIG_IGN]
    finally:
        signal.signal(signal.SIGINT, handler)
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    assert found[1] == handler


def test_two_interrupts_while_a_lock_is_awaited_leave_it_to_the_one_who_waits() -> None:
    lock, waits = threading.Lock(), threading.Event()
    lock.acquire()

    def interrupt_and_release() -> None:
        waits.wait()
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        lock.release()

    thread = threading.Thread(target=interrupt_and_release)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        waits.set()
        acquire(lock)
    thread.join()
    assert lock.locked()


class InterruptedWeights(Weights):
    """Weights that the user interrupts as they move."""

    def add(self, fragment: Fragment, flat: Tensor) -> None:
        super().add(fragment, flat)
        ctrl_c()


def test_weights_that_move_as_ctrl_c_comes_move_once() -> None:
    parameters = {"w": torch.zeros(4)}
    (fragment,) = split({"w": (4,)}, 100)
    state = FragmentState(FragmentCodec(fragment, codec("fp32")), InterruptedWeights(parameters), has_momentum=False)
    state.merge(OuterStep(state.slow + 1.0, state.momentum, torch.ones(4)), state.since)
    with pytest.raises(KeyboardInterrupt):
        state.move_fast_weights()
    state.move_fast_weights()  # for the last checkpoint
    assert torch.equal(parameters["w"], torch.ones(4)) and not state.owes_move
