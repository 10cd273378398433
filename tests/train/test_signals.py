"""Requests to stop by signals, and the handlers restored after them."""

import os
import signal

import pytest

from moelib.train.signals import StopRequest, ended_by_sigterm
from tests.python_process import finish, start


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


CODE = """
import hashlib, os, signal, threading
from moelib.train.signals import ended_by_sigterm
with ended_by_sigterm("compiling"):
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # Minutes without a return to Python.
"""


def test_sigterm_ends_what_does_not_return_to_python_with_a_line():
    [(_, err)] = finish(start("-c", CODE), code=128 + signal.SIGTERM)
    assert err.count("\n") == 1
    assert "SIGTERM while compiling" in err


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    with ended_by_sigterm("compiling"):
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == before
