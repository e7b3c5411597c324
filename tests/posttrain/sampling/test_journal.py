import math

import pytest

from stepwell.generate import Request
from stepwell.posttrain.sampling.journal import Journal
from stepwell.types import Completion


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "\\NaN", "plain"])
def test_what_was_noted_is_read_back_as_it_was(tmp_path, text):
    """Also a text that reads like a number that JSON lacks, and a probability of 0."""
    path, head = tmp_path / "journal.jsonl", {"rollout": 3, "why": text}
    journal = Journal(path, head)
    journal.note(Completion(7, (1, 2), (5, 6), (-0.5, -math.inf), text, "stop", 0))
    journal.close()
    again = Journal(path, head)
    entry = again.entry(Request(7, (1, 2)))
    again.close()
    assert (entry.tokens, entry.logprobs) == ([5, 6], [-0.5, -math.inf])
    assert entry.end == ("stop", text)
    assert again.num_known == 2
