"""Ring and all-to-all against attention on one rank, and what they send, hold and compute."""

import itertools
import re
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from stepwell.models import tile_attention
from stepwell.models.attention import attend
from stepwell.models.context_attention import (
    Ring,
    dealt,
    heads_for_tokens,
    in_order,
    ring_attention,
    ring_backward,
    ring_forward,
    tokens_for_heads,
)
from stepwell.models.shares import Shares, deal
from stepwell.models.tile_attention import Kernel, add, merge
from stepwell.parallel.traffic import count_collectives
from tests.parallel.ranks import run_jobs

T, ROWS = 24, 2
# Documents that end within chunks, span several, fill a row; lengths are odd.
BORDERS = [0, 5, 6, 19, 24, 48]
WINDOWS = [None, 1, 4, 9]
KERNELS = {
    "cpu": Kernel(tile_attention.cpu_forward, tile_attention.cpu_backward),
    "product": Kernel(tile_attention.product_forward, tile_attention.product_backward),
    "varlen": Kernel(tile_attention.varlen_forward, tile_attention.varlen_backward),
}


def chunks(num_ranks):
    """As dealt; for two ranks 4 of each row."""
    found = torch.tensor(deal(BORDERS, ROWS, num_ranks, smallest=1))
    assert found.shape == (ROWS, num_ranks, {2: 4, 4: 2}[num_ranks])
    return found


def tensors(heads=4, kv_heads=2, dtype=torch.float64, head_dim=8, device="cpu"):
    """q, k, v and the output's gradient, for all tokens."""
    generator = torch.Generator().manual_seed(0)
    make = lambda h: torch.randn(ROWS * T, h, head_dim, generator=generator, dtype=dtype)
    return [make(h).to(device) for h in (heads, kv_heads, kv_heads, heads)]


