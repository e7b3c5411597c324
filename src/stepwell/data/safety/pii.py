"""Personal data in text: found by form, proved by check digits and numbering plans, and replaced.

Every search is linear in the text: it starts at something rare (an `@`, a colon between colons,
six digits close together), and looks at a bounded stretch around it. See docs/safety.md for how
well it does.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import pyarrow as pa
from pydantic import AfterValidator, model_validator

from stepwell.data.batches import EDITS, Outcome, Removal, split, texts_of, with_texts
from stepwell.data.safety.national_ids import LOCALES, national_ids
from stepwell.data.safety.validators import (
    CARD_BEFORE,
    COUNTRIES,
    IBAN_LENGTHS,
    NANP,
    before,
    is_card,
    is_email,
    is_iban,
    is_ipv4,
    is_ipv6,
    is_phone,
)
from stepwell.data.steps import DocumentStep
from stepwell.schema import Flag, Positive
from stepwell.types import nearest

Kind = Literal["email", "iban", "card", "national_id", "ipv6", "ipv4", "phone"]
# In order of precedence where two findings overlap.
KINDS: tuple[Kind, ...] = ("email", "iban", "card", "national_id", "ipv6", "ipv4", "phone")
REPLACEMENTS: dict[str, dict[str, str]] = {
    "token": {
        "email": "<EMAIL>", "iban": "<IBAN>", "card": "<CARD>", "national_id": "<NATIONAL_ID>",
        "ipv6": "<IP_ADDRESS>", "ipv4": "<IP_ADDRESS>", "phone": "<PHONE>",
    },
    # Reserved for documentation (RFC 2606, 3849, 5737; NANP 555-01xx) or of no valid check digit.
    "example": {
        "email": "name@example.com", "iban": "XX00 0000 0000 0000", "card": "0000 0000 0000 0000",
        "national_id": "000-00-0000", "ipv6": "2001:db8::1", "ipv4": "192.0.2.1",
        "phone": "+1 202-555-0100",
    },
}  # fmt: skip

DENSE_DIGITS = re.compile(r"[0-9](?:[ .\-/()+A-Za-z]{0,2}[0-9]){5}")
# The longest number of all is an IBAN of 34 characters in groups of four.
MARGIN = 44
# Of letters only the Latin ones: in Chinese or Thai an address follows a word without a blank.
LOCAL_PART = re.compile(r"[A-Za-z0-9À-ɏ_.+%'-]{1,64}")
DOMAIN = re.compile(r"[A-Za-z0-9À-ɏ_-]{1,63}(?:\.[A-Za-z0-9À-ɏ_-]{1,63}){1,8}")
# A mailbox's, and that of a server it is read at.
MAX_HOSTS = 2
COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
IPV6_CHARACTERS = "0123456789abcdefABCDEF:."
DOTS = re.compile(r"\.[0-9]{1,3}\.[0-9]{1,3}\.")
DIGITS = "0123456789"
IPV4 = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}")
IBAN_BEGIN = re.compile(r"[A-Z]{2}[0-9]{2}")
IBAN = re.compile(r"[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}")
CARD = re.compile(
    r"[0-9]{4}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?:\1[0-9]{3})?"
    r"|[0-9]{4}([ -])[0-9]{6}\2[0-9]{4,5}"
    r"|[0-9]{13,19}"
)
PHONE = re.compile(r"(?:\+ ?)?\(?[0-9](?:[ .()/-]{0,2}[0-9]){6,15}")


class Finding(NamedTuple):
    """text[start:stop] is personal data of this kind."""

    kind: Kind
    start: int
    stop: int


def _some(kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    # Field(min_length=1) would also complain about a kind that is misspelt.
    if not kinds:
        raise ValueError(f"kinds = []: must have at least 1 item, of {', '.join(KINDS)}")
    return kinds


class Pii(DocumentStep):
    """Replaces personal data, or removes the documents that hold it.

    kinds: what is looked for. locales: countries (ISO 3166) whose identity numbers and national
    ways of writing telephone numbers are known; what is written internationally is found anyway.
    action: "redact" replaces each finding; "drop" removes a document with min_findings or more, and
    leaves others as they are. replacement: "token" puts `<EMAIL>`, "example" a value that is
    reserved for documentation. private_addresses: also addresses of local networks.

    No record of what was found holds it: edits have places and kinds, and a removed document's text
    is kept redacted.
    """

    kind: Literal["pii"] = "pii"
    kinds: Annotated[tuple[Kind, ...], AfterValidator(_some)] = KINDS
    locales: tuple[str, ...] = ("US", "GB", "DE", "FR", "ES", "IT", "PL")
    action: Literal["redact", "drop"] = "redact"
    min_findings: Positive = 1
    replacement: Literal["token", "example"] = "token"
    private_addresses: Flag = False

    @model_validator(mode="after")
    def _rules(self) -> Pii:
        for locale in self.locales:
            if locale not in COUNTRIES:
                near = nearest({"UK": "GB"}.get(locale.upper(), locale.upper()), COUNTRIES)
                raise ValueError(
                    f"locales names {locale!r}{near}; a locale is a country's code in capitals "
                    f"(ISO 3166), and identity numbers are known of {' '.join(LOCALES)}"
                )
        if self.action == "redact" and self.min_findings > 1:
            raise ValueError(
                f"min_findings={self.min_findings} is a rule of action='drop'; action='redact' "
                "replaces every finding (min_findings=1)"
            )
        return self

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        texts = texts_of(batch)
        found = [find_pii(text, self.kinds, self.locales, self.private_addresses) for text in texts]
        dropped = [self.action == "drop" and len(f) >= self.min_findings for f in found]
        changed = [
            redact(text, f, self.replacement) if f and (self.action == "redact" or gone) else text
            for text, f, gone in zip(texts, found, dropped, strict=True)
        ]
        if any(found):
            batch = with_texts(batch, changed)
        if self.action == "drop":
            removals = [
                _removal(f) if gone else None for f, gone in zip(found, dropped, strict=True)
            ]
            return split(batch, self.kind, removals)
        return Outcome(batch, edits=self._edits(batch, found))

    def _edits(self, batch: pa.RecordBatch, found: Sequence[Sequence[Finding]]) -> pa.RecordBatch:
        rows = [(i, finding) for i, findings in enumerate(found) for finding in findings]
        which = pa.array([i for i, _ in rows], pa.int64())
        replacements = REPLACEMENTS[self.replacement]
        columns = [
            batch["id"].take(which),
            batch["source"].take(which),
            pa.array([self.kind] * len(rows), pa.string()),
            pa.array([f"pii_{f.kind}" for _, f in rows], pa.string()),
            pa.array([f.start for _, f in rows], pa.int64()),
            pa.array([f.stop for _, f in rows], pa.int64()),
            pa.array([replacements[f.kind] for _, f in rows], pa.string()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=EDITS)


def _removal(findings: Sequence[Finding]) -> Removal:
    """Named for the kind that comes most often, the first in KINDS of several."""
    counts = Counter(f.kind for f in findings)
    first = max(KINDS, key=lambda kind: counts[kind])
    detail = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    return Removal(f"pii_{first}", detail)


def redact(text: str, findings: Iterable[Finding], replacement: str = "token") -> str:
    """The text with each finding (sorted, not overlapping) replaced."""
    parts, end = [], 0
    for kind, start, stop in findings:
        parts += [text[end:start], REPLACEMENTS[replacement][kind]]
        end = stop
    return "".join([*parts, text[end:]])


def find_pii(
    text: str,
    kinds: Sequence[Kind] = KINDS,
    locales: tuple[str, ...] = ("US", "GB", "DE", "FR", "ES", "IT", "PL"),
    private_addresses: bool = False,
) -> list[Finding]:
    """Personal data in reading order, not overlapping."""
    found: list[Finding] = []
    if "email" in kinds:
        found += emails(text)
    if "ipv6" in kinds:
        found += ipv6_addresses(text, private_addresses)
    if "ipv4" in kinds:
        found += ipv4_addresses(text, private_addresses)
    numeric = [kind for kind in ("iban", "card", "national_id", "phone") if kind in kinds]
    if numeric:
        for start, stop in dense_stretches(text):
            found += _numbers(text, start, stop, numeric, locales)
    return _disjoint(found)


def emails(text: str) -> Iterator[Finding]:
    place = text.find("@")
    while place >= 0:
        found = _email_at(text, place)
        if found is not None:
            yield found
        place = text.find("@", found.stop if found is not None else place + 1)


def _email_at(text: str, place: int) -> Finding | None:
    """The address around the sign there; its login at another host too (`jo@a.com@mail.b.com`)."""
    # The local part is read backwards from the sign, so that words without one cost nothing.
    backwards = LOCAL_PART.match(text[max(0, place - 64) : place][::-1])
    if backwards is None or len(backwards.group()) == 64:
        return None
    local = backwards.group()[::-1].lstrip(".'-+%")
    start = place - len(local)
    # What follows the second sign of `a@b@c.com` is no address if the first part was none.
    goes_on = text[max(0, start - 2) : start]
    if not local or (goes_on[-1:] == "@" and goes_on[:1].isalnum()):
        return None
    hosts, stop = [], place
    while text[stop : stop + 1] == "@" and len(hosts) < MAX_HOSTS:
        domain = DOMAIN.match(text, stop + 1)
        if domain is None:
            return None
        hosts.append(domain.group().rstrip("-_"))
        stop += 1 + len(hosts[-1])
    after = text[stop : stop + 1]
    return Finding("email", start, stop) if all(is_email(local, h, after) for h in hosts) else None


def ipv6_addresses(text: str, private: bool = False) -> Iterator[Finding]:
    hit = COLONS.search(text)
    while hit:
        ahead = text[max(0, hit.start() - 45) : hit.start()]
        start = hit.start() - (len(ahead) - len(ahead.rstrip(IPV6_CHARACTERS)))
        rest = text[hit.start() : hit.start() + 46]
        stop = hit.start() + len(rest) - len(rest.lstrip(IPV6_CHARACTERS))
        # A sentence's full stop or colon is no part of the address.
        end = stop - (len(text[start:stop]) - len(text[start:stop].rstrip(".")))
        for last in (end, end - 1 if text[start:end].endswith(":") else end):
            if text[max(0, start - 1) : start] == ":" or last - start > 45:
                break
            if _stands_alone(text, start, last) and is_ipv6(text[start:last], private):
                yield Finding("ipv6", start, last)
                break
        hit = COLONS.search(text, max(stop, hit.start() + 1))


def ipv4_addresses(text: str, private: bool = False) -> Iterator[Finding]:
    for hit in DOTS.finditer(text):
        ahead = text[max(0, hit.start() - 3) : hit.start()]
        start = hit.start() - (len(ahead) - len(ahead.rstrip(DIGITS)))
        match = IPV4.match(text, start)
        if match is None or not _stands_alone(text, start, match.end()):
            continue
        if is_ipv4(text, start, match.end(), private):
            yield Finding("ipv4", start, match.end())


def dense_stretches(text: str) -> Iterator[tuple[int, int]]:
    """Where six digits stand close together, with room around them for the longest number."""
    start = stop = -1
    for match in DENSE_DIGITS.finditer(text):
        if start < 0 or match.start() - MARGIN > stop:
            if start >= 0:
                yield start, stop
            start = max(0, match.start() - MARGIN)
        stop = min(len(text), match.end() + MARGIN)
    if start >= 0:
        yield start, stop


def _numbers(
    text: str, start: int, stop: int, kinds: Sequence[str], locales: tuple[str, ...]
) -> Iterator[Finding]:
    if "iban" in kinds:
        yield from _ibans(text, start, stop)
    if "card" in kinds:
        yield from _cards(text, start, stop)
    if "national_id" in kinds:
        for place in national_ids(text, start, stop, locales):
            if _stands_alone(text, *place):
                yield Finding("national_id", *place)
    if "phone" in kinds:
        yield from _phones(text, start, stop, locales)


def _ibans(text: str, start: int, stop: int) -> Iterator[Finding]:
    for begin in IBAN_BEGIN.finditer(text, start, stop):
        place = begin.start()
        length = IBAN_LENGTHS.get(text[place : place + 2])
        match = IBAN.match(text, place, stop) if length else None
        if match is None or length is None:
            continue
        # What follows in capitals is no part of it.
        signs = [i for i in range(place, match.end()) if text[i] != " "][:length]
        compact, end = "".join(text[i] for i in signs), signs[-1] + 1
        if len(compact) == length and _stands_alone(text, place, end) and is_iban(compact):
            yield Finding("iban", place, end)


def _cards(text: str, start: int, stop: int) -> Iterator[Finding]:
    for match in CARD.finditer(text, start, stop):
        place, end = match.span()
        written = match.group()
        digits = written.replace(" ", "").replace("-", "")
        if not _stands_alone(text, place, end) or _goes_on(text, place, end):
            continue
        # Of digits without groups, every tenth number has the right check digit by chance.
        common = len(written) > len(digits) or len(digits) in (15, 16)
        if is_card(digits) and (common or CARD_BEFORE.search(before(text, place))):
            yield Finding("card", place, end)


def _goes_on(text: str, start: int, stop: int) -> bool:
    """Whether there is another group of four digits before or after: a row of a table."""
    ahead, after = text[max(0, start - 5) : start], text[stop : stop + 6]
    return bool(re.search(r"\d{4}[ -]$", ahead) or re.match(r"[ -]\d{4}(?!\d)", after))


def _phones(text: str, start: int, stop: int, locales: tuple[str, ...]) -> Iterator[Finding]:
    patterns = [PHONE, NANP] if "US" in locales or "CA" in locales else [PHONE]
    for match in (m for pattern in patterns for m in pattern.finditer(text, start, stop)):
        place, end = match.span()
        if match.group().startswith("(") and ")" not in match.group():
            place += 1
        if _is_inside(text, match.start()):
            continue
        for last in _ends(text, place, end):
            if _stands_alone(text, place, last) and is_phone(text, place, last, locales):
                yield Finding("phone", place, last)
                break


def _is_inside(text: str, place: int) -> bool:
    """Whether what stands before a number makes it a sum, a share, a part of a path or of code."""
    ahead = text[max(0, place - 2) : place]
    if ahead[-1:] == ":":
        return ahead[:1].isdigit()
    return ahead[-1:] != "" and (ahead[-1].isalnum() or ahead[-1] in "_.,/=@#&?%$€£-+")


def _ends(text: str, start: int, stop: int) -> list[int]:
    """Where a number may end: with what was matched, or before one of its last three blanks."""
    ends = [stop]
    while len(ends) < 4 and (blank := text.rfind(" ", start, ends[-1])) > start:
        ends.append(blank)
    return ends


def _stands_alone(text: str, start: int, stop: int) -> bool:
    """No part of a longer word, number or name."""
    ahead, after = text[max(0, start - 2) : start], text[stop : stop + 2]
    if text[start] not in "(+" and (ahead[-1:].isalnum() or ahead[-1:] == "_"):
        return False
    if ahead[-1:] == "." and ahead[:1].isdigit():
        return False
    if after[:1].isalnum() or after[:1] == "_":
        return False
    return not (after[:1] == "." and (after[1:].isdigit() or after[1:].islower()))


def _disjoint(findings: Iterable[Finding]) -> list[Finding]:
    """Of findings that overlap the one of the first kind, then the first, then the longest."""
    kept: list[Finding] = []
    for finding in sorted(set(findings), key=lambda f: (KINDS.index(f.kind), f.start, -f.stop)):
        at = bisect_left(kept, finding.start, key=lambda f: f.start)
        free_before = at == 0 or kept[at - 1].stop <= finding.start
        if free_before and (at == len(kept) or finding.stop <= kept[at].start):
            kept.insert(at, finding)
    return kept
