from __future__ import annotations

import random
from collections import Counter
from itertools import islice, pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stepwell.data.batches import EDITS, to_batch
from stepwell.data.safety.pii import KINDS, REPLACEMENTS, Finding, Pii, find_pii, redact
from stepwell.data.sources.python_library import stdlib_code, stdlib_prose
from stepwell.types import Document

# What must be found, in words around it: (kind, before, the data, after).
PLANTED = [
    ("email", "write to ", "jo.smith+news@acme-corp.co.uk", ", please"),
    ("email", "<mailto:", "o'neil@uni-köln.de", ">."),
    ("email", "请联系", "wang88@qq.com", "谢谢"),
    ("email", "From: J. <", "J_Doe%x@mail.cs.example-university.edu", ">"),
    ("ipv4", "connection from ", "66.187.233.12", " refused"),
    ("ipv4", "http://", "81.9.8.41", "/index.html"),
    ("ipv4", "ping ", "8.8.8.8", ""),
    ("ipv4", "range 66.1.2.3-", "66.1.2.9", "."),
    ("ipv4", "net ", "66.187.233.0", "/24"),
    ("ipv4", "Server at ", "8.8.8.8", " answered"),
    ("ipv4", "nameserver ", "9.9.9.9", ""),
    ("ipv4", "", "5.6.7.8", " timed out"),
    ("ipv4", "", "5.6.7.8", ":8080 is taken"),
    ("ipv4", "Berlin ", "5.6.7.8", " - - [10/Oct/2000]"),
    ("ipv4", "Pinged ", "5.6.7.8", ""),
    ("ipv4", "Berlin ", "81.9.8.41", ""),
    ("ipv4", "Blocked ", "5.188.10.7", ""),
    ("email", "log in as ", "jo@acme.com@mail.acme.org", " there"),
    ("email", "follow @", "jo@mastodon.social", ""),
    ("ipv6", "from ", "2a00:1450:4001:82a::200e", "."),
    ("ipv6", "[", "2607:f8b0:4005:805:0:0:0:200e", "]:443"),
    ("ipv6", "via ", "::ffff:216.163.77.13", ")"),
    ("card", "paid with ", "4111 1111 1111 1111", ", thanks"),
    ("card", "paid with ", "5500-0000-0000-0004", " today"),
    ("card", "amex ", "3782 822463 10005", ""),
    ("card", "no. ", "6011000990139424", ";"),
    ("card", "Visa card no ", "4222222222222", ""),
    ("iban", "IBAN ", "DE89370400440532013000", "."),
    ("iban", "to ", "GB82 WEST 1234 5698 7654 32", " BANK OF"),
    ("iban", "REF AB12 ", "NL91ABNA0417164300", ""),
    ("iban", "MT: ", "MT84MALT011000012345MTLCAST001S", ""),
    ("national_id", "SSN ", "536-90-4399", ""),
    ("national_id", "social security number: ", "536904399", ""),
    ("national_id", "insured as ", "AB 12 34 56 C", "."),
    ("national_id", "NINO: ", "AB123456C", ""),
    ("national_id", "NHS number ", "943 476 5870", ""),
    ("national_id", "Steuer-ID: ", "36 574 261 809", ""),
    ("national_id", "née, ", "2 95 10 99 126 111 93", ""),
    ("national_id", "NIE ", "X-2482300W", ","),
    ("national_id", "DNI: ", "54362315-K", ""),
    ("national_id", "C.F. ", "RCCMNL83S18D969H", ""),
    ("national_id", "PESEL: ", "44051401359", ""),
    ("phone", "call ", "(202) 456-1414", " now"),
    ("phone", "DC 20500 ", "202-456-1414", ""),
    ("phone", "(", "202-456-1414", ")"),
    ("phone", "or ", "1-800-692-7753", "!"),
    ("phone", "Mobile: ", "+46 70 262 22 05", " Fax"),
    ("phone", "tel:", "+493012345678", ""),
    ("phone", "London ", "020 7946 0018", "."),
    ("phone", "Berlin ", "030/901820123", ""),
    ("phone", "Paris ", "01 42 68 53 00", ""),
    ("phone", "phone ", "2024561414", " x12"),
    ("phone", "dial ", "0049 30 901820", ""),
    ("phone", "call ", "800-215-4490", " (24 hours)"),
]  # fmt: skip
# What looks like personal data and is none.
HARMLESS = [
    "root@localhost and user@host", "@decorator", "@a.b.com", "a@b.transpose()", "icon@2x.png",
    "git@github.com:owner/name.git", "lodash@4.17.21", "jo@example.com, jo@mail.example.org",
    "jo@acme.test", "x@y", "a @ b.com", "user@-x.com", "foo@bar.baz_qux", "@" * 50,
    "version 1.22.3.44", "v1.22.3.44", "foo-1.22.3.44.tar.gz", "Firefox/20.0.11.7", "1.2.3.4",
    "\n2.10.13.4 Titles of sections", "section 12.10.13.4", "OID 1.3.6.1.4.1.311", "256.1.1.300",
    "127.0.0.1", "0.0.0.0", "255.255.255.255", "192.0.2.7 198.51.100.7 203.0.113.7", "224.0.0.1",
    "192.168.1.1 10.1.2.3 172.16.5.5", "01.02.03.04",
    "Python 3.11.2.1 was released", "Java 8.0.202.8", "SQL Server 12.0.2.0", "foo==2.31.0.6",
    "8.8.8.8", "list_ips.t 5.6.7.8", "upgrade from 7.2.1.4 to 7.2.1.9",
    "the server was updated to 7.2.1.4",
    "jo@acme@acme.com", "x@acme.com@", "jo@acme.com@localhost",
    "SSN: 078-05-1120", "078-05-1120", "passport no 020 7946 0018", "account 202-456-1414",
    "12:34:56", "std::vector<int>", "a::b", "face::b00c dead::beef", "::", "::1", "fe80::1",
    "2001:db8::5", "00:1A:2B:3C:4D:5E", "in 2004::", "x[::2]", "fd00::1234",
    "7A:" * 20 + "11",
    "4111 1111 1111 1112", "1234567812345670", "4000 1999 2000 2001 2002", "0.4111111111111111",
    "deadbeef4111111111111111", "1700000000000", "1700000000000000", "4222222222222", "0" * 16,
    "DE88370400440532013000", "XX89370400440532013000", "DE8937040044053201300",
    "000-12-3456", "666-12-3456", "536904399", "44051401359", "AB123456C", "GB 12 34 56 A",
    "36 574 261 809", "2 95 10 99 126 111 94", "X-2482300A", "RCCMNL83S18D969A", "12345678L",
    "2024-01-15 10:30", "01/02/2024", "01.02.2024 - 05.06.2024", "2024-01-15T10:30:00.123456Z",
    "ISBN 0-306-40615-7", "ISBN 978-0-306-40615-7", "ISSN 0378-5955", "$1,234,567,890.12",
    "1234567890", "3.14159265358979", "0.9999999", "+35236450.6", "0 1 1 2 3 5 8 13 21",
    "550e8400-e29b-41d4-a716-446655440000", "3f786850e387550fdab836ed7e6dc881de23001b",
    "202-555-0143", "0x0123456789", "100 000 000 000", "0123456789", "range(0, 1000000)",
    "10.1000/182 doi:10.1000/0306406157", "RFC 0020 7946 0018", "096400-0371", "555-1234",
    "1, 2, 3, 4, 5, 6, 7, 8", "  0.291  0.291  tied", "(8.11.2/8.11.2)", "20 7946 0018 33",
]  # fmt: skip


