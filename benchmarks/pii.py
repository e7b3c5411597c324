"""Personal data: precision and recall on planted and on real text, and speed.

    python -m benchmarks.pii [--corpus .cache/corpus] [--show KIND]

Planted: values that are drawn anew (check digits and numbering plans included) in words around
them, in pages that hold nothing of their own. Sentences: those of benchmarks/pii_sentences.txt,
written before the rules that are in force and not changed since. Found in real text: counts, and
with --show a sample of each corpus to judge by eye, which is how the precision in docs/safety.md
was got.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.workload import ROOT
from stepwell.data.safety.pii import KINDS, find_pii
from stepwell.data.safety.validators import CARD_ISSUERS, IBAN_LENGTHS

# {{kind value}}
MARK = re.compile(r"\{\{(\w+) ([^}]*)\}\}")
AROUND = {
    "email": ["mail {}", "<{}>", "contact {} for more", "From: {}\n", "({})", "{}, {}"],
    "phone": ["call {}", "Tel: {}", "{}", "({}) or", "fax {}.", "phone number is {}"],
    "ipv4": ["from {}", "[{}]", "{} - - [10/Oct/2000]", "http://{}/x", "host {}:8080"],
    "ipv6": ["from {}", "[{}]:443", "{} port 22", "inet6 {}/64"],
    "card": ["card {}", "paid with {}.", "{} exp 12/27", "number: {},"],
    "iban": ["IBAN {}", "transfer to {}.", "({})", "account {} BIC"],
    "national_id": ["{}", "({})", "born 1980, {}."],
}


def text_of(corpus: Path, name: str) -> list[str]:
    if name == "mail":
        rows = (corpus / "mail/spam-assassin/spam-assassin.jsonl").read_text().splitlines()
        return [json.loads(row)["text"] for row in rows]
    pattern = {"books": "books/*/*.txt", "code": "code/**/*.py", "pages": "text/*/**/*.rst"}[name]
    return [p.read_text("utf-8", errors="replace") for p in sorted(corpus.glob(pattern))]


def draw(kind: str, rng: random.Random) -> str:
    match kind:
        case "email":
            names = ["jo", "maria.lopez", "k_brandt", "li-wei", "x.y+z", "info"]
            hosts = [
                "acme.com",
                "mail.uni-bonn.de",
                "corp.co.uk",
                "abc.org",
                "qq.com",
                "xn--p1ai.ru",
            ]
            return f"{rng.choice(names)}{rng.randrange(1000)}@{rng.choice(hosts)}"
        case "phone":
            return phone(rng)
        case "ipv4":
            while True:
                address = ipaddress.IPv4Address(rng.getrandbits(32))
                if address.is_global and not address.is_multicast:
                    return str(address)
        case "ipv6":
            return str(
                ipaddress.IPv6Address((0x2600 + rng.randrange(0x400) << 112) + rng.getrandbits(64))
            )
        case "card":
            return card(rng)
        case "iban":
            return iban(rng)
    return national_id(rng)


def phone(rng: random.Random) -> str:
    """A country's example number, in national or international style or with dashes."""
    import phonenumbers

    region = rng.choice(["US", "GB", "DE", "FR", "ES", "IT", "PL"])
    # The example for the United States is one of those kept for fiction.
    american = f"+1202456{rng.randrange(1000, 9999)}"
    number = phonenumbers.parse(american) if region == "US" else phonenumbers.example_number(region)
    formats = phonenumbers.PhoneNumberFormat
    style = rng.choice([formats.INTERNATIONAL, formats.E164])
    if region in ("US", "GB", "DE", "FR"):
        style = rng.choice([style, formats.NATIONAL])
    assert number is not None
    return phonenumbers.format_number(number, style)


def card(rng: random.Random) -> str:
    from stdnum import luhn

    low, high, lengths = rng.choice(CARD_ISSUERS[:9])
    length = 15 if 15 in lengths else 16
    if length not in lengths:
        return card(rng)
    stem = str(rng.randint(low, high))
    stem += "".join(rng.choice("0123456789") for _ in range(length - 1 - len(stem)))
    digits = stem + luhn.calc_check_digit(stem)
    if length == 15:
        return rng.choice([digits, f"{digits[:4]} {digits[4:10]} {digits[10:]}"])
    groups = [digits[i : i + 4] for i in range(0, 16, 4)]
    return rng.choice([digits, " ".join(groups), "-".join(groups)])


def iban(rng: random.Random) -> str:
    """Of countries whose accounts are all digits."""
    from stdnum import iban as rules

    country = rng.choice(["DE", "AT", "BE", "ES", "PL", "PT", "SE", "DK", "FI", "CZ", "HU"])
    body = "".join(rng.choice("0123456789") for _ in range(IBAN_LENGTHS[country] - 4))
    digits = country + rules.calc_check_digits(f"{country}00{body}") + body
    return rng.choice([digits, rules.format(digits)])