def on_one_rank(whole, window):
    """Output and the gradients of q, k and v."""
    *whole, grad = whole
    q, k, v = (x.clone().requires_grad_() for x in whole)
    out = attend(q, k, v, torch.tensor(BORDERS, dtype=torch.int32, device=q.device), window)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def by_tiles(whole, num_ranks, window, kernel):
    """The same, all ranks' tiles one after another in one process."""
    shares = Shares(BORDERS, chunks(num_ranks).tolist(), window or 0)
    parts = [dealt(x, chunks(num_ranks)) for x in whole]
    wide = torch.promote_types(whole[0].dtype, torch.float32)
    out, dq = (torch.zeros_like(parts[0], dtype=wide) for _ in range(2))
    dk, dv = (torch.zeros_like(parts[1], dtype=wide) for _ in range(2))
    lse = torch.full(out.shape[:3], -torch.inf, dtype=wide, device=whole[0].device)
    pairs = list(itertools.product(range(num_ranks), repeat=2))
    for mine, other in pairs:
        held = parts[0][mine], parts[1][other], parts[2][other]
        for part in kernel.forward(*held, shares.tiles(mine, other), window or 0):
            merge(out[mine], lse[mine], *part)
    for mine, other in pairs:
        held = parts[3][mine], parts[0][mine], parts[1][other], parts[2][other]
        done = out[mine].to(whole[0].dtype), lse[mine]
        tiles = shares.tiles(mine, other)
        for queries, keys, *found in kernel.backward(*held, *done, tiles, window or 0):
            add(dq[mine], queries, found[0])
            add(dk[other], keys, found[1])
            add(dv[other], keys, found[2])
    return [in_order(x, chunks(num_ranks)) for x in (out, dq, dk, dv)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernel", ["cpu", "product"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (3, 1)])
def test_merged_tiles_are_attention(window, kernel, heads, kv_heads):
    whole = tensors(heads, kv_heads)
    for num_ranks in (2, 4):
        found = by_tiles(whole, num_ranks, window, KERNELS[kernel])
        for a, b in zip(found, on_one_rank(whole, window), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", ["cpu", "product"])
def test_merged_tiles_in_bf16_are_as_good_as_attention_in_bf16(kernel):
    exact = on_one_rank(tensors(), None)
    rounded = [x.bfloat16() for x in tensors()]
    found = by_tiles(rounded, 4, None, KERNELS[kernel])
    for a, b, c in zip(found, exact, on_one_rank(rounded, None), strict=True):
        plain = (c.double() - b).norm()
        assert (a.double() - b).norm() < 2 * plain


def by_flashs_rule(tile, band):
    """Pairs that flash attention's kernels let see each other, as documented: key j for query i if
    i + m - n - left <= j <= i + m - n + right; -1 is no bound."""
    (left, right), shift = band, tile.num_keys - tile.num_queries
    return {
        (i, j)
        for i in range(tile.num_queries)
        for j in range(tile.num_keys)
        if (left < 0 or j >= i + shift - left) and (right < 0 or j <= i + shift + right)
    }


@pytest.mark.parametrize("window", [0, 1, 2, 5, 9, 23])
def test_variable_length_calls_have_the_tiles_masks(window):
    for num_ranks, borders in itertools.product((2, 3, 4), (BORDERS, [0, 48], [0, 24, 47, 48])):
        dealt_out = deal(borders, 2 if 24 in borders else 1, num_ranks, smallest=1)
        shares = Shares(borders, dealt_out, window)
        for mine, other in itertools.product(range(num_ranks), repeat=2):
            tiles = shares.tiles(mine, other)
            groups = tile_attention._groups(tiles, window)
            assert sorted(t for group, _ in groups for t in group) == sorted(tiles)
            for group, band in groups:
                queries = [i for t in group for i in range(t.queries.start, t.queries.stop)]
                assert len(queries) == len(set(queries))
                for tile in group:
                    wanted = {
                        (i, j)
                        for i in range(tile.num_queries)
                        for j in range(tile.num_keys)
                        if tile.gap is None
                        or (tile.gap + i - j >= 0 and not 0 < window <= tile.gap + i - j)
                    }
                    assert by_flashs_rule(tile, band) == wanted


def test_variable_length_calls_fit_the_operators():
    """Shapes and arguments by torch's own checks, without a card."""
    q, k, v, grad = (x.to("meta") for x in tensors(dtype=torch.bfloat16))
    lse = torch.empty(q.shape[:2], device="meta")
    tiles = Shares([0, 48], deal([0, 48], 1, 1), 20).tiles(0, 0)
    forward, backward = KERNELS["varlen"]
    seen = [(out.shape, lse.shape) for _, out, lse in forward(q, k, v, tiles, 20)]
    shapes = [[x.shape for x in part[2:]] for part in backward(grad, q, k, v, q, lse, tiles, 20)]
    assert len(seen) == len(shapes) > 1
    for (out, sums), (dq, dk, dv) in zip(seen, shapes, strict=True):
        assert out == dq == (*sums, 8)
        assert dk == dv
        assert dk[1:] == (2, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
def test_variable_length_tiles_on_a_card(window, heads, kv_heads):
    whole = tensors(heads, kv_heads, torch.bfloat16, device="cuda")
    for num_ranks in (2, 4):
        found = by_tiles(whole, num_ranks, window, KERNELS["varlen"])
        wanted = by_tiles([x.float() for x in whole], num_ranks, window, KERNELS["product"])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


# --- on ranks -----------------------------------------------------------------------------------


def world(device="cpu") -> dist.ProcessGroup:
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    group = dist.group.WORLD
    assert group is not None
    return group


def across_ranks(method, heads, kv_heads, window, dtype, device="cpu"):
    """Output and gradients of all tokens, put together from every rank's."""
    group = world(device)
    parts = chunks(group.size())
    q, k, v, grad = (
        dealt(x, parts)[group.rank()].clone()
        for x in tensors(heads, kv_heads, dtype, device=device)
    )
    for x in (q, k, v):
        x.requires_grad_()
    borders = torch.tensor(BORDERS, dtype=torch.int32)
    if method == "ring":
        out = ring_attention(q, k, v, borders, parts, window, group)
    else:
        held = tokens_for_heads(q, k, v, parts, group)
        assert [x.shape[0] for x in held] == [ROWS * T] * 3
        out = heads_for_tokens(attend(*held, borders.to(device), window), parts, group)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    gathered = []
    for x in found:
        ranks = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(ranks, x.contiguous())
        gathered.append(in_order(torch.stack(ranks), parts).cpu())
    return gathered


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_two_cards_are_one_rank(method, dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    jobs = {str(w): (across_ranks, method, 4, 2, w, dtype, "cuda") for w in WINDOWS}
    tolerance = 1e-9 if dtype == torch.float64 else 5e-2
    for window, rank_results in zip(WINDOWS, run_jobs(2, **jobs).values(), strict=True):
        for rank_result in rank_results:
            for a, b in zip(rank_result, on_one_rank(tensors(), window), strict=True):
                torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance)


def measured_exchange(heads, kv_heads):
    """All-to-all's collectives, forward and backward."""
    group = world()
    parts = chunks(group.size())
    q, k, v, _ = (dealt(x, parts)[group.rank()].float() for x in tensors(heads, kv_heads))
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    with count_collectives() as found:
        held = tokens_for_heads(q, k, v, parts, group)
        heads_for_tokens(held[0] + held[1].mean() + held[2].mean(), parts, group).sum().backward()
    return [(one.kind, one.num_bytes) for one in found]


class Watched(NamedTuple):
    """A message under way that notes when it is waited for."""

    work: dist.Work
    events: list[str]

    def wait(self):
        self.events.append("wait")
        return self.work.wait()


def measured_ring():
    """A ring of larger blocks, with everything that is sent, held and computed counted."""
    ring = Ring.of(world().group_name)
    shares = Shares(BORDERS, chunks(ring.size).tolist())
    q, k, v, grad = (dealt(x, chunks(ring.size))[ring.rank].float().clone() for x in tensors())
    counts = {"bytes": [], "blocks": [], "pairs": [0, 0], "events": []}
    alive = {}
    send = dist.batch_isend_irecv

    def counting_send(ops):
        sent, received = (op.tensor for op in ops)
        counts["bytes"].append(sent.numel() * sent.element_size())
        if ops[0].tag == 0:  # keys and values
            alive.update({id(x): weakref.ref(x) for x in (sent, received)})
            counts["blocks"].append(sum(ref() is not None for ref in alive.values()))
        counts["events"].append("send")
        return [Watched(work, counts["events"]) for work in send(ops)]

    def counting(number, compute):
        def counted(*args):
            *held, tiles, window = args
            for tile in tiles:
                counts["pairs"][number] += tile.num_pairs(window)
                counts["events"].append("compute")
                yield from compute(*held, [tile], window)

        return counted

    kernel = Kernel(*(counting(i, compute) for i, compute in enumerate(KERNELS["cpu"])))
    dist.batch_isend_irecv = counting_send
    try:
        out, lse = ring_forward(q, k, v, shares, ring, kernel)
        forward_bytes, forward_events = list(counts["bytes"]), list(counts["events"])
        counts["bytes"].clear()
        ring_backward(grad, q, k, v, out, lse, shares, ring, kernel)
    finally:
        dist.batch_isend_irecv = send
    return forward_bytes, counts["bytes"], max(counts["blocks"]), counts["pairs"], forward_events


CASES = {
    f"{method}, {heads} and {kv_heads} heads, window {window}, {dtype}": (
        method, heads, kv_heads, window, dtype,
    )
    for method in ("ring", "ulysses")
    for heads, kv_heads in [(4, 4), (4, 2), (4, 1)]
    for window in WINDOWS
    for dtype in (torch.float64, torch.bfloat16)
}  # fmt: skip


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    jobs = {name: (across_ranks, *case) for name, case in CASES.items()}
    exchange = (measured_exchange, 4, 1)
    return request.param, run_jobs(
        request.param, **jobs, measured=(measured_ring,), exchange=exchange
    )


def test_equals_one_rank_with_gradients(ranks):
    for name, (_, heads, kv_heads, window, dtype) in CASES.items():
        exact = on_one_rank(tensors(heads, kv_heads), window)
        rounded = on_one_rank(tensors(heads, kv_heads, dtype), window)
        for rank_result in ranks[1][name]:
            for a, b, c in zip(rank_result, exact, rounded, strict=True):
                assert a.dtype == dtype
                if dtype == torch.float64:
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)
                else:
                    plain = (c.double() - b).norm()
                    assert (a.double() - b).norm() <= 2 * plain + 1e-6, name


def test_ring_sends_blocks_and_gradients_to_all_but_itself(ranks):
    num_ranks, results = ranks
    block = 2 * (ROWS * T // num_ranks) * 2 * 8 * 4  # K and V, tokens, heads, head_dim, float32
    for forward, backward, *_ in results["measured"]:
        assert forward == [block] * (num_ranks - 1)
        assert sorted(backward) == [block] * (2 * (num_ranks - 1))


def test_all_to_all_sends_each_head_once_each_way(ranks):
    """The one key/value head is repeated to as many as there are ranks."""
    num_ranks, results = ranks
    per_head = (ROWS * T // num_ranks) * 8 * 4  # tokens, head_dim, float32
    there, back = (4 + 2 * num_ranks) * per_head, 4 * per_head
    wanted = [("all-to-all", size) for size in (there, back, back, there)]
    assert results["exchange"] == [wanted] * num_ranks


def test_ring_holds_two_blocks(ranks):
    """The one at work, which is sent on, and the one that comes in."""
    assert [rank[2] for rank in ranks[1]["measured"]] == [2] * ranks[0]


def test_ring_computes_the_visible_pairs_and_no_others(ranks):
    num_ranks, results = ranks
    wanted = Shares(BORDERS, chunks(num_ranks).tolist()).visible_pairs()
    assert [rank[3] for rank in results["measured"]] == [[n, n] for n in wanted]


def test_blocks_travel_while_tiles_are_computed(ranks):
    """A rank that sees nothing of a block has nothing to compute."""
    num_ranks, results = ranks
    order = re.compile(r"send(?: compute)*(?: wait){2} ")
    for *_, events in results["measured"]:
        line = " ".join(events) + " "
        assert len(order.findall(line)) == num_ranks - 1
        assert set(order.sub("", line).split()) <= {"compute"}
    assert any(rank[-1][:2] == ["send", "compute"] for rank in results["measured"])
