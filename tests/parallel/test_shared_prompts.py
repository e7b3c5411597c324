"""Prompts computed once, and a last block for active tokens alone: no number changes."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stepwell.data.batch import Batch
from stepwell.data.judged import Pair
from stepwell.data.pair_packing import Read, pack_pairs
from stepwell.data.shared_prompts import whole_lengths
from stepwell.models import block_attention
from stepwell.parallel.mesh import init_distributed
from stepwell.parallel.shared_prompts import shared_prompts, shares_prompts, sharing_step
from stepwell.posttrain.preference.losses import REFERENCE, preference_loss
from stepwell.posttrain.reward_model.losses import bradley_terry
from stepwell.sections.preference import PreferenceLoss
from stepwell.train.engine import Engine
from stepwell.train.losses import Loss
from stepwell.train.step_flops import step_flops
from stepwell.types import TrainingError
from tests.oracle import VOCAB, assert_same, base_run, full
from tests.parallel.ranks import run_ranks

SEQ_LEN = 32
SCORE = {"method.kind": "reward", "model.head": "score"}
KINDS = ("dpo", "robust", "ipo", "hinge", "simpo", "cpo", "orpo", "dpop")
MORE = {"robust": {"label_smoothing": 0.2}}
# What runs in one process, what on two ranks.
ALONE = {
    "window": {"model.family": "mistral", "model.sliding_window": 4},
    "full": {"remat.mode": "full"},
    "selective": {"remat.mode": "selective"},
    "sqrt": {"remat.mode": "sqrt", "model.num_layers": 4},
    "lora": {"lora.rank": 2, "lora.alpha": 4.0},
    "logits again": {"loss.keep_logits": "never"},
}
DIVIDED = {
    "tp": {"layout.tp": 2, "model.vocab_size": VOCAB + 1, "model.d_ff": 28},
    "pp": {"layout.pp": 2, "model.num_layers": 3},
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Attention by blocks of queries also of short documents, several blocks each."""
    monkeypatch.setattr(block_attention, "pays", lambda *_, **__: True)
    monkeypatch.setattr(block_attention, "QUERY_BLOCK", 4)
    monkeypatch.setattr(block_attention, "_missing", lambda length: -length % 4)


def pairs() -> list[Pair]:
    """Prompts of 1 to 9 tokens; the answers of some begin alike, and one pair shares nothing."""
    generator = torch.Generator().manual_seed(1)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist())

    found = []
    for prompt, common, chosen, rejected in ((9, 0, 5, 3), (1, 0, 4, 6), (6, 3, 2, 4), (7, 0, 1, 1),
                                             (4, 2, 7, 1)):  # fmt: skip
        begin = ids(common)
        found.append(Pair(ids(prompt), begin + ids(chosen), begin + ids(rejected)))
    return [*found, replace(found[0], rejected_prompt_ids=ids(5))]


def batches(shared: bool, read: Read = "answers", order=(0, 1, 2, 3, 4, 5)) -> Batch:
    rows = [pairs()[i] for i in order]
    reference = -torch.arange(12.0).reshape(6, 2)[list(order)].numpy()
    streams = {REFERENCE: reference} if read == "answers" else {"margin": reference[:, 0]}
    return pack_pairs(rows, SEQ_LEN, 0, streams, read=read, shared=shared)


def gradients(engine: Engine, batch: Batch, loss: Loss) -> dict[str, torch.Tensor]:
    engine.drop_gradients()
    stats = engine.forward_backward(batch, loss)
    found = {n: full(p.grad) for n, p in engine.named_parameters() if p.grad is not None}
    shown = {f"shown/{k}": torch.tensor(v).double() for k, v in stats.metrics.items()}
    return found | shown | {"loss": torch.tensor(stats.loss).double()}


def run_of(**overrides):
    return base_run(**{"data.seq_len": SEQ_LEN, "train.micro_batch_rows": 2, **overrides})


def loss_of(run, **loss) -> tuple[Loss, Read]:
    scores = run.model.head == "score"
    if scores:
        return bradley_terry(), "last"
    return preference_loss(PreferenceLoss(**{"kind": "dpo", **loss})), "answers"


def test_shared_batches_are_smaller():
    shared, plain = batches(True), batches(False)
    assert int((shared.weights_BT != 0).sum()) == int((plain.weights_BT != 0).sum())
    saved = int((plain.docs_BT >= 0).sum()) - int((shared.docs_BT >= 0).sum())
    # A prompt's last token stands twice, and the loss begins there.
    assert saved == 8 + 0 + 5 + 6 + 3 + 0
    assert sorted(whole_lengths(shared)) == sorted(whole_lengths(plain))
    both = batches(True, "last"), batches(False, "last")
    saved = int((both[1].docs_BT >= 0).sum()) - int((both[0].docs_BT >= 0).sum())
    # Scores are read at the last token alone: answers that begin alike are shared, too.
    assert saved == 9 + 1 + 9 + 7 + 6 + 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_preference_loss(kind: str, small_blocks):
    engine, (loss, read) = Engine(run_of()), loss_of(run_of(), **MORE.get(kind, {}), kind=kind)
    wanted = gradients(engine, batches(False, read), loss)
    assert_same(gradients(engine, batches(True, read), loss), wanted, 1e-9, kind)


