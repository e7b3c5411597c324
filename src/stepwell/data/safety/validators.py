"""Is what looks like a card number, an account or an address one? Pure functions of short strings
and of the text around them.

Check digits and countries' formats come from python-stdnum, telephone numbering plans from
phonenumbers (the port of Google's libphonenumber).
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

# RFC 2606: names that belong to nobody. Its top levels (.test, .example) are not in TOP_LEVELS.
RESERVED_DOMAINS = ("example.com", "example.org", "example.net", "example.edu")
# A dotted name of anything else is a file or a member in code (`icon@2x.png`, `a@b.transpose`).
_TOP_LEVELS = """
com org net edu gov mil int info biz name pro aero coop museum mobi jobs travel cat tel asia
post xxx arpa app dev cloud online site xyz tech store blog club shop live news email space
website top icu page link agency group digital world life today solutions company network
systems media design studio academy center consulting photography global services team work
works zone house life love fun games chat social software support technology university
school health care clinic law legal finance bank insurance capital partners ventures
international community foundation institute berlin hamburg koeln bayern wien paris london
nyc tokyo amsterdam brussels swiss bzh eus gal scot wales quebec africa lat ninja guru expert
rocks win vip pub art bio eco film land haus reise gmbh ltd llc inc
ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs
bt bw by bz ca cc cd cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee
eg er es et eu fi fj fk fm fo fr ga gd ge gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm
hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg kh ki km kn kp kr kw ky kz la lb
lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms mt mu mv mw mx my mz
na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs
ru rw sa sb sc sd se sg sh si sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl
tm tn to tr tt tv tw tz ua ug uk us uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw
"""
TOP_LEVELS = frozenset(_TOP_LEVELS.split())
# ISO 3166 codes, which the two-letter top levels are, but for these.
COUNTRIES = frozenset(t.upper() for t in TOP_LEVELS if len(t) == 2) - {"AC", "EU", "SU", "UK"} | {
    "GB"
}
# ISO 13616: how many letters and digits each country's IBAN has.
_IBAN_LENGTHS = """
AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28
EE20 EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26
IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28
NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25
SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30
"""
IBAN_LENGTHS = {item[:2]: int(item[2:]) for item in _IBAN_LENGTHS.split()}
# Accounts of a host's software, as in git@github.com:owner/name.
SSH_ACCOUNTS = frozenset({"git", "hg", "svn", "gitea", "gerrit"})

# ISO/IEC 7812 issuers: first digits (from, to) and lengths.
CARD_ISSUERS = (
    (4, 4, {13, 16, 19}),  # Visa
    (51, 55, {16}),  # Mastercard
    (2221, 2720, {16}),
    (34, 34, {15}),  # American Express
    (37, 37, {15}),
    (6011, 6011, {16, 19}),  # Discover
    (644, 649, {16, 19}),
    (65, 65, {16, 19}),
    (300, 305, {14, 16}),  # Diners Club
    (36, 36, {14}),
    (38, 39, {14, 16}),
    (3528, 3589, {16, 19}),  # JCB
    (62, 62, {16, 17, 18, 19}),  # UnionPay
    (5018, 5018, {16, 19}),  # Maestro
    (5020, 5020, {16, 19}),
    (5038, 5038, {16, 19}),
    (6304, 6304, {16, 19}),
    (6759, 6759, {16, 19}),
    (6761, 6763, {16, 19}),
)

VERSION_BEFORE = re.compile(
    r"(?i)(?:\b(?:version|ver|vers|release|rel|section|sect|sec|chapter|chap|clause|revision|rev|"
    r"build|firmware|appendix|oid|paragraph|table|figure|fig)s?\b[ .:=\"'(]*"
    r"|§ ?|[a-z_]-|\w[./]|(?<!\w)v|[=<>~!]=[ \"']*)$"
)
# `Python 3.11.2.1`: a name in front of a number.
PRODUCT_BEFORE = re.compile(r"(?<![\w.])([A-Za-z+#]*[A-Z][\w+#]*) $")
SERVER_BEFORE = re.compile(r"\b(?:SQL|Windows|Exchange|HTTP|X|[Ww]eb\w*|[Aa]pplication) Server $")
ADDRESS_WORDS = (
    r"ips?|ipv4|addr(?:ess(?:es)?)?|adressen?|adresses|direcci[oó]n(?:es)?|indirizz[oi]|dns\d*|"
    r"name ?servers?|resolvers?|ping(?:s|ed|ing)?|traceroute|hosts?|hostname|hostnames|gateways?|"
    r"subnets?|netmask|router|routers|routes?|inet|ssh|telnet|curl|wget|nmap|whois|firewall|proxy|"
    r"peers?|clients?|remote|src|dst|packets?|ports?|tcp|udp|https?|servers?|serveurs?|servidor|"
    r"rechner|networks?|nets?|bind|listen(?:s|ed|ing)?|connect(?:s|ed|ing|ions?)?|log(?:ged|gin)|"
    r"blocked|banned|allow(?:ed)?|deny|denied"
)
VERSION_WORDS = (
    r"versions?|ver|release[sd]?|upgrad\w*|updat\w*|downgrad\w*|migrat\w*|patch\w*|firmware|drivers?|"
    r"builds?|requires?|compatible|changes|changelog|fixe[sd]|sections?|clauses?|chapters?|oids?|snmp"
)
# Which of the two is meant, the last one says. Compounds such as DNS1= and x_addr= count too.
CONTEXT = re.compile(
    rf"(?i)(?<![^\W_])(?:(?P<address>{ADDRESS_WORDS})|(?P<version>{VERSION_WORDS}))(?![^\W_]|\.\w)"
)
FROM_BEFORE = re.compile(r"(?i)\bfrom[^\w\n]{0,4}$")
URL_BEFORE = re.compile(r"(?:[\[@]|://)$")
ADDRESS_AFTER = re.compile(
    r"(?i):[0-9]{2,5}(?![0-9.])|/[0-9]{1,2}(?![0-9/.])|\]|,? port [0-9]| - \S+ \["
    r"| (?:answer|respond|replie[sd]|repl(?:y|ies)|refuse|timed out|unreachable|is (?:up|down)\b)"
)
# Addresses between the word and this one: `DNS: 8.8.8.8, 8.8.4.4 and`, also a line each.
EARLIER_ADDRESSES = re.compile(
    r"(?:(?<![\w.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?:[:/][0-9]{1,5})?"
    r"[\s,;>|*-]{1,8}(?:(?:and|or|to|und|oder|bis|et|ou|y|o|e) )?)+$"
)
LIST_BEGIN = re.compile(r"([:=])[ \t]*\r?\n[ \t]*(?:[-*][ \t]*)?$")
SENTENCE_END = re.compile(r"[.!?;]\s|\n")
# Four parts of a version are seldom above it, those of an address nearly always.
MAX_VERSION_PART = 60
CONTEXT_CHARACTERS = 160
PHONE_BEFORE = re.compile(
    r"(?i)(?:(?<![\w.-])(?:tel|telephone|phone|phones|ph|call|fax|mobile|mob|cell|cellphone|whatsapp|sms|"
    r"telefon|tel[ée]fono|t[ée]l[ée]phone|t[ée]l|telefax|handy|portable|m[óo]vil|cellulare|fon|"
    r"contact|hotline|helpline|rufnummer)\b|☎|📞)[^\w\n]{0,4}"
    r"(?:(?:us|me|at|on|number|no|nr|n°|is|free|toll)\b[^\w\n]{0,3}){0,3}$"
)
NUMBER_BEFORE = re.compile(
    r"(?i)\b(?:isbn|issn|doi|rfc|sku|version|serial|oid|pmid|arxiv|rev|revision|build|bug|ticket|"
    r"invoice|order|isbn-1[03]|ssn|social security|itin|tin|passport|licen[cs]e|account|acct|iban|"
    r"nhs|nino|pesel|dni|nif|nie|steuer-?id|tax id)\b[^\w\n]{0,3}"
    r"(?:(?:is|no|nr|number|id)\b[^\w\n]{0,3}){0,2}$"
)
CARD_BEFORE = re.compile(
    r"(?i)\b(?:card|visa|mastercard|amex|credit|debit|karte|carte|tarjeta|carta|cc|pan|maestro|"
    r"diners|discover|jcb)\b[^\n0-9]{0,16}$"
)
DATE = re.compile(
    r"\(?(?:(?:19|20)\d\d([./-])(?:0?[1-9]|1[0-2])\1(?:0?[1-9]|[12]\d|3[01])"
    r"|(?:0?[1-9]|[12]\d|3[01])([./-])(?:0?[1-9]|[12]\d|3[01])\2(?:(?:19|20)\d\d|\d\d))"
    r"(?![./-]?\d)"
)
NANP = re.compile(
    r"(?:\+?1[-. ]{1,2})?(?:\([0-9]{3}\) ?[-.]? ?|[0-9]{3}[-./ ]{1,2})[0-9]{3}[-.] ?[0-9]{4}"
    r"|(?:\+?1 ?)?\([0-9]{3}\) ?[0-9]{3} [0-9]{4}"
)
# An area code of two to five digits with its zero.
TRUNK = re.compile(r"\(?0[1-9][0-9]{0,3}\)?(?:[./-]| (?! ))")
# `078-05-1120` was never issued and is no telephone number either.
SSN_FORM = re.compile(r"[0-9]{3}([- ])[0-9]{2}\1[0-9]{4}")
SHORT_LAST_GROUP = re.compile(r"[^0-9][0-9]$|  ")
BEFORE_CHARACTERS = 40


def before(text: str, start: int) -> str:
    """The line up to `start`, as far as words there say what a number is."""
    return text[max(0, start - BEFORE_CHARACTERS) : start]


def is_email(local: str, domain: str, after: str) -> bool:
    """after: the character that follows."""
    labels = domain.lower().split(".")
    if len(labels) < 2 or any(label[0] == "-" or label[-1] == "-" for label in labels):
        return False
    if labels[-1] not in TOP_LEVELS and not labels[-1].startswith("xn--"):
        return False
    if ".".join(labels[-2:]) in RESERVED_DOMAINS:
        return False
    if local.lower() in SSH_ACCOUNTS and after in (":", "/"):
        return False
    # `x@y.transpose()` multiplies matrices; `@` comes twice in `a@b.c@d`, which is no address.
    return after not in ("(", "@", "[", "=")


def is_card(digits: str) -> bool:
    """An issuer's first digits and length, and Luhn's check digit (ISO/IEC 7812-1)."""
    return (
        any(
            len(digits) in lengths and low <= int(digits[: len(str(low))]) <= high
            for low, high, lengths in CARD_ISSUERS
        )
        and len(set(digits)) > 1
        and passes_luhn(digits)
    )


def passes_luhn(digits: str) -> bool:
    from stdnum import luhn

    return luhn.is_valid(digits)


def is_iban(compact: str) -> bool:
    """The country's length and structure, and the remainder 1 modulo 97 (ISO 13616)."""
    from stdnum import iban

    return iban.is_valid(compact, check_country=False)


