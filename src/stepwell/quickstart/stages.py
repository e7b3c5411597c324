"""The stages of a quickstart. Each takes the quickstart and returns what the report says of it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.config import Run
from stepwell.quickstart.state import (
    CODE,
    PROSE,
    SEED,
    Quickstart,
    documents,
    heldout,
    heldout_texts,
    init_of,
    load_engine,
    load_prompts,
    recipe_path,
    write_problems,
)
from stepwell.types import CheckpointError

if TYPE_CHECKING:
    from stepwell.eval.grade import Prompt
    from stepwell.eval.tasks import Matches
    from stepwell.tokenizer import Tokenizer
    from stepwell.train.engine import Engine

Stage = Callable[[Quickstart], dict[str, Any]]
NUM_SHOWN = 6


def stages_of(model: str) -> dict[str, Stage]:
    before: dict[str, Stage] = {"curate": curate, "tokenizer": tokenizer, "pretrain": pretrain}
    if model == "smollm2":
        before = {"tokenizer": smollm2_tokenizer}
    return {
        **before,
        "sft": sft,
        "grpo": grpo,
        "evaluate": evaluate,
        "export": export,
        "report": report,
    }


def curate(state: Quickstart) -> dict[str, Any]:
    """The standard library's code and prose; every drop is counted with its reason."""
    from stepwell.curate.executors.local import LocalExecutor
    from stepwell.curate.plan import make_plan
    from stepwell.curate.recipe import Recipe
    from stepwell.curate.run import curate as run_curation
    from stepwell.curate.run import read_curation

    folder = state.root / "curated"
    plan = make_plan(Recipe.load(recipe_path("quickstart-curate")))
    for _ in run_curation(plan, folder, LocalExecutor(1)):
        pass
    counts = read_curation(folder)
    dropped: Counter[str] = Counter()
    for step in counts["tally"]["steps"].values():
        dropped.update(step["dropped"])
    kept = {name: docs for name, (docs, _) in counts["kept"].items()}
    num_read, num_kept = sum(counts["tally"]["read"].values()), sum(kept.values())
    size = sum(size for _, size in counts["kept"].values())
    return {
        "documents_in": num_read,
        "dropped": dict(dropped),
        "documents_kept": num_kept,
        "kept_by_source": kept,
        "bytes": size,
        "summary": f"{num_read:,} documents in, {num_kept:,} kept, {size / 1e6:.1f} MB",
    }


def tokenizer(state: Quickstart) -> dict[str, Any]:
    """A byte-level BPE of the training documents, and the token stores that it makes."""
    from stepwell.data.store import TokenStore, build_store
    from stepwell.tokenizer import Tokenizer

    vocab_size = state.run_of("pretrain").model.vocab_size
    if not (state.root / "tokenizer" / "tokenizer.json").exists():
        texts = (doc.text for doc in documents(state) if not heldout(doc))
        Tokenizer.train(texts, vocab_size).save(state.root / "tokenizer")
    tok = state.tokenizer()
    stores = {
        "code": lambda doc: doc.source == CODE and not heldout(doc),
        "prose": lambda doc: doc.source == PROSE and not heldout(doc),
        "heldout": heldout,
    }
    tokens = {}
    for name, belongs in stores.items():
        folder = state.root / "stores" / name
        if not folder.exists():
            build_store(filter(belongs, documents(state)), tok, folder)
        tokens[name] = TokenStore.open(folder, tok).num_tokens
    return {
        "vocab_size": tok.vocab_size,
        "tokens": tokens,
        "summary": f"{tok.vocab_size:,} ids, {sum(tokens.values()):,} tokens",
    }


def smollm2_tokenizer(state: Quickstart) -> dict[str, Any]:
    from stepwell.models.gguf import export_gguf_tokenizer, find_smollm2

    export_gguf_tokenizer(find_smollm2(), state.root / "tokenizer", overwrite=True)
    return {"vocab_size": state.tokenizer().vocab_size, "summary": "SmolLM2's own"}


def pretrain(state: Quickstart) -> dict[str, Any]:
    """WSD: the stable phase on code and prose, the decay on the best data, mostly prose."""
    from stepwell.train.pretrain import pretrain as train

    run = pretrain_run(state)
    train(run)
    return {**training_result(run), **memory_result(run)}


