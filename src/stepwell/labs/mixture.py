"""code : web : books, decided by proxy runs and checked in a larger model.

Three domains of which the natural mixture is mostly web; the target is the mean of their held-out
losses. A law fitted to small proxies on a design of mixtures proposes one, and a larger model is
trained on that, on the natural mixture and on the reversed one.

The small form takes its text from the standard library: code, the language reference as web, and
tables of character encodings as books.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stepwell.config import Run
from stepwell.data.corpora import fetch_corpus
from stepwell.data.sources.python_library import stdlib_code, stdlib_prose
from stepwell.data.store import build_store
from stepwell.mix.fit import fit
from stepwell.mix.propose import Proposal, propose
from stepwell.mix.sweep import Domain, Sweep, finished, proxy_run, sweep
from stepwell.models.flops import parameter_shapes
from stepwell.tokenizer import Tokenizer
from stepwell.types import DataError, Document

CLAIM = (
    "A law fitted to small proxy runs ranks mixtures it has not seen (rank correlation at least "
    "0.8), and what it says holds in a larger model trained on more tokens: with each of two "
    "seeds, the mixture that it proposes has a lower mean held-out loss than the natural one and "
    "the reversed one; and where it predicts a difference above its own error, the three come in "
    "that order."
)
DOMAINS = ("code", "web", "books")
MIN_SPEARMAN, NUM_SEEDS = 0.8, 2
CORPUS = Path(".cache/corpus")
# The same pages as text that web/ holds as HTML.
FOLDERS = {
    "code": ("code/stdlib",),
    "web": ("text/anarchism", "text/python-docs"),
    "books": ("books/austen", "books/kjv", "books/moby-dick"),
}
# Most of the text is web, as anywhere. Bytes of each domain that are tokenised.
FULL_BYTES = {"code": 2_000_000, "web": 8_000_000, "books": 1_000_000}
SMALL_BYTES = {"code": 150_000, "web": 600_000, "books": 75_000}
PIECE_CHARS = 8_000
HELDOUT_EVERY = 8


def measure(small: bool = False) -> dict[str, Any]:
    """`proxies`: mixtures and losses. `proposal`: what it rests on. `mixes[name]`: weights,
    predicted and (in the larger model, the mean of its seeds) measured losses, and the target of
    each seed. Losses are in nats a token."""
    size = SMALL if small else FULL
    with tempfile.TemporaryDirectory(prefix="stepwell-mixture-") as folder:
        recipe = _prepare(Path(folder), small, size)
        found = sweep(
            recipe,
            Path(folder) / "sweep",
            size["num_runs"],
            "maximin",
            num_natural=1,
            num_procs=size["num_procs"],
        )
        tokens = size["larger"]["train.steps"] * _tokens_per_step(size["larger"])
        proposal = _proposal(found, tokens, size["num_draws"])
        larger = _larger(recipe, size, found, proposal, Path(folder))
    return _numbers(found, proposal, larger, size)


def check(numbers: dict[str, Any]) -> list[str]:
    wrong, mixes = [], numbers["mixes"]
    if not numbers["proposal"]["spearman"] >= MIN_SPEARMAN:
        found = numbers["proposal"]["spearman"]
        wrong.append(f"mixtures not seen are ranked at {found:.2f} only")
    for name in ("natural", "reversed"):
        seeds = zip(mixes[name]["by_seed"], mixes["proposed"]["by_seed"], strict=True)
        gains = [other - chosen for other, chosen in seeds]
        if not min(gains) > 0:
            said = ", ".join(f"{gain:+.4f}" for gain in gains)
            wrong.append(f"over the {name} mixture the proposed one gains {said} nats (by seed)")
    for a, b in itertools.permutations(mixes, 2):
        expected = mixes[b]["predicted"]["target"] - mixes[a]["predicted"]["target"]
        found = mixes[b]["measured"]["target"] - mixes[a]["measured"]["target"]
        if expected > numbers["proposal"]["noise"] and not found > 0:
            wrong.append(f"{b} - {a}: predicted {expected:+.4f} nats, measured {found:+.4f}")
    return wrong


def plot(numbers: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    losses = np.array(numbers["proxies"]["target"])
    predicted = np.array(numbers["proxies"]["predicted"])
    left.scatter(predicted, losses)
    both = [min(predicted.min(), losses.min()), max(predicted.max(), losses.max())]
    left.plot(both, both, color="gray", linestyle=":")
    left.set_xlabel("predicted without the run (nats)")
    left.set_ylabel("measured (nats)")
    left.set_title(f"proxies: rank correlation {numbers['proposal']['spearman']:.3f}")
    mixes = numbers["mixes"]
    names = [*DOMAINS, "target"]
    for mix in ("proposed", "reversed"):
        gaps = [
            [mixes[mix][kind][n] - mixes["natural"][kind][n] for n in names]
            for kind in ("predicted", "measured")
        ]
        right.scatter(*gaps, label=f"{mix} - natural")
        for name, x, y in zip(names, *gaps, strict=True):
            right.annotate(name, (x, y), fontsize="small")
    right.axhline(0, color="gray", linewidth=0.5)
    right.axvline(0, color="gray", linewidth=0.5)
    right.set_xlabel("predicted from proxies (nats)")
    right.set_ylabel("measured in the larger model (nats)")
    right.set_title("held-out loss against the natural mixture")
    right.legend(fontsize="small")
    return figure


# --- the runs ------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "num_runs": 9,
    "num_procs": 1,
    "num_draws": 20,
    "vocab_size": 384,
    "proxy": {
        "model.num_layers": 1,
        "model.d_model": 48,
        "model.num_heads": 2,
        "model.num_kv_heads": 1,
        "model.head_dim": 24,
        "model.d_ff": 96,
        "data.seq_len": 64,
        "train.steps": 40,
        "train.global_batch_rows": 16,
        "optim.lr": 5e-3,
    },
    "larger": {
        "model.num_layers": 2,
        "model.d_model": 64,
        "model.num_heads": 2,
        "model.num_kv_heads": 2,
        "model.head_dim": 32,
        "model.d_ff": 192,
        "data.seq_len": 64,
        "train.steps": 60,
        "train.global_batch_rows": 24,
        "optim.lr": 5e-3,
    },
}
FULL: dict[str, Any] = {
    "num_runs": 17,
    "num_procs": 2,
    "num_draws": 200,
    "vocab_size": 512,
    "proxy": {
        "model.num_layers": 2,
        "model.d_model": 64,
        "model.num_heads": 2,
        "model.num_kv_heads": 2,
        "model.head_dim": 32,
        "model.d_ff": 192,
        "data.seq_len": 64,
        "model.init_std": 0.08,
        "train.steps": 300,
        "train.global_batch_rows": 16,
        "optim.lr": 1e-2,
    },
    "larger": {
        "model.num_layers": 3,
        "model.d_model": 128,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "model.head_dim": 32,
        "model.d_ff": 384,
        "data.seq_len": 64,
        "model.init_std": 0.06,
        "train.steps": 400,
        "train.global_batch_rows": 24,
        "optim.lr": 5e-3,
    },
}
EVAL_ROWS = {"small": 64, "full": 256}


def _prepare(folder: Path, small: bool, size: dict[str, Any]) -> Run:
    """Stores to train on and to hold out, and the recipe of a proxy."""
    pieces = {name: _pieces(name, small) for name in DOMAINS}
    train = {name: [p for i, p in enumerate(pieces[name]) if i % HELDOUT_EVERY] for name in DOMAINS}
    held = {name: pieces[name][::HELDOUT_EVERY] for name in DOMAINS}
    # As much of each, so that no domain is cut into longer tokens than another.
    fewest = min(len(train[name]) for name in DOMAINS)
    tokenizer = Tokenizer.train(
        (piece for name in DOMAINS for piece in train[name][:fewest]), size["vocab_size"]
    )
    for kind, texts in (("train", train), ("heldout", held)):
        for name in DOMAINS:
            documents = (Document(str(i), text, name) for i, text in enumerate(texts[name]))
            build_store(documents, tokenizer, folder / kind / name)
    return Run.parse(
        {},
        {
            **size["proxy"],
            "model.vocab_size": tokenizer.vocab_size,
            "train.micro_batch_rows": size["proxy"]["train.global_batch_rows"],
            "train.eval_rows": EVAL_ROWS["small" if small else "full"],
            "train.log_every": 50,
            "optim.schedule.kind": "linear",
            "optim.schedule.warmup_steps": size["proxy"]["train.steps"] // 10,
            "data.sources": [{"path": str(folder / "train" / name)} for name in DOMAINS],
            "data.heldout": [{"path": str(folder / "heldout" / name)} for name in DOMAINS],
        },
    )


def _pieces(name: str, small: bool) -> list[str]:
    """The domain's text in pieces, mixed, up to its number of bytes."""
    limit = (SMALL_BYTES if small else FULL_BYTES)[name]
    texts = _library_texts(name) if small else _corpus_texts(name)
    pieces = [t[i : i + PIECE_CHARS] for t in texts for i in range(0, len(t), PIECE_CHARS)]
    order = np.random.default_rng(0).permutation(len(pieces))
    kept, total = [], 0
    for place in order:
        if total < limit:
            kept.append(pieces[place])
            total += len(pieces[place].encode())
    return kept


