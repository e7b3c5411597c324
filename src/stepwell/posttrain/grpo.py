"""Group-relative policy optimisation with verifiable rewards (2402.03300, 2501.12948).

A flat loop: sample a group of answers to each prompt on the training weights, score them, take the
advantage within each group, make clipped policy-gradient steps. B rows, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stepwell.config import Run
from stepwell.data.batch import Batch
from stepwell.data.order import permute
from stepwell.data.packing import pack_rows
from stepwell.eval.grade import Prompt, Verifier, check_columns
from stepwell.generate import Sampling
from stepwell.metrics import LineFile, cut_lines
from stepwell.models.transformer import TokenOutputs
from stepwell.parallel.mesh import Mesh, all_gather_objects
from stepwell.posttrain.advantages import dead_share, group_advantages
from stepwell.posttrain.aggregation import token_weight
from stepwell.posttrain.rollout import ByVerifier, Rollouts, collect
from stepwell.sections.methods import GRPO
from stepwell.tokenizer import Tokenizer
from stepwell.train.losses import Loss, LossSums, masked_sum, token_count
from stepwell.train.session import Session, open_session
from stepwell.train.weights import check_tokenizer, require_model
from stepwell.types import ConfigError, TrainingError


def clipped_objective(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logp - old), element-wise, and where the
    clip binds (PPO, 1707.06347, equation 7; separate bounds: DAPO, 2503.14476)."""
    ratio = (logprobs - old_logprobs).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def policy_loss(method: GRPO) -> Loss:
    """The batch carries `advantages`, `old_logprobs` (NaN: the current ones, so that the ratio is
    exactly 1) and `sampler_logprobs`. Metrics: entropy, KL of the sampler to the trained policy
    (k3 estimate; what sampling in another precision or with older weights costs), clipped share.
    """

    def fn(outputs: TokenOutputs, batch: Batch) -> LossSums:
        assert outputs.logprobs_BT is not None
        assert outputs.entropy_BT is not None
        logprobs_BT = outputs.logprobs_BT
        old_BT = batch.extra["old_logprobs"]
        old_BT = torch.where(old_BT.isnan(), logprobs_BT.detach(), old_BT)
        objective_BT, clipped_BT = clipped_objective(
            logprobs_BT, old_BT, batch.extra["advantages"], method.clip_low, method.clip_high
        )
        weights_BT = batch.weights_BT
        with torch.no_grad():
            mask_BT = (weights_BT != 0).float()
            log_ratio_BT = batch.extra["sampler_logprobs"] - logprobs_BT
            count = mask_BT.sum()
            metrics = {
                "entropy": (masked_sum(outputs.entropy_BT, mask_BT), count),
                "kl_sampler": (
                    masked_sum(log_ratio_BT.exp() - 1 - log_ratio_BT, mask_BT),
                    count,
                ),
                "clipped_share": (masked_sum(clipped_BT.float(), mask_BT), count),
            }
        return LossSums({"tokens": masked_sum(objective_BT, weights_BT)}, metrics)

    return Loss(frozenset({"logprobs", "entropy"}), token_count, fn)


def pack_rollouts(rollouts: Rollouts, method: GRPO, seq_len: int, pad_id: int) -> Batch:
    """Rows of prompt + answer, loss on the answer's tokens only; extra: advantages, old_logprobs
    (NaN) and sampler_logprobs (what the sampler saw)."""
    rewards = [group.rewards for group in rollouts.groups]
    per_answer = [a for group in group_advantages(rewards, method.advantage) for a in group]
    docs, advantages, sampled = [], [], []
    for (ids, mask, streams), advantage in zip(rollouts.documents(), per_answer, strict=True):
        weight = token_weight(sum(mask), method.aggregate)
        docs.append((ids, [weight * trained for trained in mask]))
        advantages.append([advantage * trained for trained in mask])
        sampled.append(streams["sampler_logprobs"])
    batch = pack_rows(
        docs,
        seq_len,
        pad_id=pad_id,
        extra={"advantages": advantages, "sampler_logprobs": sampled},
    )
    old_BT = torch.full_like(batch.extra["advantages"], torch.nan)
    return replace(batch, extra={**batch.extra, "old_logprobs": old_BT})


