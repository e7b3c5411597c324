"""National identity, tax and health numbers: how each is written, and its check.

A number whose form is common (nine plain digits) counts only after a word that says what it is.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from stepwell.data.safety.validators import before


@dataclass(frozen=True)
class NationalId:
    """locale: ISO 3166 code of the country. pattern: how it is written, starting with a digit or
    capital letter. check: module of python-stdnum, or "" where the form is all there is to check.
    words: what must stand before it on the line, or "" where the form says enough."""

    locale: str
    name: str
    pattern: str
    check: str = ""
    words: str = ""


NATIONAL_IDS = (
    NationalId("US", "SSN", r"\d{3}-\d{2}-\d{4}", "us.ssn"),
    NationalId("US", "SSN", r"\d{3} ?\d{2} ?\d{4}", "us.ssn", r"ssn|social security"),
    NationalId("US", "ITIN", r"9\d{2}-\d{2}-\d{4}", "us.itin"),
    NationalId(
        "GB", "NINO",
        r"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] \d{2} \d{2} \d{2} [A-D]",
    ),
    NationalId(
        "GB", "NINO",
        r"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]\d{6} ?[A-D]",
        words=r"national insurance|nino|ni (?:number|no)|n\.i\.",
    ),
    NationalId("GB", "NHS", r"\d{3}[ -]?\d{3}[ -]?\d{4}", "gb.nhs", r"nhs"),
    NationalId(
        "DE", "Steuer-ID", r"\d{2} ?\d{3} ?\d{3} ?\d{3}", "de.idnr",
        r"steuer|idnr|id-nr|identifikationsnummer|tin\b|tax id",
    ),
    NationalId(
        "FR", "NIR",
        r"[12] ?\d{2} ?(?:0[1-9]|1[0-2]|[2-9]\d) ?(?:\d{2}|2[AB]) ?\d{3} ?\d{3} ?\d{2}", "fr.nir",
    ),
    NationalId(
        "ES", "DNI", r"\d{8}[- ]?[A-Z]", "es.dni", r"dni|nif|identidad|documento|d\.n\.i"
    ),
    NationalId("ES", "NIE", r"[XYZ]-?\d{7}-?[A-Z]", "es.nie"),
    NationalId(
        "IT", "codice fiscale", r"[A-Z]{6}\d{2}[A-EHLMPR-T]\d{2}[A-Z]\d{3}[A-Z]",
        "it.codicefiscale",
    ),
    NationalId("PL", "PESEL", r"\d{11}", "pl.pesel", r"pesel"),
    NationalId("NL", "BSN", r"\d{4}\.?\d{2}\.?\d{3}", "nl.bsn", r"bsn|sofi|burgerservice"),
    NationalId("SE", "personnummer", r"(?:19|20)?\d{6}[-+]\d{4}", "se.personnummer"),
    NationalId("FI", "HETU", r"\d{6}[-+A]\d{3}[0-9A-FHJ-NPR-Y]", "fi.hetu"),
    NationalId("DK", "CPR", r"\d{6}-?\d{4}", "dk.cpr", r"cpr|personnummer"),
    NationalId("NO", "fødselsnummer", r"\d{6} ?\d{5}", "no.fodselsnummer"),
    NationalId("BE", "NN", r"\d{2}\.\d{2}\.\d{2}-\d{3}\.\d{2}", "be.nn"),
    NationalId("PT", "CC", r"\d{8} \d [A-Z0-9]{2}\d", "pt.cc"),
    NationalId("PT", "NIF", r"\d{3} ?\d{3} ?\d{3}", "pt.nif", r"nif|contribuinte"),
    NationalId("BR", "CPF", r"\d{3}\.\d{3}\.\d{3}-\d{2}", "br.cpf"),
    NationalId("BR", "CPF", r"\d{11}", "br.cpf", r"cpf"),
    NationalId(
        "CA", "SIN", r"\d{3}[ -]?\d{3}[ -]?\d{3}", "ca.sin", r"sin\b|social insurance|nas\b"
    ),
    NationalId("AU", "TFN", r"\d{3} ?\d{3} ?\d{3}", "au.tfn", r"tfn|tax file"),
    NationalId("IN", "Aadhaar", r"\d{4} ?\d{4} ?\d{4}", "in_.aadhaar", r"aadhaar|aadhar|uidai"),
    NationalId("CN", "RIC", r"\d{17}[\dX]", "cn.ric"),
    NationalId("KR", "RRN", r"\d{6}-\d{7}", "kr.rrn"),
    NationalId(
        "JP", "My Number", r"\d{4} ?\d{4} ?\d{4}", "jp.in_", r"my number|個人番号|マイナンバー"
    ),
    NationalId("MX", "CURP", r"[A-Z]{4}\d{6}[HM][A-Z]{5}[A-Z0-9]\d", "mx.curp"),
    NationalId("RO", "CNP", r"\d{13}", "ro.cnp", r"cnp|cod numeric"),
    NationalId("CZ", "rodné číslo", r"\d{6}/\d{3,4}", "cz.rc"),
    NationalId("CH", "AHV", r"756\.\d{4}\.\d{4}\.\d{2}", "ch.ssn"),
    NationalId("IE", "PPS", r"\d{7}[A-W][A-IW]?", "ie.pps", r"pps"),
    NationalId("TR", "T.C. kimlik", r"\d{11}", "tr.tckimlik", r"kimlik|t\.c\."),
    NationalId("ZA", "ID", r"\d{13}", "za.idnr", r"\bid\b|identity"),
)  # fmt: skip
LOCALES = tuple(sorted({item.locale for item in NATIONAL_IDS}))


def national_ids(
    text: str, start: int, stop: int, locales: tuple[str, ...]
) -> Iterator[tuple[int, int]]:
    """Where in text[start:stop] there are numbers of these countries."""
    for pattern, words, check in _rules(locales):
        for match in pattern.finditer(text, start, stop):
            if words is not None and not words.search(before(text, match.start())):
                continue
            if _passes(check, match.group()):
                yield match.span()


@lru_cache(maxsize=16)
def _rules(locales: tuple[str, ...]) -> list[tuple[re.Pattern[str], re.Pattern[str] | None, str]]:
    return [
        (
            re.compile(item.pattern, re.ASCII),
            re.compile(rf"(?i)(?<!\w)(?:{item.words})[^\n]*\Z") if item.words else None,
            item.check,
        )
        for item in NATIONAL_IDS
        if item.locale in locales
    ]


def _passes(check: str, number: str) -> bool:
    return not check or importlib.import_module(f"stdnum.{check}").is_valid(number)