def _corpus_texts(name: str) -> Iterator[str]:
    for done in fetch_corpus(CORPUS, FOLDERS[name]):
        if done.outcome == "skipped":
            raise DataError(f"the corpus lacks {done.item.name}: {done.detail}")
    for folder in FOLDERS[name]:
        for path in sorted((CORPUS / folder).rglob("*")):
            if path.suffix in (".txt", ".py", ".rst", ".md"):
                yield path.read_text("utf-8", errors="replace")


def _library_texts(name: str) -> Iterable[str]:
    if name == "web":
        items = itertools.takewhile(lambda item: item.id.startswith("topics/"), stdlib_prose())
    else:
        tables = name == "books"
        items = (i for i in stdlib_code() if i.id.startswith("encodings/cp") == tables)
    return (item.text for item in items if isinstance(item, Document))


def _proposal(found: Sweep, total_tokens: int, num_draws: int) -> Proposal:
    return propose(
        DOMAINS,
        [domain.tokens for domain in found.domains],
        found.mixtures,
        found.losses,
        dict.fromkeys(DOMAINS, 1.0),
        total_tokens,
        num_draws=num_draws,
    )


def _tokens_per_step(settings: dict[str, Any]) -> int:
    return settings["data.seq_len"] * settings["train.global_batch_rows"]


