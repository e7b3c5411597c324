"""Property tests take the same examples every time, and no machine is too slow for them. Tests that
press Ctrl-C work also in the background of a script, where a shell has it ignored. A process keeps
to one thread, which is set before anything loads OpenMP: its threads spin while they wait, so that
two workers on two cores took five times the CPU time."""

import os
import signal

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile(
    "stepwell", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stepwell")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
