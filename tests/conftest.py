"""For all tests: a session started in a shell's background ignores Ctrl-C, and so would the processes it starts."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