def pretrain_run(state: Quickstart) -> Run:
    stores = state.root / "stores"
    mixture = lambda code, prose: [
        {"path": str(stores / "code"), "weight": code},
        {"path": str(stores / "prose"), "weight": prose},
    ]
    return state.run_of(
        "pretrain",
        **{
            "data.sources": mixture(0.7, 0.3),
            "data.stages": [{"phase": "decay", "sources": mixture(0.3, 0.7)}],
            "data.heldout": [{"path": str(stores / "heldout")}],
            "data.tokenizer": str(state.root / "tokenizer"),
        },
    )


def sft(state: Quickstart) -> dict[str, Any]:
    """Chains of sums. As in found data, only every second answer shows its steps; that steps pay
    is for the reinforcement stage to find out."""
    from stepwell.posttrain.sft import sft as train
    from stepwell.train.weights import resolve

    overlap = write_problems(state)
    run = resolve(
        state.run_of(
            "sft",
            **{
                "model.init": init_of(state, "pretrain"),
                "data.path": str(state.root / "problems" / "train.jsonl"),
                "data.tokenizer": str(state.root / "tokenizer"),
            },
        )
    )
    train(run, state.tokenizer())
    return {**training_result(run), "overlap_with_heldout": overlap}


def grpo(state: Quickstart) -> dict[str, Any]:
    """The exact answer as reward, on problems that SFT has not seen."""
    from stepwell.posttrain.grpo import grpo as train
    from stepwell.train.weights import resolve

    run = resolve(
        state.run_of(
            "grpo",
            **{
                "model.init": init_of(state, "sft"),
                "data.path": str(state.root / "problems" / "prompts.jsonl"),
                "data.tokenizer": str(state.root / "tokenizer"),
            },
        )
    )
    prompts = load_prompts(state, "prompts")
    train(run, prompts, state.tokenizer())
    return training_result(run)


def evaluate(state: Quickstart) -> dict[str, Any]:
    """Held-out accuracy by greedy decoding and by sampling, and bits per byte, for each stage."""
    from stepwell.eval.score import bootstrap_interval
    from stepwell.eval.tasks import bits_per_byte

    prompts, tok = load_prompts(state, "heldout"), state.tokenizer()
    names = ["pretrain", "sft", "grpo"] if state.base == "scratch" else ["base", "sft", "grpo"]
    result: dict[str, Any] = {"num_problems": len(prompts), "stages": {}, "samples": []}
    correct: dict[str, list[float]] = {}
    answers: dict[str, Matches] = {}
    texts = heldout_texts(state)
    for name in names:
        engine = load_engine(state, name)
        answers[name] = answer(engine, prompts, tok, 0.0)
        sampled = answer(engine, prompts, tok, 1.0)
        correct[name] = [v.reward or 0.0 for v in answers[name].verdicts]
        result["stages"][name] = {
            "accuracy": answers[name].accuracy,
            "interval": answers[name].interval,
            "accuracy_sampled": sampled.accuracy,
            "interval_sampled": sampled.interval,
            **(
                {"bits_per_byte": bits_per_byte(engine, texts, tok).value}
                if state.base == "scratch"
                else {}
            ),
        }
    gain = bootstrap_interval(correct["grpo"], SEED, other=correct["sft"])
    before, after = (result["stages"][name]["accuracy"] for name in ("sft", "grpo"))
    result["gain"] = {"points": 100 * (after - before), "interval": [100 * x for x in gain]}
    for i, prompt in enumerate(prompts[:NUM_SHOWN]):
        result["samples"].append(
            {
                "prompt": prompt.text,
                "expected": str(prompt.columns["answer"]),
                "answers": [
                    {
                        "stage": name,
                        "text": answers[name].completions[i].text,
                        "correct": bool(correct[name][i]),
                    }
                    for name in names
                ],
            }
        )
    result["summary"] = (
        f"held-out accuracy {100 * before:.1f} % after sft, {100 * after:.1f} % after grpo "
        f"({result['gain']['points']:+.1f} points, 95 % interval {100 * gain[0]:+.1f} to "
        f"{100 * gain[1]:+.1f})"
    )
    return result


