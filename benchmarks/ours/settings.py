"""The benchmark's model and optimiser as a Stepwell run."""

from __future__ import annotations

from benchmarks import workload as w
from stepwell.config import Run


def build_run(compiled: bool, rows: int, dtype: str = "bf16") -> Run:
    """bf16 compute on float32 master weights (the peers: bf16 autocast on float32 weights)."""
    return Run.parse(
        {
            "dir": str(w.SCRATCH / "run"),
            "model": {
                "family": "qwen3",
                "vocab_size": w.VOCAB,
                "num_layers": w.LAYERS,
                "d_model": w.D_MODEL,
                "num_heads": w.HEADS,
                "num_kv_heads": w.KV_HEADS,
                "head_dim": w.HEAD_DIM,
                "d_ff": w.D_FF,
                "qk_norm": True,
                "tied": False,
                "max_seq_len": 2048,
            },
            "layout": {"compile": compiled},
            "precision": {"compute": dtype},
            "data": {"seq_len": w.SEQ_LEN},
            "optim": {
                "lr": w.LR,
                "beta1": w.BETA1,
                "beta2": w.BETA2,
                "eps": w.EPS,
                "weight_decay": w.WEIGHT_DECAY,
                "clip_norm": w.CLIP_NORM,
                "schedule": {"kind": "constant"},
            },
            "train": {"global_batch_rows": rows, "micro_batch_rows": rows},
        }
    )