@pytest.mark.parametrize("head", [{}, SCORE], ids=["lm", "score"])
@pytest.mark.parametrize("name", ALONE)
def test_in_one_process(name: str, head: dict, small_blocks):
    run = run_of(**ALONE[name], **head)
    engine, (loss, read) = Engine(run), loss_of(run)
    wanted = gradients(engine, batches(False, read), loss)
    assert_same(gradients(engine, batches(True, read), loss), wanted, 1e-9, name)
    plain = gradients(Engine(run_of(**head, **_without_remat(ALONE[name]))), batches(False, read),
                      replace(loss, needs=loss.needs | {"hidden"}))  # fmt: skip
    assert_same(wanted, plain, 1e-9, f"{name}, all tokens in the last block")


def _without_remat(overrides: dict) -> dict:
    return {k: v for k, v in overrides.items() if not k.startswith("remat")}


def _on_ranks(overrides: dict) -> dict[str, torch.Tensor]:
    run = run_of(**overrides)
    mesh = init_distributed(run.layout)
    loss, read = loss_of(run)
    batch = batches(True, read)
    mine = range(batch.num_rows)[mesh.data_rank :: mesh.data_world]
    batch = batch.rows(mine.start, mine.start + 1) if mesh.data_world > 1 else batch
    return gradients(Engine(run, mesh=mesh), batch, loss)


def _each(cases: list[dict]) -> list[dict[str, torch.Tensor]]:
    return [_on_ranks(case) for case in cases]


def test_on_ranks():
    """Of a pipeline, each rank has the gradients of its own part."""
    cases = [DIVIDED["tp"], {**DIVIDED["pp"], **SCORE}]
    ranks = run_ranks(_each, 2, cases)
    for i, case in enumerate(cases):
        plain = {k: v for k, v in case.items() if not k.startswith("layout")}
        run = run_of(**plain)
        loss, read = loss_of(run)
        wanted = gradients(Engine(run), batches(False, read), loss)
        got = {**ranks[1][i], **ranks[0][i]}
        assert_same(got, wanted, 1e-9, str(case))


def test_scores_and_logprobs_without_gradient():
    engine = Engine(run_of(**SCORE))
    found = [engine.scores(b)[b.weights_BT != 0] for b in (batches(True, "last"),
                                                          batches(False, "last"))]  # fmt: skip
    rows = [b.extra["index"][b.weights_BT != 0] for b in (batches(True, "last"),
                                                         batches(False, "last"))]  # fmt: skip
    by_index = [x[torch.argsort(i, stable=True)] for x, i in zip(found, rows, strict=True)]
    torch.testing.assert_close(by_index[0], by_index[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [{"layout.compile": True}, {"lora.rank": 2, "lora.dropout": 0.1}, {"layout.cp": 2}],
)
def test_runs_that_need_whole_documents(overrides: dict):
    assert not shares_prompts(run_of(**overrides))
    assert sharing_step(run_of(**overrides)) == 0
    assert shares_prompts(run_of())
    plain, batch, cpu = batches(False), batches(True), torch.device("cpu")
    borders, nothing = shared_prompts(plain, plain.cu_seqlens(), run_of(**overrides), cpu)
    assert nothing is None
    assert borders.equal(plain.cu_seqlens())
    with pytest.raises(TrainingError, match="pack them whole"):
        shared_prompts(batch, batch.cu_seqlens(), run_of(**overrides), cpu)


def test_tensor_ranks_divide_short_rows():
    assert sharing_step(run_of()) == sharing_step(run_of(**{"layout.tp": 4})) == 32
    assert sharing_step(run_of(**{"layout.tp": 3})) == 96


def test_flops_are_of_what_is_computed(small_blocks):
    """By hand: matrices once a token; after the last block's keys and values, and in the head, only
    the loss tokens; attention in whole documents, once a token, in the last block of answers."""
    run, batch = run_of(), batches(True)
    model, tokens = run.model, int((batch.docs_BT >= 0).sum())
    loss_tokens = int((batch.weights_BT != 0).sum())
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    before = 2 * model.d_model * (heads + 2 * keys)
    after = 2 * model.d_model * (heads + 3 * model.d_ff)
    squares = [0, 0]
    for number, pair in enumerate(pairs()):
        prompts = len(pair.prompt_ids), len(pair.rejected_prompt_ids or pair.prompt_ids)
        answers = len(pair.chosen_ids), len(pair.rejected_ids)
        for prompt, answer in zip(prompts, answers, strict=True):
            squares = [x + (prompt + answer - 1) ** 2 for x in squares]
            squares[1] -= (prompt - 1) ** 2
        squares[0] -= (prompts[1] - 1) ** 2 if number < 5 else 0
    attention = 4 * heads * sum(squares) / 2
    head = loss_tokens * 2 * model.vocab_size * model.d_model
    matrices = model.num_layers * tokens * before + (tokens + loss_tokens) * after
    assert model.num_layers == 2
    wanted = 3 * (matrices + attention + head)
    assert step_flops(run, batch) == pytest.approx(wanted)
    assert step_flops(run, batch) < step_flops(run, batches(False))
    # What torch counts has padding in it, and no gradient of the first block's input.
    padding = batch.tokens_BT.numel() - tokens
    engine, loss = Engine(run), loss_of(run)[0]
    with FlopCounterMode(display=False) as counter:
        engine.forward_backward(batch, loss)
    counted = counter.get_total_flops() - padding * 3 * (2 * before + after)
    assert counted == pytest.approx(wanted, rel=0.01)
