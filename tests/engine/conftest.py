import signal

import pytest


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """Whatever starts the tests in the background may have had SIGINT ignored, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
