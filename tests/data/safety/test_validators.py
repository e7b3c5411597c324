import pytest

from stepwell.data.safety.national_ids import LOCALES, NATIONAL_IDS, national_ids
from stepwell.data.safety.validators import (
    IBAN_LENGTHS,
    is_card,
    is_email,
    is_iban,
    is_ipv4,
    is_ipv6,
    is_phone,
    passes_luhn,
)

# Each as python-stdnum documents it, with its check digits right and wrong.
IDS = {
    "us.ssn": ("536-90-4399", "000-90-4399"),
    "us.itin": ("912-90-3456", "912-60-345"),
    "gb.nhs": ("943 476 5870", "943 476 5871"),
    "de.idnr": ("36574261809", "36574261890"),
    "fr.nir": ("2 95 10 99 126 111 93", "2 95 10 99 126 111 99"),
    "es.dni": ("54362315-K", "54362315-Z"),
    "es.nie": ("X-2482300W", "X-2482300A"),
    "it.codicefiscale": ("RCCMNL83S18D969H", "RCCMNL83S18D969A"),
    "pl.pesel": ("44051401359", "44051401358"),
    "nl.bsn": ("1112.22.333", "1112.52.333"),
    "se.personnummer": ("880320-0016", "880320-0018"),
    "fi.hetu": ("131052-308T", "131052-308U"),
    "dk.cpr": ("211062-5629", "511062-5629"),
    "no.fodselsnummer": ("151086 95088", "151086 95077"),
    "be.nn": ("85.07.30-033.28", "85.07.30-033.84"),
    "pt.cc": ("00000000 0 ZZ4", "00000000 0 ZZ5"),
    "pt.nif": ("501 964 843", "501 964 842"),
    "br.cpf": ("390.533.447-05", "231.002.999-00"),
    "ca.sin": ("123-456-782", "123-456-783"),
    "au.tfn": ("123 456 782", "123 456 783"),
    "in_.aadhaar": ("2341 2341 2346", "2341 2341 2347"),
    "cn.ric": ("360426199101010071", "360426199101010072"),
    "kr.rrn": ("971013-9019902", "971013-9019903"),
    "jp.in_": ("6214 9832 0257", "6214 9832 0258"),
    "mx.curp": ("BOXW310820HNERXN09", "BOXW310820HNERXN08"),
    "ro.cnp": ("1630615123457", "1630615123458"),
    "cz.rc": ("710319/2745", "710319/2746"),
    "ch.ssn": ("756.9217.0769.85", "756.9217.0769.84"),
    "ie.pps": ("6433435F", "6433435E"),
    "tr.tckimlik": ("17291716060", "17291716050"),
    "za.idnr": ("7503305044089", "8503305044089"),
    "": ("AB 12 34 56 C", "GB 12 34 56 C"),
}
WORDS = {
    "us.ssn": "SSN",
    "gb.nhs": "NHS no",
    "de.idnr": "Steuer-ID",
    "es.dni": "DNI",
    "pl.pesel": "PESEL",
    "nl.bsn": "BSN",
    "dk.cpr": "CPR",
    "pt.nif": "NIF",
    "br.cpf": "CPF",
    "ca.sin": "SIN",
    "au.tfn": "TFN",
    "in_.aadhaar": "Aadhaar",
    "jp.in_": "個人番号",
    "ro.cnp": "CNP",
    "ie.pps": "PPS",
    "tr.tckimlik": "T.C. Kimlik",
    "za.idnr": "identity number",
    "": "NINO",
}


def spans(text: str, locales: tuple[str, ...]) -> list[str]:
    return [text[a:b] for a, b in national_ids(text, 0, len(text), locales)]


def test_every_rule_has_its_numbers_here():
    assert {item.check for item in NATIONAL_IDS} == set(IDS)
    assert {item.check for item in NATIONAL_IDS if item.words} == set(WORDS)


@pytest.mark.parametrize("item", NATIONAL_IDS, ids=lambda i: f"{i.locale}-{i.name}")
def test_national_ids(item):
    right, wrong = IDS[item.check]
    word = WORDS.get(item.check, "") + ": "
    assert right in spans(word + right, (item.locale,))
    assert wrong not in spans(word + wrong, (item.locale,))
    others = tuple(locale for locale in LOCALES if locale != item.locale)
    assert spans(word + right, ()) == []
    if item.check in ("us.ssn", "fr.nir", "it.codicefiscale", "mx.curp", "kr.rrn"):
        assert spans(word + right, others) == []


@pytest.mark.parametrize("item", [i for i in NATIONAL_IDS if i.words], ids=lambda i: i.name)
def test_common_forms_need_their_word(item):
    plain = {"us.ssn": "536904399", "": "AB123456C", "br.cpf": "39053344705"}
    number = plain.get(item.check, IDS[item.check][0])
    assert number in spans(f"{WORDS[item.check]}: {number}", (item.locale,))
    assert number not in spans(f"lot of {number}", (item.locale,))
    assert number not in spans(f"{WORDS[item.check]}\n{number}", (item.locale,))