def batch_of(*texts: str) -> pa.RecordBatch:
    return to_batch([Document(str(i), t, "web") for i, t in enumerate(texts)], 0)


def found(text: str, **knobs) -> list[tuple[str, str]]:
    return [(f.kind, text[f.start : f.stop]) for f in find_pii(text, **knobs)]


@pytest.mark.parametrize(("kind", "before", "data", "after"), PLANTED)
def test_planted_data_is_found_exactly(kind, before, data, after):
    if "range" in before:
        assert (kind, data) in found(before + data + after)
    else:
        assert found(before + data + after) == [(kind, data)]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_it_stays(text):
    assert found(text) == []


def test_precision_and_recall_in_real_prose():
    """Planted at word borders of Python's language reference, which holds no such data itself but
    for addresses of authors; the figures in docs/safety.md are of more text."""
    rng = random.Random(0)
    topics = islice(stdlib_prose(), 80)
    prose = [d.text for d in topics if isinstance(d, Document) and "@" not in d.text]
    truth: Counter[str] = Counter()
    right: Counter[str] = Counter()
    said: Counter[str] = Counter()
    for text in prose:
        words = text.split(" ")
        kind, before, data, after = rng.choice(PLANTED)
        at = rng.randrange(len(words))
        mixed = " ".join([*words[:at], before + data + after, *words[at:]])
        results = found(mixed)
        truth[kind] += 1
        right[kind] += (kind, data) in results
        said.update(kind for kind, _ in results)
    assert len(truth) == len(KINDS)
    assert right.total() / truth.total() >= 0.97
    assert right.total() / said.total() >= 0.97


