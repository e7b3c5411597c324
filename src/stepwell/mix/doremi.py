"""DoReMi (2305.10429): domain weights from a small proxy that is trained, by group DRO, on what a
reference model of the same size does better.

D domains, B rows, T tokens a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.loader import State, num_windows, pretrain_stream
from stepwell.data.store import TokenStore
from stepwell.models.flops import parameter_shapes
from stepwell.models.transformer import TokenOutputs
from stepwell.parallel.mesh import Mesh, all_reduce_sum
from stepwell.train.checkpoint import load_weights
from stepwell.train.engine import Engine
from stepwell.train.losses import Loss, LossSums, masked_sum
from stepwell.train.pretrain import open_stores
from stepwell.train.run_checkpoints import of_run_or_itself
from stepwell.train.session import Session
from stepwell.train.start import open_session
from stepwell.train.streams import Stream
from stepwell.types import ConfigError

STEP_SIZE = 1.0
SMOOTHING = 1e-3
DOMAINS = "domains_BT"
STREAM = "doremi"


def doremi_update(
    weights_D: np.ndarray,
    excess_D: np.ndarray,
    step_size: float = STEP_SIZE,
    smoothing: float = SMOOTHING,
) -> np.ndarray:
    """The domain weights of the next step (algorithm 1): each times exp(step_size * excess loss),
    normalised, then mixed with `smoothing` of the uniform mixture."""
    logs_D = np.log(weights_D) + step_size * np.asarray(excess_D)
    raised_D = np.exp(logs_D - logs_D.max())
    return (1 - smoothing) * raised_D / raised_D.sum() + smoothing / len(raised_D)


def mean_excess(
    excess_BT: Tensor, weights_BT: Tensor, domains_BT: Tensor, num_domains: int
) -> Tensor:
    """(2, D) float64: sums of max(excess, 0) over each domain's tokens, and their numbers. excess:
    the proxy's loss minus the reference's, a token."""
    active_BT = weights_BT != 0
    clipped = excess_BT[active_BT].double().clamp(min=0)
    which = domains_BT[active_BT].long()
    zeros = torch.zeros(num_domains, dtype=torch.float64)
    return torch.stack(
        [zeros.index_add(0, which, clipped), zeros.index_add(0, which, torch.ones_like(clipped))]
    )


def domain_loss(weights_D: Sequence[float]) -> Loss:
    """sum_d weight_d * mean cross-entropy of domain d's tokens in the global batch; each domain is
    a stream with a denominator of its own. Metrics: `loss` of all tokens, `loss_{d}`."""

    def denominators(batch: Batch) -> dict[str, float]:
        return {
            f"domain{d}": batch.weights_BT[batch.extra[DOMAINS] == d].double().sum().item()
            for d in range(len(weights_D))
        }

    def fn(outputs: TokenOutputs, batch: Batch) -> LossSums:
        assert outputs.logprobs_BT is not None
        nll_BT, domains_BT = -outputs.logprobs_BT, batch.extra[DOMAINS]
        sums = {}
        all_BT = batch.weights_BT
        metrics = {"loss": (masked_sum(nll_BT.detach(), all_BT), all_BT.sum())}
        for d, weight in enumerate(weights_D):
            mine_BT = torch.where(domains_BT == d, all_BT, 0)
            total = masked_sum(nll_BT, mine_BT)
            sums[f"domain{d}"] = weight * total
            metrics[f"loss_{d}"] = (total.detach(), mine_BT.sum())
        return LossSums(sums, metrics)

    return Loss(frozenset({"logprobs"}), denominators, fn)


@dataclass
class Weights:
    """The weights of the next step, and the sum of those of the steps so far."""

    now_D: np.ndarray
    sum_D: np.ndarray
    num_steps: int = 0

    @classmethod
    def uniform(cls, num_domains: int) -> Weights:
        return cls(np.full(num_domains, 1 / num_domains), np.zeros(num_domains))

    @property
    def average(self) -> np.ndarray:
        """DoReMi's answer (D): the mean over the steps."""
        return self.sum_D / max(self.num_steps, 1)

    def step(self, excess_D: np.ndarray, step_size: float, smoothing: float) -> None:
        self.now_D = doremi_update(self.now_D, excess_D, step_size, smoothing)
        self.sum_D = self.sum_D + self.now_D
        self.num_steps += 1

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"now": self.now_D.tolist(), "sum": self.sum_D.tolist(), "steps": self.num_steps}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Weights:
        return cls(np.array(state["now"]), np.array(state["sum"]), state["steps"])