@pytest.mark.parametrize(
    ("digits", "good"),
    [
        ("4111111111111111", True),
        ("4111111111111112", False),
        ("4222222222222", True),
        ("5500000000000004", True),
        ("2223003122003222", True),
        ("2220990000000007", False),
        ("378282246310005", True),
        ("3782822463100050", False),
        ("6011000990139424", True),
        ("30569309025904", True),
        ("3530111333300000", True),
        ("6200000000000005", True),
        ("0000000000000000", False),
        ("1234567812345670", False),
        ("9999999999999995", False),
    ],
)
def test_cards_by_issuer_length_and_luhn(digits, good):
    assert is_card(digits) is good


def test_luhn_changes_with_every_digit():
    number = "79927398713"
    assert passes_luhn(number)
    for i in range(len(number)):
        changed = number[:i] + str((int(number[i]) + 1) % 10) + number[i + 1 :]
        assert not passes_luhn(changed)


# The examples of the ISO 13616 registry.
@pytest.mark.parametrize(
    "iban",
    [
        "AD1200012030200359100100",
        "AT611904300234573201",
        "BE68539007547034",
        "CH9300762011623852957",
        "DE89370400440532013000",
        "ES9121000418450200051332",
        "FR1420041010050500013M02606",
        "GB29NWBK60161331926819",
        "IT60X0542811101000000123456",
        "NO9386011117947",
        "PL61109010140000071219812874",
        "SA0380000000608010167519",
        "MT84MALT011000012345MTLCAST001S",
    ],
)
def test_ibans(iban):
    assert IBAN_LENGTHS[iban[:2]] == len(iban)
    assert is_iban(iban)
    assert not is_iban(iban[:-1])
    assert not is_iban(iban[:2] + f"{(int(iban[2:4]) + 1) % 97:02}" + iban[4:])


def test_email_rules_on_both_sides():
    assert is_email("jo", "acme.com", " ")
    assert is_email("jo", "a" * 63 + ".com", "")
    assert is_email("jo", "xn--bcher-kva.xn--p1ai", "")
    for domain in ("acme", "acme.c", "acme.transpose", "-a.com", "a-.com", "mail.example.com"):
        assert not is_email("jo", domain, " ")
    assert is_email("git", "github.com", " ")
    assert not is_email("git", "github.com", ":")
    assert not is_email("jo", "acme.com", "(")


@pytest.mark.parametrize(
    ("text", "private", "good"),
    [
        ("at 66.187.233.12", False, True),
        ("at 66.187.233.256", False, False),
        ("at 66.187.233.012", False, False),
        ("at 10.0.0.8", False, False),
        ("at 10.0.0.8", True, True),
        ("at 127.0.0.1", True, False),
        ("at 203.0.113.9", True, False),
        ("version 66.1.2.3", False, False),
        ("v66.1.2.3", False, False),
        ("9.9.9.9", False, False),
        ("dns 9.9.9.9", False, True),
        ("9.9.9.60", False, True),
        ("9.9.9.59", False, False),
        ("host 9.9.9.59", False, True),
        ("\n9.12.1.4 Heading", False, False),
        ("\n9.12.1.4 and", False, False),
        ("\n9.60.1.4 Heading", False, True),
    ],
)
def test_ipv4_and_what_is_a_version(text, private, good):
    start = next(i for i, c in enumerate(text) if c.isdigit())
    stop = start + len(text[start:].split(" ")[0])
    assert is_ipv4(text, start, stop, private) is good


@pytest.mark.parametrize(
    ("address", "private", "good"),
    [
        ("2a00:1450:4001:82a::200e", False, True),
        ("2001:db8::1", True, False),
        ("fe80::1", False, False),
        ("fe80::1", True, True),
        ("::1", True, False),
        ("face::b", False, False),
        ("2004::", False, False),
        ("2004::1", False, True),
        ("::ffff:8.8.8.8", False, True),
        ("::ffff:10.0.0.1", False, False),
        ("12:34:56", False, False),
        ("ff02::1", True, False),
    ],
)
def test_ipv6(address, private, good):
    assert is_ipv6(address, private) is good


@pytest.mark.parametrize(
    ("text", "locales", "good"),
    [
        ("+44 20 7946 0018", (), True),
        ("+44 20 7946 001", (), False),
        ("020 7946 0018", ("GB",), True),
        ("020 7946 0018", ("US",), False),
        ("202-456-1414", ("US",), True),
        ("202-456-1414", ("DE",), False),
        ("2024561414", ("US",), False),
        ("202-555-0143", ("US",), False),
        ("202-055-1414", ("US",), False),
        ("01.02.2024", ("DE", "FR"), False),
        ("00 44 20 7946 0018", (), True),
    ],
)
def test_phones(text, locales, good):
    assert is_phone(text, 0, len(text), locales) is good


def test_a_word_before_makes_a_phone_and_another_none():
    for word, good in [("tel. ", True), ("call us at ", True), ("ISBN ", False), ("sum ", False)]:
        text = word + "2024561414"
        assert is_phone(text, len(word), len(text), ("US",)) is good
