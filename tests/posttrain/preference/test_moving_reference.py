import pytest
import torch

from stepwell.posttrain.preference.moving_reference import MovingReference
from stepwell.train.losses import cross_entropy
from stepwell.train.start import open_session
from stepwell.types import CheckpointError
from tests.oracle import base_run, global_batch


@pytest.mark.parametrize("place", ["separate", "host"])
def test_it_becomes_the_policy_and_goes_back(place, tmp_path):
    """Bit for bit, in memory and out of the run's folder."""
    keys = {"dir": str(tmp_path), "optim.lr": 0.1, "method.kind": "online-dpo"}
    keys |= {f"precision.{part}": "fp32" for part in ("compute", "param", "reduce")}
    run = base_run(**keys, **{"method.max_new_tokens": 8, "method.reference": place})
    batch = global_batch()
    with open_session(run, console=False) as session:
        engine = session.engine
        reference = MovingReference(session)
        first = engine.logprobs(batch)
        assert torch.equal(reference.logprobs(batch), first)
        seen = {0: first}
        for _ in range(2):
            engine.forward_backward(batch, cross_entropy(run.loss))
            engine.optim_step()
            reference.refresh()
            seen[engine.step] = engine.logprobs(batch)
            assert torch.equal(reference.logprobs(batch), seen[engine.step])
        assert not torch.equal(seen[1], seen[2])
        reference.go_to(0)
        assert torch.equal(reference.logprobs(batch), first)
        reference.go_to(2)
        assert torch.equal(reference.logprobs(batch), seen[2])
        again = MovingReference(session, step=2)
        assert torch.equal(again.logprobs(batch), seen[2])
        # Nothing goes back to the one of step 1, so it is not kept.
        with pytest.raises(CheckpointError):
            reference.go_to(1)