def national_id(rng: random.Random) -> str:
    from stdnum.es import dni
    from stdnum.fr import nir
    from stdnum.it import codicefiscale
    from stdnum.pl import pesel

    day = f"{rng.randrange(40, 99)}{rng.randrange(1, 13):02}{rng.randrange(1, 29):02}"
    match rng.randrange(6):
        case 0:
            middle, last = rng.randrange(1, 99), rng.randrange(1, 9999)
            return f"{rng.randrange(1, 600):03}-{middle:02}-{last:04}"
        case 1:
            return f"AB {rng.randrange(99):02} {rng.randrange(99):02} {rng.randrange(99):02} C"
        case 2:
            place, number = rng.randrange(10_001, 95_999), rng.randrange(1, 999)
            stem = f"2{day[:4]}{place}{number:03}"
            return stem + nir.calc_check_digits(stem)
        case 3:
            stem = f"RSSMRA{day[:2]}{rng.choice('ABCDEHLMPRST')}{day[4:]}H501"
            return stem + codicefiscale.calc_check_digit(stem)
        case 4:
            stem = f"{day}{rng.randrange(9999):04}"
            return f"PESEL {stem}{pesel.calc_check_digit(stem)}"
    stem = f"{rng.randrange(10**8):08}"
    return f"DNI {stem}{dni.calc_check_digit(stem)}"


def planted(pages: list[str], per_kind: int, rng: random.Random) -> Iterator[dict]:
    """A row a kind: how many planted values were found whole, and what else was found."""
    clean = [page for page in pages if not find_pii(page) and 2_000 < len(page) < 20_000]
    for kind in KINDS:
        found = extra = 0
        missed: Counter[str] = Counter()
        for _ in range(per_kind):
            page = rng.choice(clean)
            value = draw(kind, rng)
            frame = rng.choice(AROUND[kind]).replace("{}", value, 1).replace("{}", "etc")
            at = page.index(" ", rng.randrange(len(page) - 1_000))
            text = f"{page[:at]} {frame}{page[at:]}"
            data = value.removeprefix("PESEL ").removeprefix("DNI ")
            start = text.index(value) + len(value) - len(data)
            hits = [h for h in find_pii(text) if h.start == start and h.stop == start + len(data)]
            right = any(h.kind == kind for h in hits)
            found += right
            extra += len(find_pii(text)) - right
            if not right:
                missed[frame] += 1
        yield {
            "kind": kind,
            "planted": per_kind,
            "recall": found / per_kind,
            "precision": found / max(found + extra, 1),
            "missed": missed.most_common(3),
        }


def sentences() -> dict:
    """What is marked in the sentences against what is found: exact places and kinds."""
    path = ROOT / "benchmarks" / "pii_sentences.txt"
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    right = num_marked = num_found = 0
    faults = []
    for line in lines:
        text, marked, end = "", set(), 0
        for mark in MARK.finditer(line):
            text += line[end : mark.start()]
            marked.add((mark[1], len(text), len(text) + len(mark[2])))
            text += mark[2]
            end = mark.end()
        text += line[end:]
        found = {(str(f.kind), f.start, f.stop) for f in find_pii(text)}
        right += len(marked & found)
        num_marked += len(marked)
        num_found += len(found)
        if marked != found:
            missed = [text[a:b] for _, a, b in sorted(marked - found)]
            extra = [text[a:b] for _, a, b in sorted(found - marked)]
            faults.append({"text": text, "missed": missed, "extra": extra})
    return {
        "sentences": len(lines),
        "marked": num_marked,
        "recall": right / num_marked,
        "precision": right / num_found,
        "faults": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pii", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=ROOT / ".cache" / "corpus")
    parser.add_argument("--show", choices=KINDS, help="a sample of what was found")
    parser.add_argument("--sample", type=int, default=50)
    parser.add_argument("--per-kind", type=int, default=300)
    args = parser.parse_args()
    result: dict = {"real": {}}
    for name in ("books", "code", "pages", "mail"):
        texts = text_of(args.corpus, name)
        size_mb = sum(len(text.encode()) for text in texts) / 1e6
        start = time.process_time()
        found = [find_pii(text) for text in texts]
        seconds = time.process_time() - start
        counts = Counter(f.kind for each in found for f in each)
        result["real"][name] = {"mb": size_mb, "mb_per_cpu_s": size_mb / seconds, "found": counts}
        print(f"{name}: {size_mb:.1f} MB, {size_mb / seconds:.0f} MB/CPU-s, {dict(counts)}")
        if args.show:
            hits = [(t, f) for t, fs in zip(texts, found, strict=True) for f in fs]
            hits = [(t, f) for t, f in hits if f.kind == args.show]
            for text, f in random.Random(0).sample(hits, min(args.sample, len(hits))):
                around = (text[max(0, f.start - 30) : f.start], text[f.start : f.stop])
                print("   ", repr(f"{around[0]}[[{around[1]}]]{text[f.stop : f.stop + 20]}"))
    rows = list(planted(text_of(args.corpus, "pages"), args.per_kind, random.Random(0)))
    for row in rows:
        print(
            f"planted {row['kind']:12s} recall {row['recall']:.3f} precision {row['precision']:.3f}"
            f" missed {row['missed']}"
        )
    result["planted"] = rows
    result["sentences"] = sentences()
    print("sentences", json.dumps(result["sentences"], indent=1, ensure_ascii=False))
    out = ROOT / "benchmarks" / "results" / "pii.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