def export(state: Quickstart) -> dict[str, Any]:
    """A Hugging Face folder; if Transformers is here, its logits are compared with ours."""
    import torch

    from stepwell.models.hf import save_hf

    engine, tok = load_engine(state, "grpo"), state.tokenizer()
    folder = state.root / "model"
    save_hf(
        folder,
        engine.run.model,
        engine.iter_state(),
        torch.float32,
        tokenizer=state.root / "tokenizer",
        eos_ids=tok.stop_ids,
        bos_id=tok.bos_id,
        pad_id=tok.pad_id,
        overwrite=True,
    )
    difference = compare_with_transformers(folder, engine, load_prompts(state, "heldout")[0].ids)
    told = "Transformers is not installed" if difference is None else f"{difference:.1e}"
    return {
        "folder": str(folder),
        "largest_logit_difference": difference,
        "summary": f"{folder}; largest difference from Transformers' logits: {told}",
    }


def compare_with_transformers(folder: Path, engine: Engine, ids: tuple[int, ...]) -> float | None:
    """The largest difference of float32 logits on one prompt; None without Transformers."""
    import importlib.util

    import torch

    from stepwell.models.transformer import ForwardOptions

    if importlib.util.find_spec("transformers") is None:
        return None
    transformers = importlib.import_module("transformers")
    transformers.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens_BT = torch.tensor([ids])
    with torch.no_grad():
        wanted_BTV = theirs(tokens_BT).logits
        got_BTV = engine.decoder(
            tokens_BT.to(engine.mesh.device),
            torch.arange(len(ids), device=engine.mesh.device)[None],
            torch.tensor([0, len(ids)], dtype=torch.int32, device=engine.mesh.device),
            options=ForwardOptions(needs=frozenset({"logits"})),
        ).logits_BTV
    difference = (wanted_BTV - got_BTV.cpu()).abs().max().item()
    if difference > 1e-3:
        raise CheckpointError(f"the export's logits differ from the model's by {difference}")
    return difference


def report(state: Quickstart) -> dict[str, Any]:
    from stepwell.diagnose.report import write_report
    from stepwell.quickstart.report import report_data

    path = write_report(report_data(state.root, stages_of(state.base)), state.root / "report.html")
    return {"path": str(path), "summary": str(path)}


def answer(
    engine: Engine, prompts: Sequence[Prompt], tok: Tokenizer, temperature: float
) -> Matches:
    from stepwell.eval.tasks import generate_and_match
    from stepwell.generate import Sampling
    from stepwell.posttrain.verifiers.exact import exact

    sampling = Sampling(temperature=temperature, eos_ids=tok.stop_ids, max_new_tokens=96)
    return generate_and_match(engine, prompts, tok, sampling, exact, seed=SEED)


def training_result(run: Run) -> dict[str, Any]:
    """What the report says of a training stage, from its own log."""
    from stepwell.metrics import read_metrics, series

    rows = read_metrics(run.dir)
    tokens = sum(series(rows, "train/tokens")[1])
    last = rows[-1]
    rate = statistics.median(series(rows, "speed/tokens_per_s")[1])
    key, name = "train/loss", "loss"
    if "reward/mean" in last:
        key, name = "reward/mean", "reward"
    return {
        "steps": last["step"],
        "tokens": int(tokens),
        "last": {key: last[key]},
        "summary": f"{last['step']} steps, {tokens:,.0f} tokens, {rate:,.0f} tokens/s in the "
        f"median step, {name} {last[key]:.3f} in the last",
    }


def memory_result(run: Run) -> dict[str, Any]:
    """Predicted against measured memory: one training step of a fresh engine, counted."""
    from stepwell.data.loader import pretrain_stream
    from stepwell.data.store import TokenStore
    from stepwell.hardware import device_kind, live_tensor_bytes, measure_peak_allocated
    from stepwell.plan.memory.ledger import predict_memory
    from stepwell.train.engine import Engine
    from stepwell.train.losses import cross_entropy

    engine, loss = Engine(run), cross_entropy(run.loss)
    source = [(TokenStore.open(run.data.sources[0].path), 1.0)]
    stream = pretrain_stream(source, run.data.seq_len, run.train.global_batch_rows)

    def step() -> None:
        engine.forward_backward(next(stream)[0], loss)
        engine.optim_step()

    step()
    parameters = list(engine.decoder.parameters())
    resting = live_tensor_bytes([*parameters, *engine.optimizer.state_dict().values()])
    above = measure_peak_allocated(step)
    ledger = predict_memory(run, device=device_kind())
    return {
        "memory": {
            "weights and optimiser": [ledger.resting_bytes, resting],
            "peak of a step": [ledger.peak_bytes, resting + above],
            "items": {k: v for k, v in asdict(ledger.items).items() if v},
        }
    }
