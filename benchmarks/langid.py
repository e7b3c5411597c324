"""Language identification: accuracy on the translations of the Universal Declaration of Human
Rights, and speed beside py3langid's own loop and datatrove.

    python -m benchmarks.langid [--corpus .cache/corpus] [--model lid.176.bin] [--no-speed]

The corpus comes from `stepwell corpus` (languages/udhr; for speed also books, text and code).
Without --model the fastText rows use a model of lid.176's shape that is trained on half of the
translations here: it says how fast such models run, not how good lid.176 is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.workload import CACHE, ROOT
from stepwell.data.langid import identify
from stepwell.data.langid_models import iso_code, load_model

LENGTHS = (50, 200, 1000)
WINDOWS = 8
THRESHOLDS = (0.0, 0.3, 0.5, 0.65, 0.7, 0.8, 0.9, 0.95)
# How py3langid names what the translations call otherwise.
# Translations into a script that the language is hardly written in today, or a far dialect.
UNUSUAL = frozenset(
    {"062", "063", "068", "auv", "azj_cyrl", "bos_cyrl", "ell_polytonic", "khk_mong", "san_gran"}
    | {"tgl_tglg", "tuk_cyrl", "uig_latn", "vie_han"}
)
SAME = {"no": "no", "nb": "no", "sh": "sr"}


def translations(corpus: Path, unusual: bool = True) -> list[tuple[str, str]]:
    """(language, text) of each translation, with the unusual ones or without."""
    folder = corpus / "languages" / "udhr"
    rows = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    rows = [r for r in rows if unusual or r["file"].removesuffix(".txt") not in UNUSUAL]
    return [
        (SAME.get(code := iso_code(row["iso639_3"]), code), (folder / row["file"]).read_text())
        for row in rows
    ]


def windows(text: str, num_characters: int, most: int = WINDOWS) -> list[str]:
    """Pieces of about so many characters, spread over the text, that begin at a word."""
    flat = " ".join(text.split())
    step = max(num_characters, len(flat) // most)
    starts = [flat.rfind(" ", 0, at + 1) + 1 for at in range(0, len(flat) - num_characters, step)]
    return [flat[at : at + num_characters] for at in starts][:most]


def accuracy(corpus: Path, model: str, unusual: bool) -> dict:
    """By length: right and all windows of each known language; confusions; scores."""
    known = load_model(model).languages
    data = translations(corpus, unusual)
    result: dict = {"model": model, "unusual": unusual, "lengths": {}}
    for length in LENGTHS:
        cases = [(code, w) for code, text in data for w in windows(text, length)]
        guesses = identify([w for _, w in cases], model, min_characters=1)
        per: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        confusions: Counter[tuple[str, str]] = Counter()
        scored = []
        for (code, _), guess in zip(cases, guesses, strict=True):
            said, score = guess or ("und", 0.0)
            scored.append((code in known, said == code, score))
            if code in known:
                per[code][0] += said == code
                per[code][1] += 1
                if said != code:
                    confusions[code, said] += 1
        result["lengths"][length] = {
            "languages": len(per),
            "windows": sum(n for _, n in per.values()),
            "micro": sum(r for r, _ in per.values()) / sum(n for _, n in per.values()),
            "macro": sum(r / n for r, n in per.values()) / len(per),
            "per_language": {c: r / n for c, (r, n) in sorted(per.items())},
            "confusions": [(a, b, n) for (a, b), n in confusions.most_common(25)],
            "thresholds": [threshold_row(scored, t) for t in THRESHOLDS],
        }
    return result


def threshold_row(scored: Sequence[tuple[bool, bool, float]], threshold: float) -> dict:
    """kept: of texts in languages that the model knows; right: of the kept ones; right_kept,
    wrong_kept: of those that it labels rightly and wrongly; strangers: of texts in other languages
    that get a label all the same."""
    known = [(right, s) for is_known, right, s in scored if is_known]
    strangers = [s for is_known, _, s in scored if not is_known]
    kept = [right for right, s in known if s >= threshold]
    return {
        "threshold": threshold,
        "kept": len(kept) / len(known),
        "right": sum(kept) / max(len(kept), 1),
        "right_kept": sum(kept) / sum(right for right, _ in known),
        "wrong_kept": kept.count(False) / max(sum(not right for right, _ in known), 1),
        "strangers": sum(s >= threshold for s in strangers) / max(len(strangers), 1),
    }


def prefix_effect(corpus: Path, model: str) -> list[dict]:
    """Accuracy and time by how many characters of a whole translation are read."""
    known = load_model(model).languages
    data = [(code, text) for code, text in translations(corpus, False) if code in known]
    rows = []
    for length in (100, 200, 500, 1000, 2000, 5000, 100_000):
        texts = [text[:length] for _, text in data]
        start = time.process_time()
        guesses = identify(texts, model)
        seconds = time.process_time() - start
        right = sum(
            g is not None and g.language == c for g, (c, _) in zip(guesses, data, strict=True)
        )
        rows.append({"characters": length, "right": right / len(data), "cpu_s": seconds})
    return rows


def speed_documents(corpus: Path, page_characters: int, most_bytes: int = 1_500_000) -> list[str]:
    """Translations (every fourth), chapters, pages and source files, cut into pages of so many
    characters."""
    texts = [text for _, text in translations(corpus)[::4]]
    for pattern in ("books/*/*.txt", "text/*/**/*.rst", "text/*/*.md", "code/**/*.py"):
        size = 0
        for path in sorted(corpus.glob(pattern)):
            text = path.read_text("utf-8", errors="replace")
            texts.append(text)
            size += len(text)
            if size > most_bytes:
                break
    starts = [(text, at) for text in texts for at in range(0, len(text), page_characters)]
    pages = [text[at : at + page_characters] for text, at in starts]
    return [page for page in pages if len(page) > 200]


def train_like_lid176(corpus: Path, path: Path) -> None:
    """A fastText model of lid.176's shape (16 dimensions, 2- to 4-grams, hierarchical softmax)."""
    import fasttext

    lines = [
        f"__label__{code} {line}"
        for code, text in translations(corpus)
        for line in text.splitlines()[::2]
        if line.strip()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    examples = path.with_suffix(".txt")
    examples.write_text("\n".join(lines) + "\n")
    model = fasttext.train_supervised(
        str(examples), dim=16, minn=2, maxn=4, loss="hs", lr=0.5, epoch=5, thread=1, verbose=0
    )
    model.save_model(str(path))


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def speed(corpus: Path, model: str, rounds: int, page_characters: int) -> dict:
    """CPU seconds, the least of interleaved rounds, and agreement of labels."""
    import fasttext
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    docs = speed_documents(corpus, page_characters)
    prefixes = [doc[:1000] for doc in docs]
    theirs = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    # fastText's C++ and nothing around it: what no caller of it can be faster than.
    bare = fasttext.load_model(model).f.predict
    lines = [doc.replace("\n", " ") + "\n" for doc in docs]
    python = CACHE / "envs" / "datatrove" / "bin" / "python"
    rows = CACHE / "scratch" / "langid.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text("".join(json.dumps({"text": doc}) + "\n" for doc in docs))
    times: dict[str, list[float]] = defaultdict(list)
    peer: dict = {}
    identify(prefixes[:10])
    identify(prefixes[:10], model)
    for _ in range(rounds):
        for name, work in {
            "py3langid, whole text": lambda: [theirs.classify(doc) for doc in docs],
            "py3langid, 1,000 characters": lambda: [theirs.classify(doc) for doc in prefixes],
            "Stepwell, whole text": lambda: identify(docs),
            "Stepwell, 1,000 characters": lambda: identify([doc[:1000] for doc in docs]),
            "Stepwell fastText, whole text": lambda: identify(docs, model),
            "fastText alone, whole text": lambda: [bare(line, 1, 0.0, "strict") for line in lines],
            "Stepwell fastText, 1,000 characters": lambda: identify(
                [d[:1000] for d in docs], model
            ),
        }.items():
            times[name].append(cpu_seconds(work))
        if python.exists():
            script = ROOT / "benchmarks" / "peers" / "datatrove_langid.py"
            peer = json.loads(subprocess.check_output([python, script, rows, model], text=True))
            times["datatrove fastText, whole text"].append(peer["cpu_s"])
    best = {name: min(t) for name, t in times.items()}
    return {
        "page_characters": page_characters,
        "documents": len(docs),
        "mb": sum(len(d.encode()) for d in docs) / 1e6,
        "cpu_s": best,
        "agreement": agreement(docs, model, [iso_code(c) for c in peer.get("labels", [])]),
    }


def agreement(docs: list[str], model: str, peer: list[str]) -> dict[str, float]:
    """The share of documents that get the same label."""
    prefixes = [doc[:1000] for doc in docs]
    whole, prefix = labels(docs, model), labels(prefixes, model)
    shares = {
        "py3langid, prefix and whole text": same(
            labels(docs, "py3langid"), labels(prefixes, "py3langid")
        ),
        "fastText, prefix and whole text": same(whole, prefix),
    }
    if peer:
        shares |= {"datatrove and whole text": same(whole, peer)}
    return shares


def labels(texts: list[str], model: str) -> list[str]:
    return [guess.language if guess else "" for guess in identify(texts, model, 1)]


def same(a: list[str], b: list[str]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def show_accuracy(result: dict) -> None:
    for length, row in result["lengths"].items():
        print(
            f"{length} characters: {row['macro']:.1%} macro, {row['micro']:.1%} of "
            f"{row['windows']} windows in {row['languages']} languages"
        )
        worst = sorted(row["per_language"].items(), key=lambda item: item[1])[:20]
        print("  weakest:", " ".join(f"{c} {r:.2f}" for c, r in worst))
        print("  taken for:", " ".join(f"{a}->{b} {n}" for a, b, n in row["confusions"][:15]))
        for t in row["thresholds"]:
            print(
                f"  score >= {t['threshold']:<4} keeps {t['kept']:.1%}, of which "
                f"{t['right']:.1%} right; labels {t['strangers']:.1%} of unknown languages"
            )


def show(result: dict) -> None:
    for key in ("usual", "all"):
        print(f"translations: {key}")
        show_accuracy(result["accuracy"][key])
    for row in result["prefix"]:
        print(f"first {row['characters']:>6} characters: {row['right']:.1%}, {row['cpu_s']:.2f} s")
    for each in result.get("speed", []):
        print(
            f"{each['documents']} documents of at most {each['page_characters']} characters, "
            f"{each['mb']:.1f} MB"
        )
        for name, seconds in each["cpu_s"].items():
            rate, size = each["documents"] / seconds, each["mb"] / seconds
            print(f"  {name:38s} {seconds:7.3f} s {rate:9.0f} doc/s {size:7.1f} MB/s")
        for name, share in each["agreement"].items():
            print(f"  same label, {name}: {share:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.langid", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=ROOT / ".cache" / "corpus")
    parser.add_argument("--model", help="a fastText model, e.g. lid.176.bin")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args()
    result = {
        "accuracy": {
            "usual": accuracy(args.corpus, "py3langid", False),
            "all": accuracy(args.corpus, "py3langid", True),
        },
        "prefix": prefix_effect(args.corpus, "py3langid"),
    }
    if not args.no_speed:
        model = args.model
        if model is None:
            path = CACHE / "scratch" / "langid-udhr.bin"
            if not path.exists():
                train_like_lid176(args.corpus, path)
            model = str(path)
        result["speed"] = [speed(args.corpus, model, args.rounds, size) for size in (4_000, 60_000)]
    show(result)
    out = ROOT / "benchmarks" / "results" / "langid.json"
    if args.no_speed and out.exists() and "speed" in (old := json.loads(out.read_text())):
        result["speed"] = old["speed"]
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