def doremi(
    run: Run,
    reference: str | Path,
    step_size: float = STEP_SIZE,
    smoothing: float = SMOOTHING,
    console: bool = True,
) -> Weights:
    """Trains the proxy in run.dir (or goes on with it) and returns the domain weights.

    run: its data.sources are the domains, whatever their weights; rows are dealt to them evenly.
    reference: a run or a checkpoint of the same dimensions, trained on the mixture to improve on.
    Raises ConfigError for fewer rows a step than domains.
    """
    stores = [store for store, _ in open_stores(run, run.data.sources)]
    rows, num_domains = run.train.global_batch_rows, len(stores)
    if not 1 < num_domains <= rows:
        raise ConfigError(
            f"train.global_batch_rows={rows} must give each of {num_domains} domains (2 or more) a "
            f"row a step; the nearest legal value is {max(num_domains, 2)}"
        )
    check_settings(step_size, smoothing)
    fingerprint = stores[0].manifest["tokenizer"]
    with open_session(run, tokenizer=fingerprint, console=console) as session:
        teacher = _reference(run, reference, session)
        weights, stream = _restored(run, stores, session, session.extra)
        while not session.finished:
            batch, state = session.draw(stream, STREAM)
            batch = with_domains(batch, stores, run.data.seq_len)
            excess_D = _excess(session.engine, teacher, batch, num_domains)
            weights.step(excess_D, step_size, smoothing)
            more = {f"doremi/weight_{d}": float(w) for d, w in enumerate(weights.now_D)}
            info = session.step(batch, domain_loss(weights.now_D.tolist()), more=more)
            if info.verdict.action == "rewind":
                weights, stream = _restored(run, stores, session, session.rewind())
                continue
            session.after_step({STREAM: state, "weights": weights.state()})
        return weights


def check_settings(step_size: float, smoothing: float) -> None:
    """Raises ConfigError for numbers that no update can have."""
    if not (0 < smoothing < 1 and math.isfinite(step_size) and step_size > 0):
        raise ConfigError(
            f"step_size={step_size} must be positive and smoothing={smoothing} between 0 and 1; "
            f"the paper has {STEP_SIZE:g} and {SMOOTHING:g}"
        )


def _reference(run: Run, reference: str | Path, session: Session) -> Engine:
    folder = of_run_or_itself(reference, "the reference")
    weights = load_weights(folder, parameter_shapes(run.model))
    return Engine(run, weights, session.engine.mesh)


def _restored(
    run: Run, stores: Sequence[TokenStore], session: Session, extra: dict[str, Any] | None
) -> tuple[Weights, Stream]:
    """The weights and the stream as they were with the last checkpoint."""
    extra = extra or {}
    stream = even_stream(run, stores, session.engine.mesh, extra.get(STREAM))
    known = extra.get("weights")
    session.pause()
    return Weights.load(known) if known else Weights.uniform(len(stores)), stream


def even_stream(
    run: Run, stores: Sequence[TokenStore], mesh: Mesh, state: State | None = None
) -> Stream:
    """Rows of all stores in turn; they may be read as often as it takes."""
    return pretrain_stream(
        [(store, 1.0) for store in stores],
        run.data.seq_len,
        run.train.global_batch_rows,
        rank=mesh.data_rank,
        world=mesh.data_world,
        seed=run.train.seed,
        state=state,
        document_mask=run.data.document_mask,
        order=run.data.order,
    )


def with_domains(batch: Batch, stores: Sequence[TokenStore], seq_len: int) -> Batch:
    """The batch with the number of each row's store as a per-token stream (B, T). Sample ids count
    windows through the stores in their order."""
    ends = np.cumsum([num_windows(store, seq_len) for store in stores])
    which_B = torch.from_numpy(np.searchsorted(ends, np.array(batch.sample_ids), side="right"))
    domains_BT = which_B.to(torch.int32)[:, None].expand(batch.tokens_BT.shape).contiguous()
    return replace(batch, extra={**batch.extra, DOMAINS: domains_BT})


def _excess(engine: Engine, teacher: Engine, batch: Batch, num_domains: int) -> np.ndarray:
    """Mean clipped excess loss of each domain in the global batch."""
    excess_BT = teacher.logprobs(batch) - engine.logprobs(batch)
    found = mean_excess(excess_BT, batch.weights_BT, batch.extra[DOMAINS], num_domains)
    sums_D, counts_D = all_reduce_sum(found.to(engine.mesh.device), engine.mesh).cpu().numpy()
    return sums_D / np.maximum(counts_D, 1)
