"""Which signals are one request, and what is said of a run that ends at once."""

import signal

import pytest

from stepwell.launch.stopping import Requests, last_saved, what_is_saved

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("came", "first", "at_once"),
    [
        ([(0, INT)], INT, False),
        ([(0, INT), (0.9, INT)], INT, False),
        ([(0, INT), (0.3, TERM), (0.6, INT)], INT, False),
        ([(0, INT), (1.1, INT)], INT, True),
        ([(0, INT), (0.5, INT), (1.1, TERM)], INT, True),
        # Slurm's two, however far apart.
        ([(0, USR1), (9, TERM)], TERM, False),
        ([(0, USR1), (0.1, TERM)], TERM, False),
        ([(0, USR1), (9, USR1)], USR1, False),
        ([(0, TERM), (9, USR1)], TERM, False),
        ([(0, USR1), (9, TERM), (9.5, TERM)], TERM, False),
        ([(0, USR1), (9, TERM), (11, TERM)], TERM, True),
    ],
)
def test_two_signals_within_a_second_are_one_request(came, first, at_once):
    now = [0.0]
    requests = Requests(clock=lambda: now[0])
    assert requests.first is None
    for time, number in came:
        now[0] = time
        requests.take(number)
    assert (requests.first, requests.at_once) == (first, at_once)


def test_what_is_saved(tmp_path):
    assert last_saved(tmp_path) == (0, None)
    assert what_is_saved(tmp_path) == f"nothing is saved in {tmp_path}"
    for name in ("step-00000009", "step-00000010", "step-00000011.tmp", "step-00000012"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        if not name.endswith("12"):  # that one is not complete
            (folder / "state.json").write_text("{}")
    assert last_saved(tmp_path) == (10, tmp_path / "checkpoints" / "step-00000010")
    assert "step-00000010; the same command goes on from there" in what_is_saved(tmp_path)