def test_source_code_holds_addresses_of_authors_and_little_else():
    texts = [d.text for d in islice(stdlib_code(), 200) if isinstance(d, Document)]
    counts = Counter(kind for text in texts for kind, _ in found(text))
    assert counts.pop("email") > 5
    # Examples of addresses, a version of AIX's filesets, a section of the HTML standard.
    assert counts.total() <= 5


@pytest.mark.parametrize("between", [", ", " and ", "; ", "\n", "\n  - "])
def test_a_word_says_it_for_all_addresses_of_a_list(between):
    addresses = ["8.8.8.8", "8.8.4.4", "1.1.1.1", "9.9.9.9"] * 3
    text = "DNS servers:" + ("\n  - " if "-" in between else " ") + between.join(addresses)
    assert found(text) == [("ipv4", a) for a in addresses]
    assert found(text.replace("DNS servers", "versions")) == []


def test_redaction_and_its_edits():
    text = "a jo@acme.com b 66.187.233.12 c"
    outcome = Pii()(batch_of("nothing here", text))
    assert outcome.kept["text"].to_pylist() == ["nothing here", "a <EMAIL> b <IP_ADDRESS> c"]
    assert outcome.edits.schema == EDITS
    rows = outcome.edits.to_pylist()
    assert [(r["id"], r["source"], r["step"], r["reason"]) for r in rows] == [
        ("1", "web", "pii", "pii_email"),
        ("1", "web", "pii", "pii_ipv4"),
    ]
    assert [text[r["start"] : r["stop"]] for r in rows] == ["jo@acme.com", "66.187.233.12"]
    assert "acme" not in str(rows)


def test_example_values_instead_of_tokens():
    data = [p for p in PLANTED if "range" not in p[1]]
    text = "\n".join(before + value + after for _, before, value, after in data)
    for style in REPLACEMENTS:
        clean = redact(text, find_pii(text), style)
        assert not any(value in clean for _, _, value, _ in data)
        assert found(clean) == []
        assert all(REPLACEMENTS[style][kind] in clean for kind in KINDS)
    step = Pii(replacement="example")
    assert step(batch_of("to jo@acme.com")).kept["text"][0].as_py() == "to name@example.com"


def test_kinds_are_chosen():
    text = "jo@acme.com 66.187.233.12 536-90-4399"
    assert found(text, kinds=("ipv4",)) == [("ipv4", "66.187.233.12")]
    kept = Pii(kinds=("email", "national_id"))(batch_of(text)).kept
    assert kept["text"][0].as_py() == "<EMAIL> 66.187.233.12 <NATIONAL_ID>"


def test_locales_decide_what_is_national():
    texts = {
        "US": "(202) 456-1414", "FR": "01 42 68 53 00", "SE": "880320-0016", "FI": "131052-308T",
        "BR": "390.533.447-05", "CH": "756.9217.0769.85", "KR": "971013-9019902",
        "MX": "BOXW310820HNERXN09", "CN": "360426199101010071", "NO": "15108695088",
        "BE": "85.07.30-033.28", "CZ": "710319/2745", "NL": "BSN 1112.22.333",
        "RU": "+7 495 697-03-49",
    }  # fmt: skip
    for locale, text in texts.items():
        assert len(found(text, locales=(locale,))) == 1, locale
        others = tuple(other for other in texts if other not in (locale, "US", "CA"))
        expected = 1 if text.startswith("+") else 0
        if locale in ("US", "SE", "BR", "CH", "MX", "FI"):
            assert len(found(text, locales=others)) == expected, locale
    assert found("+46 70 262 22 05", locales=()) == [("phone", "+46 70 262 22 05")]