def is_ipv4(text: str, start: int, stop: int, private: bool) -> bool:
    """Whether text[start:stop], four numbers and three dots, is an address rather than a version,
    a section or an object identifier; private: also one that is not reachable from outside."""
    numbers = text[start:stop].split(".")
    if any(int(n) > 255 or (len(n) > 1 and n[0] == "0") for n in numbers):
        return False
    address = ipaddress.IPv4Address(".".join(numbers))
    if not _counts(address, private):
        return False
    ahead = _context(text, start)
    if VERSION_BEFORE.search(ahead):
        return False
    if URL_BEFORE.search(ahead):
        return True
    # `Java 8.0.202.8`, but not `Berlin 81.9.8.41` and `Blocked 5.188.10.76`.
    versionlike = all(int(n) < MAX_VERSION_PART for n in numbers[:2])
    if versionlike and _is_product(ahead) and not ADDRESS_AFTER.match(text, stop):
        return False
    small = all(int(n) < MAX_VERSION_PART for n in numbers)
    return not (small and address.is_global) or _says_address(text, ahead, stop)


def _is_product(ahead: str) -> bool:
    name = PRODUCT_BEFORE.search(ahead)
    if name is None:
        return False
    word = CONTEXT.fullmatch(name[1])
    return SERVER_BEFORE.search(ahead) is not None or word is None or word["address"] is None


