"""The `refiner` command. Commands import what they need when they run, so `--help` is quick.

While modules are imported, Ctrl-C ends the process without a traceback; from
:func:`flows.cli.main.main` on it gives exit code 6.
"""

import signal
import sys

if (
    sys.argv[:1]
    and sys.argv[0].rpartition("/")[2] == "refiner"
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
