"""SIGINT and SIGTERM are noted, and put back; what a run does with them is in test_trainer.py."""

import signal
import threading

import pytest

from kernelhead.finetune import interrupt
from kernelhead.finetune.interrupt import SIGNALS, deferred_interrupts


@pytest.fixture
def handlers():
    """Handlers of our own, put back after the test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    mine = {number: lambda *_: None for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, mine[number])
    yield mine
    for number in SIGNALS:
        signal.signal(number, before[number])


def installed():
    return {number: signal.getsignal(number) for number in SIGNALS}


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted(handlers, number):
    with deferred_interrupts() as interrupted:
        assert not interrupted()
        signal.raise_signal(number)
        assert interrupted()
    assert installed() == handlers


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_later_signal_leaves_at_once(handlers, monkeypatch, first, second):
    monkeypatch.setattr(interrupt, "SAME_REQUEST_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        signal.raise_signal(first)
        signal.raise_signal(second)
        pytest.fail("the second signal was ignored")
    assert installed() == handlers


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_signal_right_after_the_first_is_the_same_request(handlers, first, second):
    """As `timeout` sends them, to the process and to its group."""
    with deferred_interrupts() as interrupted:
        signal.raise_signal(first)
        signal.raise_signal(second)
        assert interrupted()
    assert installed() == handlers


def test_handlers_are_put_back_after_an_error(handlers):
    with pytest.raises(ZeroDivisionError), deferred_interrupts():
        1 / 0  # noqa: B018
    assert installed() == handlers


def test_what_is_ignored_stays_ignored(handlers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupts() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert not interrupted()
        signal.raise_signal(signal.SIGTERM)
        assert interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_is_not_of_python_is_left_alone(handlers, monkeypatch):
    monkeypatch.setattr(signal, "getsignal", {signal.SIGINT: None, signal.SIGTERM: signal.SIG_DFL}.get)
    with deferred_interrupts():
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) is not handlers[signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_in_another_thread_nothing_is_installed(handlers):
    seen = []

    def look():
        with deferred_interrupts() as interrupted:
            seen.append((interrupted(), installed()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert seen == [(False, handlers)]