def _context(text: str, start: int) -> str:
    """What stands before an address on its line, without the addresses of the same list."""
    ahead = text[max(0, start - CONTEXT_CHARACTERS) : start]
    ahead = EARLIER_ADDRESSES.sub("", ahead)
    return LIST_BEGIN.sub(r"\1 ", ahead)[-CONTEXT_CHARACTERS:]


def _says_address(text: str, ahead: str, stop: int) -> bool:
    """Whether words around four small numbers say that they are an address."""
    sentence = SENTENCE_END.split(ahead)[-1][-2 * BEFORE_CHARACTERS :]
    words = list(CONTEXT.finditer(sentence))
    if words:
        return words[-1]["address"] is not None
    return bool(FROM_BEFORE.search(sentence) or ADDRESS_AFTER.match(text, stop))


def is_ipv6(candidate: str, private: bool) -> bool:
    try:
        address = ipaddress.IPv6Address(candidate)
    except ValueError:
        return False
    if address.ipv4_mapped is not None:
        return _counts(address.ipv4_mapped, private)
    if sum(map(bool, candidate.split(":"))) < 2:
        # A network, or the year that ends a line of reStructuredText (`in 2004::`).
        return False
    # All addresses that are given out begin with 001 (RFC 4291); `face::b` is a name in C++.
    unicast = address in ipaddress.IPv6Network("2000::/3")
    local = address.is_link_local or address in ipaddress.IPv6Network("fc00::/7")
    return (unicast and _counts(address, private)) or (private and local)