def _mixes(proposal: Proposal) -> dict[str, list[float]]:
    natural = [domain.natural for domain in proposal.domains]
    inverse = 1 / np.array(natural)
    return {
        "proposed": [domain.proposed for domain in proposal.domains],
        "natural": natural,
        "reversed": (inverse / inverse.sum()).tolist(),
    }


def _larger(
    recipe: Run, size: dict[str, Any], found: Sweep, proposal: Proposal, folder: Path
) -> dict[str, list[dict[str, float]]]:
    """Losses of the larger model on each mixture, by seed."""
    settings = dict(size["larger"])
    settings["train.micro_batch_rows"] = settings["train.global_batch_rows"]
    settings["optim.schedule.warmup_steps"] = settings["train.steps"] // 10
    base = Run.parse(recipe.model_dump(mode="json", exclude_none=True), settings)
    plan = [(name, seed) for name in _mixes(proposal) for seed in range(NUM_SEEDS)]
    jobs: list[tuple[Run, Sequence[Domain]]] = []
    for name, seed in plan:
        mixture = _mixes(proposal)[name]
        run = proxy_run(base, found.domains, mixture, seed, folder / "larger" / f"{name}-{seed}")
        jobs.append((run, found.targets))
    done = dict(finished(jobs, size["num_procs"]))
    losses: dict[str, list[dict[str, float]]] = {name: [] for name in _mixes(proposal)}
    for place, (name, _) in enumerate(plan):
        losses[name].append(done[place][0])
    return losses


def _numbers(
    found: Sweep,
    proposal: Proposal,
    larger: dict[str, list[dict[str, float]]],
    size: dict[str, Any],
) -> dict[str, Any]:
    law = fit("log-linear", found.mixtures, found.losses)
    rows = {}
    for name, mixture in _mixes(proposal).items():
        predicted = law.predict(np.array(mixture))[0].tolist()
        mean = {d: float(np.mean([losses[d] for losses in larger[name]])) for d in DOMAINS}
        rows[name] = {
            "weights": dict(zip(DOMAINS, mixture, strict=True)),
            "predicted": _with_target(dict(zip(DOMAINS, predicted, strict=True))),
            "measured": _with_target(mean),
            "by_seed": [_with_target(losses)["target"] for losses in larger[name]],
        }
    return {
        "store_tokens": {domain.name: domain.tokens for domain in found.domains},
        "proxy": _size_of(size["proxy"], size["vocab_size"]),
        "larger": _size_of(size["larger"], size["vocab_size"]),
        "proxies": {
            "mixtures": found.mixtures.tolist(),
            "losses": found.losses.tolist(),
            "target": found.losses.mean(1).tolist(),
            "predicted": list(proposal.predicted_runs),
        },
        "proposal": {
            "spearman": proposal.spearman,
            "noise": proposal.noise,
            "gain": [proposal.gain_low, proposal.gain, proposal.gain_high],
            "decision": proposal.decision,
            "why": proposal.why,
            "range": {d.name: [d.low, d.high] for d in proposal.domains},
        },
        "mixes": rows,
    }


def _size_of(settings: dict[str, Any], vocab_size: int) -> dict[str, int]:
    cfg = Run.parse({}, {**settings, "model.vocab_size": vocab_size}).model
    return {
        "parameters": sum(math.prod(shape) for shape in parameter_shapes(cfg).values()),
        "tokens": settings["train.steps"] * _tokens_per_step(settings),
    }


def _with_target(losses: dict[str, float]) -> dict[str, float]:
    return {**losses, "target": sum(losses.values()) / len(losses)}
