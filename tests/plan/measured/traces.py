"""Traces as libkineto writes them on NVIDIA's devices, made by hand: the fields that torch 2.5-2.9
give kernels, NCCL's kernels and annotations."""

import gzip
import json
from typing import Any

from stepwell.plan.comms.collectives import collectives
from stepwell.plan.measured.lines import predicted_parts
from stepwell.plan.measured.links import message_seconds
from stepwell.plan.steptime.coefficients import SHIPPED
from stepwell.plan.steptime.step import predict_step

EPOCH_US = 1666149715033200.0  # older versions count from 1970, newer ones from less long ago
COMPUTE, GATHER, SCATTER, OTHER = 7, 20, 24, 28  # streams
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNN"
FLASH = "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>"
POINTWISE = "triton_poi_fused__unsafe_view_mm_mul_silu_3"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>"
)
COLLECTIVES = {
    ALL_GATHER: "_allgather_base",
    REDUCE_SCATTER: "_reduce_scatter_base",
    ALL_REDUCE: "allreduce",
    SEND_RECV: "send",
}


def event(name, category, start_ms, end_ms, stream, **args):
    return {
        "ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream,
        "ts": EPOCH_US + 1e3 * start_ms, "dur": round(1e3 * (end_ms - start_ms), 3),
        "args": {"External id": 1, "device": 0, "stream": stream, "correlation": 2, **args},
    }  # fmt: skip


def kernel(name, start_ms, end_ms, stream=COMPUTE, **args):
    return event(name, "kernel", start_ms, end_ms, stream, **args)


def message(name, start_ms, end_ms, stream, elements, dtype, group, size, ranks=()):
    """elements: of the whole tensor."""
    part = elements // size
    sent, got = elements, elements
    if name == ALL_GATHER:
        sent = part
    if name == REDUCE_SCATTER:
        got = part
    told = {
        "Collective name": COLLECTIVES[name], "In msg nelems": sent, "Out msg nelems": got,
        "Group size": size, "dtype": dtype, "In split size": "[]", "Out split size": "[]",
        "Process Group Name": "1", "Process Group Description": group,
    }  # fmt: skip
    if ranks:
        told["Process Group Ranks"] = f"[{', '.join(map(str, ranks[:4]))}, ...]"
    return kernel(name, start_ms, end_ms, stream, **told)


def steps(spans_ms, host_ms, first=3):
    """ProfilerStep annotations: on the host, and on two streams of the device."""
    found = []
    pairs = zip(spans_ms, host_ms, strict=True)
    for number, ((start, end), (since, until)) in enumerate(pairs, start=first):
        name = f"ProfilerStep#{number}"
        host = event(name, "user_annotation", since, until, 4242)
        found += [host, event(name, "gpu_user_annotation", start + 1, end, GATHER)]
        found.append(event(name, "gpu_user_annotation", start, end - 1, COMPUTE))
    return found


def trace(events, world: int | None = 64, device="NVIDIA H100 80GB HBM3") -> dict[str, Any]:
    found = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": device, "totalGlobalMem": 85029158912}],
        "cuda_runtime_version": 12080,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1759300074000000000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 0, "args": {"name": "python"}},
            event("aten::mm", "cpu_op", 0, 1, 4242),
            event("cudaLaunchKernel", "cuda_runtime", 0, 1, 4242),
            *events,
            {"ph": "f", "id": 7, "pid": 0, "tid": 7, "ts": 1.5, "cat": "ac2g", "name": "ac2g"},
        ],
        "traceName": "rank0.json",
    }
    if world is not None:
        found["distributedInfo"] = {
            "backend": "nccl", "rank": 0, "world_size": world, "pg_count": 2,
            "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world}],
        }  # fmt: skip
    return found


def write(path, values, packed=True):
    text = json.dumps(values, indent=2)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def planned(job, slower=None, links=1.0, overlap=True, waits_ms=0.0):
    """A step of the job as it is predicted, with data ranks only; slower: factors of its lines,
    links: of its messages' time; waits_ms: the host's, at the end."""
    times = {"products": 1.0, "attention": 1.0, "memory-bound": 1.0, "optimizer": 1.0}
    times |= slower or {}
    lines = {name: 1e3 * s for name, s in predicted_parts(predict_step(job)).items()}
    events, now = [], 0.0
    for name, kind in (("products", GEMM), ("attention", FLASH), ("memory-bound", POINTWISE)):
        events.append(kernel(kind, now, now + times[name] * lines[name]))
        now += times[name] * lines[name]
    window = lines["products"] + lines["attention"] + lines["memory-bound"]
    busy = 1e3 * message_seconds(job, SHIPPED)["data"]
    hidden = min(links * busy, now * (busy - lines["exposed data"]) / window) if overlap else 0.0
    sent = [s for s in collectives(job) if s.axis in ("dp_shard", "dp_replicate")]
    each = links * busy / sum(s.wire_bytes * s.calls for s in sent)
    at, exposed_from = 0.0, now
    for one in sent:
        name = {"all-gather": ALL_GATHER, "reduce-scatter": REDUCE_SCATTER}.get(
            one.kind, ALL_REDUCE
        )
        for _ in range(one.calls):
            lasts = each * one.wire_bytes
            at = exposed_from if at < exposed_from and at + lasts > hidden else at
            elements, size = one.num_bytes // 2, one.num_ranks
            events.append(message(name, at, at + lasts, GATHER, elements, "BFloat16", "fsdp", size))
            at += lasts
    now = max(now, at)
    events.append(kernel(ADAM, now, now + times["optimizer"] * lines["optimizer"]))
    now += times["optimizer"] * lines["optimizer"]
    until = now + lines["idle"] + waits_ms
    return trace([*events, *steps([(0, now)], [(0, until)])], job.layout.num_gpus)