def _counts(address: ipaddress.IPv4Address | ipaddress.IPv6Address, private: bool) -> bool:
    """Neither for documentation (RFC 5737, 3849), nor this machine, nor everybody."""
    if address.is_multicast or address.is_loopback or address.is_unspecified:
        return False
    if address.is_global:
        return True
    lan = any(
        address in ipaddress.ip_network(network)
        for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
        if address.version == 4
    )
    return private and (lan or address.is_link_local)


def is_phone(text: str, start: int, stop: int, locales: tuple[str, ...]) -> bool:
    """An assigned number that is also written like one: with a country code, in a style that only
    telephone numbers have, or after a word such as "tel"."""
    written = text[start:stop]
    ahead = before(text, start)
    if SHORT_LAST_GROUP.search(written) or NUMBER_BEFORE.search(ahead):
        return False
    if written.count("(") != written.count(")"):
        return False
    if text[stop : stop + 1] == ":" and text[stop + 1 : stop + 2].isdigit():
        return False
    if written.startswith("+"):
        return _is_assigned(written, None)
    if DATE.search(written):
        return False
    named = PHONE_BEFORE.search(ahead) is not None
    if SSN_FORM.fullmatch(written) and not named:
        return False
    separated = any(c in " .-/()" for c in written)
    if written.startswith("00") and (named or separated) and _is_assigned("+" + written[2:], None):
        return True
    for locale in locales:
        styled = (
            NANP.fullmatch(written)
            if locale in ("US", "CA")
            else TRUNK.match(written) and sum(map(str.isdigit, written)) >= 9
        )
        if (named or styled) and _is_assigned(written, locale):
            return True
    return False


@lru_cache(maxsize=65536)
def _is_assigned(number: str, locale: str | None) -> bool:
    """By the numbering plans; not one of those kept for fiction (NANP 555-01xx)."""
    import phonenumbers

    try:
        parsed = phonenumbers.parse(number, locale)
    except phonenumbers.NumberParseException:
        return False
    if parsed.country_code == 1 and str(parsed.national_number)[3:8] == "55501":
        return False
    return phonenumbers.is_valid_number(parsed)
