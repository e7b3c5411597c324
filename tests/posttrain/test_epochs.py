import pytest

from stepwell.config import Run
from stepwell.posttrain.epochs import with_epochs


@pytest.mark.parametrize(
    ("epochs", "num_items", "a_step", "steps"),
    [
        (None, 10, 4, 100),  # no bound but train.steps
        (2.0, 10, 4, 5),
        (1.0, 10, 4, 3),  # the last step has what is left
        (0.01, 10, 4, 1),
        (39.9, 10, 4, 100),
        (40.0, 10, 4, 100),
        (80.0, 10, 4, 100),  # train.steps ends it first
    ],
)
def test_passes_end_a_run_that_steps_do_not_end_first(epochs, num_items, a_step, steps):
    more = {} if epochs is None else {"method.epochs": epochs}
    for kind, key in (
        ("sft", "train.global_batch_rows"),
        ("dpo", "method.pairs_per_step"),
        ("reward", "method.rows_per_step"),
    ):
        run = Run.parse({"method": {"kind": kind}}, {"train.steps": 100, key: a_step, **more})
        assert with_epochs(run, num_items).train.steps == steps