def grpo(
    run: Run,
    prompts: Sequence[Prompt],
    verifier: Verifier,
    tokenizer: Tokenizer,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    dropped: Mapping[str, int] | None = None,
) -> int:
    """Trains to `train.steps` optimiser steps; goes on where a stopped run was. Returns the number
    of steps done. Every completion with its reward goes to `samples.jsonl`.

    dropped: prompts that the caller left out, by reason; noted in `events.jsonl`.
    Raises ConfigError without a model, with another tokenizer than the model's, and when there are
    fewer prompts than a step takes; DataError for prompts without a column that the verifier
    requires; TrainingError when the verifier fails on every answer of the first rollout.
    """
    method = run.method
    assert isinstance(method, GRPO)
    require_model(run, weights)
    if run.model.init is not None:
        check_tokenizer(run.model.init, tokenizer, run.data.tokenizer)
    check_columns(verifier, prompts)
    if len(prompts) < method.prompts_per_step:
        raise ConfigError(
            f"method.prompts_per_step={method.prompts_per_step} but there are only "
            f"{len(prompts)} prompts; the nearest legal value is {len(prompts)}"
        )
    sampling = Sampling(
        temperature=method.temperature,
        eos_ids=tokenizer.stop_ids,
        max_new_tokens=method.max_new_tokens,
    )
    loss = policy_loss(method)
    with open_session(run, weights, tokenizer=tokenizer.fingerprint) as session:
        start = session.engine.step
        if session.extra is None:
            counts = dict(dropped or {})
            total = len(prompts) + sum(counts.values())
            session.log.event(
                "data", path=run.data.path, rows=total, kept=len(prompts), dropped=counts
            )
        samples = open_samples(session) if session.engine.mesh.is_main else None
        num_rollouts = (session.extra or {"rollouts": 0})["rollouts"]
        session.pause()
        while not session.finished:
            numbers = step_prompts(len(prompts), run, num_rollouts, session)
            if session.is_jumped("rollouts", num_rollouts + 1, numbers):
                num_rollouts += 1
                continue
            rollouts = collect(
                session.engine,
                [prompts[i] for i in numbers],
                method.group_size,
                sampling,
                ByVerifier(verifier),
                tokenizer,
                seed=rollout_seed(run.train.seed, num_rollouts),
            )
            num_rollouts += 1
            shares = all_shares(rollouts, session.engine.mesh)
            rollouts = shares[session.engine.mesh.data_rank]
            rows = [row for share in shares for row in share.rows()]
            if session.engine.step == start:
                check_failures(rows)
            more = rollout_metrics(shares, rows)
            batch = pack_rollouts(rollouts, method, run.data.seq_len, tokenizer.pad_id)
            if method.updates_per_rollout > 1:
                old_BT = session.engine.logprobs(batch, method.temperature)
                batch = replace(batch, extra={**batch.extra, "old_logprobs": old_BT})
            action = ""
            for _ in range(method.updates_per_rollout):
                action = session.step(batch, loss, method.temperature, more).verdict.action
                if session.finished or action == "rewind":
                    break
            if action == "rewind":
                found = session.rewind(method.updates_per_rollout)
                num_rollouts = (found or {"rollouts": 0})["rollouts"]
                if samples is not None:
                    samples.close()
                    samples = open_samples(session)
                continue
            if samples is not None:
                for row in rows:
                    samples.write({"step": session.engine.step, **row})
            session.after_step({"rollouts": num_rollouts})
        if samples is not None:
            samples.close()
        return session.engine.step - start


def open_samples(session: Session) -> LineFile:
    """`samples.jsonl`, without the lines of steps that are about to be done again."""
    path = session.dir / "samples.jsonl"
    cut_lines(path, session.engine.step)
    return LineFile(path)


def step_prompts(num_prompts: int, run: Run, num_rollouts: int, session: Session) -> list[int]:
    """Numbers of this rank's prompts of the next rollout: each epoch is a permutation of all."""
    method, mesh = run.method, session.engine.mesh
    assert isinstance(method, GRPO)
    first = num_rollouts * method.prompts_per_step
    chosen = []
    for ordinal in range(first, first + method.prompts_per_step):
        epoch, place = divmod(ordinal, num_prompts)
        index = permute(torch.tensor([place]).numpy(), num_prompts, run.train.seed, epoch)
        chosen.append(int(index[0]))
    return chosen[mesh.data_rank :: mesh.data_world]


def rollout_seed(seed: int, num_rollouts: int) -> int:
    return seed * 1_000_003 + num_rollouts


def all_shares(rollouts: Rollouts, mesh: Mesh) -> list[Rollouts]:
    """What the first rank of each data share has, by the share's number.

    Its other ranks have had the same prompts answered and verified; where an answer depends on a
    device's last digit, or a verdict on the clock, theirs could differ, and one batch needs one
    truth.
    """
    parts = all_gather_objects(rollouts if mesh.counts_rows else None, mesh)
    firsts = [part for part in parts if part is not None]
    assert len(firsts) == mesh.data_world
    return firsts


def check_failures(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises TrainingError if the verifier failed on every answer: nothing can be learnt so."""
    if rows and all(row["failure"] for row in rows):
        raise TrainingError(
            f"the verifier failed on every one of the {len(rows)} answers of the first rollout; "
            f"the first failure is {rows[0]['failure']}: {rows[0]['detail']}"
        )


def rollout_metrics(shares: Sequence[Rollouts], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Over all shares: rewards, lengths, dead groups, errors of the verifier."""
    groups = [group.rewards for share in shares for group in share.groups]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "reward/mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "reward/dead_groups": dead_share(groups),
        "reward/not_applicable": len(rows) - len(rewards),
        "rollout/length": sum(row["num_tokens"] for row in rows) / len(rows),
        "rollout/truncated": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "rollout/errors": sum(row["failure"] == "error" for row in rows),
        "rollout/timeouts": sum(row["failure"] == "timeout" for row in rows),
    }
