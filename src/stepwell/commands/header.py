"""What a run is and what it will need, in a few lines, before it starts."""

from __future__ import annotations

from stepwell.config import GRPO, Run
from stepwell.models.flops import count_parameters
from stepwell.plan.memory import predict_memory

MIB = 2**20


def header_text(run: Run, num_ranks: int = 1) -> str:
    """Parameters, work and predicted memory of each of `num_ranks` processes."""
    ledger = predict_memory(run, num_ranks)
    items = ledger.items
    state = f"weights {size_text(items.parameters)}, optimiser {size_text(items.optimizer)}"
    lines = [
        f"{run.name}: {count_parameters(run.model).total:,} parameters ({run.model.family}), "
        f"{run.precision.compute}, {run.optim.kind}",
        f"  {work_text(run)}",
        f"  predicted memory, at the highest point of a step: {size_text(ledger.peak_bytes)} "
        f"({state}, activations {size_text(items.activations)})"
        + (f" on each of {num_ranks} ranks" if num_ranks > 1 else ""),
    ]
    return "\n".join(lines)


def work_text(run: Run) -> str:
    method, steps = run.method, run.train.steps
    if isinstance(method, GRPO):
        answers = method.prompts_per_step * method.group_size
        return (
            f"{steps:,} steps, {method.prompts_per_step} prompts x {method.group_size} answers = "
            f"{answers:,} answers of at most {method.max_new_tokens} tokens a rollout"
        )
    tokens = run.train.global_batch_rows * run.data.seq_len
    most = "at most " if method.kind == "sft" else ""
    return (
        f"{steps:,} steps of {most}{tokens:,} tokens ({run.train.global_batch_rows} rows of "
        f"{run.data.seq_len}) = {steps * tokens:,} tokens"
    )


def size_text(num_bytes: float) -> str:
    """`155 MiB`, from 1 GiB on `1.5 GiB`."""
    if num_bytes >= 1024 * MIB:
        return f"{num_bytes / (1024 * MIB):,.1f} GiB"
    return f"{num_bytes / MIB:,.0f} MiB"
