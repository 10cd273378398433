"""Requests to stop by signals, and the handlers restored after them."""

import os
import signal

import pytest

from moelib.train.signals import StopRequest


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_first_signal_is_a_request(name):
    before = signal.getsignal(signal.Signals[name])
    with StopRequest() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.Signals[name])
        assert stop.requested()
        assert stop.signal_name == name
    assert signal.getsignal(signal.Signals[name]) is before


def test_second_interrupt_interrupts():
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