def test_private_addresses_on_request():
    text = "192.168.1.1 fe80::1 fd00::1234 127.0.0.1"
    assert found(text) == []
    assert [k for k, _ in found(text, private_addresses=True)] == ["ipv4", "ipv6", "ipv6"]
    assert Pii(private_addresses=True)(batch_of(text)).edits.num_rows == 3


def test_dropping_keeps_what_has_fewer():
    one, two = "mail jo@acme.com", "mail jo@acme.com or 202-456-1414 or jo@acme.com"
    outcome = Pii(action="drop", min_findings=2)(batch_of("none", one, two))
    assert outcome.kept["text"].to_pylist() == ["none", one]
    (row,) = outcome.removed.to_pylist()
    assert (row["reason"], row["detail"]) == ("pii_email", "2 email, 1 phone")
    assert row["text"] == "mail <EMAIL> or <PHONE> or <EMAIL>"
    assert outcome.edits.num_rows == 0
    assert Pii(action="drop")(batch_of(one)).kept.num_rows == 0
    assert Pii(action="drop", min_findings=4)(batch_of(two)).kept.num_rows == 1


def test_the_result_does_not_depend_on_the_cut():
    texts = [before + data + after for _, before, data, after in PLANTED]
    whole = Pii()(batch_of(*texts))
    parts = [Pii()(batch_of(text)) for text in texts]
    assert whole.kept["text"].to_pylist() == [p.kept["text"][0].as_py() for p in parts]
    assert whole.edits.num_rows == sum(p.edits.num_rows for p in parts)


def test_empty_batches_and_texts():
    outcome = Pii()(batch_of("x").slice(0, 0))
    assert outcome.kept.num_rows == outcome.edits.num_rows == 0
    assert found("") == []


@given(
    st.lists(st.sampled_from([*(p[1] + p[2] + p[3] for p in PLANTED), *HARMLESS, " ", "1", "."]))
)
@settings(max_examples=60, deadline=None)
def test_findings_are_ordered_apart_and_gone_after_redaction(parts):
    text = " ".join(parts)
    findings = find_pii(text)
    assert all(isinstance(f, Finding) and f.start < f.stop for f in findings)
    assert all(a.stop <= b.start for a, b in pairwise(findings))
    kept_apart = redact(text, findings)
    assert not any(text[f.start : f.stop] in kept_apart for f in findings if f.kind == "email")


@given(st.text(alphabet="0123456789.-: @aAf()+/ \n", max_size=400))
@settings(max_examples=150, deadline=None)
def test_nothing_crashes(text):
    redact(text, find_pii(text))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("piece", ["a@", "1", ":", "a", "."])
def test_a_hostile_megabyte_ends(piece):
    find_pii(piece * 1_000_000)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "piece",
    [
        "1 ",
        "a:",
        "1.",
        "1.1.1.1.",
        "@a.",
        "A1",
        "AA11 ",
        "(0",
        "+1-",
        "a.@b.com ",
        "DE89 3704 ",
        "tel ",
        "202-456-1414 ",
        "4111 1111 1111 1111 ",
        "::1 ",
        "0 1 ",
        "+",
        "-1",
        "1a",
    ],
)
def test_repetition_ends(piece):
    find_pii(piece * (100_000 // len(piece)))


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"locales": ("UK",)}, "did you mean 'GB'"),
        ({"locales": ("de",)}, "did you mean 'DE'"),
        ({"kinds": ()}, "at least 1 item"),
        ({"kinds": ("mail",)}, "email"),
        ({"min_findings": 2}, "min_findings=1"),
        ({"action": "drop", "min_findings": 0}, "greater than 0"),
    ],
)
def test_rules_of_the_knobs(knobs, words):
    with pytest.raises(ValidationError, match=words):
        Pii(**knobs)
    Pii(locales=("GB",), action="drop", min_findings=2)


def test_a_misspelt_kind_is_one_fault():
    with pytest.raises(ValidationError) as error:
        Pii(kinds=("emial",))  # type: ignore[arg-type]
    assert error.value.error_count() == 1
