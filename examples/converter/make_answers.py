"""Writes answers.jsonl: what a large model answers for every component and stage of converter.tiki.

A stand-in for such a model, so that the whole tree can be built without one. Some first answers are wrong on
purpose, as a model's are: they hold the cases that the prompt shows and fail those that it does not.

Run: `python examples/converter/make_answers.py`.
"""

import json
from pathlib import Path

ANSWERS: dict[tuple[str, int], list[str]] = {}


def answer(component: str, stage: int, source: str) -> None:
    ANSWERS.setdefault((component, stage), []).append(source.strip() + "\n")


answer(
    "1.1",
    1,
    '''
def normalize_newlines(text: str) -> str:
    """Write every line end as a line feed."""
    return text.replace("\\r\\n", "\\n")
''',
)
answer(
    "1.1",
    2,
    '''
def normalize_newlines(text: str) -> str:
    """Write every line end as a line feed."""
    return text.replace("\\r\\n", "\\n").replace("\\r", "\\n")
''',
)
answer(
    "1.1",
    4,
    '''
def normalize_newlines(text: str) -> str:
    """Write every line end as a line feed."""
    if not isinstance(text, str):
        raise TypeError("text must be a string")
    return text.replace("\\r\\n", "\\n").replace("\\r", "\\n")
''',
)

answer(
    "1.2",
    1,
    '''
def split_lines(text: str) -> list[str]:
    """Split text at line feeds."""
    return text.splitlines()
''',
)
answer(
    "1.2",
    1,
    '''
def split_lines(text: str) -> list[str]:
    """Split text at line feeds; one at the end begins no further line."""
    lines = []
    current = ""
    for letter in text:
        if letter == "\\n":
            lines.append(current)
            current = ""
        else:
            current += letter
    if current:
        lines.append(current)
    return lines
''',
)
answer(
    "1.2",
    2,
    '''
def split_lines(text: str) -> list[str]:
    """Split text at line feeds; one at the end begins no further line."""
    lines = text.split("\\n")
    if lines[-1] == "":
        lines.pop()
    return lines
''',
)
answer(
    "1.2",
    3,
    '''
def split_lines(text: str) -> list[str]:
    """Split text at line feeds; one at the end begins no further line."""
    lines = text.split("\\n")
    return lines if lines[-1] else lines[:-1]
''',
)
answer(
    "1.2",
    4,
    '''
def split_lines(text: str) -> list[str]:
    """Split text at line feeds; one at the end begins no further line."""
    if not isinstance(text, str):
        raise TypeError("text must be a string")
    lines = text.split("\\n")
    return lines if lines[-1] else lines[:-1]
''',
)

answer(
    "1.3",
    1,
    '''
def strip_bom(text: str) -> str:
    """Remove a byte order mark."""
    return text.replace("\\ufeff", "")
''',
)
answer(
    "1.3",
    1,
    '''
def strip_bom(text: str) -> str:
    """Remove one byte order mark from the beginning."""
    return text[1:] if text[:1] == "\\ufeff" else text
''',
)
answer(
    "1.3",
    4,
    '''
def strip_bom(text: str) -> str:
    """Remove one byte order mark from the beginning."""
    if not isinstance(text, str):
        raise TypeError("text must be a string")
    return text[1:] if text[:1] == "\\ufeff" else text
''',
)

answer(
    "1.4",
    1,
    '''
def collapse_spaces(text: str) -> str:
    """Replace every run of spaces and tabs by one space."""
    return " ".join(text.split())
''',
)
answer(
    "1.4",
    2,
    '''
def collapse_spaces(text: str) -> str:
    """Replace every run of spaces and tabs by one space, and remove them at both ends."""
    found = ""
    for letter in text.replace("\\t", " ").strip(" "):
        if letter != " " or not found.endswith(" "):
            found += letter
    return found
''',
)
answer(
    "1.4",
    3,
    '''
def collapse_spaces(text: str) -> str:
    """Replace every run of spaces and tabs by one space, and remove them at both ends."""
    words = text.replace("\\t", " ").strip(" ").split(" ")
    return " ".join([words[0], *filter(None, words[1:])])
''',
)
answer(
    "1.4",
    4,
    '''
def collapse_spaces(text: str) -> str:
    """Replace every run of spaces and tabs by one space, and remove them at both ends."""
    if not isinstance(text, str):
        raise TypeError("text must be a string")
    words = text.replace("\\t", " ").strip(" ").split(" ")
    return " ".join([words[0], *filter(None, words[1:])])
''',
)

answer(
    "1.5",
    1,
    '''
def indent_lines(text: str, width: int) -> str:
    """Put this many spaces before every line that is not empty."""
    return "\\n".join(" " * width + line for line in text.split("\\n"))
''',
)
answer(
    "1.5",
    1,
    '''
def indent_lines(text: str, width: int) -> str:
    """Put this many spaces before every line that is not empty."""
    return "\\n".join(" " * width + line if line else "" for line in text.split("\\n"))
''',
)
answer(
    "1.5",
    4,
    '''
def indent_lines(text: str, width: int) -> str:
    """Put this many spaces before every line that is not empty."""
    if width < 0:
        raise ValueError("width must not be negative")
    return "\\n".join(" " * width + line if line else "" for line in text.split("\\n"))
''',
)

answer(
    "2.1",
    1,
    '''
def detect_delimiter(line: str) -> str:
    """The delimiter that occurs most often in a line."""
    best = ","
    for delimiter in (",", ";", "\\t", "|"):
        if line.count(delimiter) > line.count(best):
            best = delimiter
    return best
''',
)
answer(
    "2.1",
    2,
    '''
def detect_delimiter(line: str) -> str:
    """The delimiter that occurs most often in a line, outside of double quotes."""
    plain = "".join(line.split('"')[::2])
    best = ","
    for delimiter in (",", ";", "\\t", "|"):
        if plain.count(delimiter) > plain.count(best):
            best = delimiter
    return best
''',
)
answer(
    "2.1",
    3,
    '''
def detect_delimiter(line: str) -> str:
    """The delimiter that occurs most often in a line, outside of double quotes."""
    plain = "".join(line.split('"')[::2])
    return max(",;\\t|", key=plain.count)
''',
)
answer(
    "2.1",
    4,
    '''
def detect_delimiter(line: str) -> str:
    """The delimiter that occurs most often in a line, outside of double quotes."""
    if not isinstance(line, str):
        raise TypeError("line must be a string")
    plain = "".join(line.split('"')[::2])
    return max(",;\\t|", key=plain.count)
''',
)

answer(
    "2.2",
    1,
    '''
from converter.split_lines import split_lines


def detect_format(text: str) -> str:
    """Name the format of a text."""
    lines = split_lines(text.lstrip())
    if not lines:
        return "text"
    if lines[0][0] in "{[":
        return "json"
    if lines[0][0] == "<":
        return "html"
    if len(lines) > 1 and "-" in lines[1] and set(lines[1]) <= set("|-: "):
        return "markdown"
    return "csv" if "," in lines[0] or ";" in lines[0] else "text"
''',
)
answer(
    "2.2",
    4,
    '''
from converter.split_lines import split_lines


def detect_format(text: str) -> str:
    """Name the format of a text."""
    if not isinstance(text, str):
        raise TypeError("text must be a string")
    lines = split_lines(text.lstrip())
    if not lines:
        return "text"
    if lines[0][0] in "{[":
        return "json"
    if lines[0][0] == "<":
        return "html"
    if len(lines) > 1 and "-" in lines[1] and set(lines[1]) <= set("|-: "):
        return "markdown"
    return "csv" if "," in lines[0] or ";" in lines[0] else "text"
''',
)

answer(
    "3.1",
    1,
    '''
def parse_csv_line(line: str, delimiter: str) -> list[str]:
    """Split one line at the delimiter."""
    return line.split(delimiter)
''',
)
answer(
    "3.1",
    2,
    '''
def parse_csv_line(line: str, delimiter: str) -> list[str]:
    """Split one line at the delimiter; fields may be in double quotes."""
    fields = [""]
    quoted = False
    index = 0
    while index < len(line):
        letter = line[index]
        if letter == '"' and quoted and line[index + 1 : index + 2] == '"':
            fields[-1] += '"'
            index += 1
        elif letter == '"':
            quoted = not quoted
        elif letter == delimiter and not quoted:
            fields.append("")
        else:
            fields[-1] += letter
        index += 1
    return fields
''',
)
answer(
    "3.1",
    3,
    '''
def parse_csv_line(line: str, delimiter: str) -> list[str]:
    """Split one line at the delimiter; fields may be in double quotes."""
    fields = [""]
    for number, part in enumerate(line.split('"')):
        if number % 2:
            fields[-1] += part
        else:
            if not part and 0 < number < line.count('"'):
                fields[-1] += '"'
            first, *others = part.split(delimiter)
            fields[-1] += first
            fields += others
    return fields
''',
)
answer(
    "3.1",
    4,
    '''
def parse_csv_line(line: str, delimiter: str) -> list[str]:
    """Split one line at the delimiter; fields may be in double quotes."""
    if len(delimiter) != 1:
        raise ValueError("the delimiter must be one character")
    fields = [""]
    quoted = False
    index = 0
    while index < len(line):
        letter = line[index]
        if letter == '"' and quoted and line[index + 1 : index + 2] == '"':
            fields[-1] += '"'
            index += 1
        elif letter == '"':
            quoted = not quoted
        elif letter == delimiter and not quoted:
            fields.append("")
        else:
            fields[-1] += letter
        index += 1
    return fields
''',
)
answer(
    "3.1",
    4,
    '''
def parse_csv_line(line: str, delimiter: str) -> list[str]:
    """Split one line at the delimiter; fields may be in double quotes."""
    if len(delimiter) != 1:
        raise ValueError("the delimiter must be one character")
    fields = [""]
    for number, part in enumerate(line.split('"')):
        if number % 2:
            fields[-1] += part
        else:
            if not part and 0 < number < line.count('"'):
                fields[-1] += '"'
            first, *others = part.split(delimiter)
            fields[-1] += first
            fields += others
    return fields
''',
)

answer(
    "3.2",
    1,
    '''
from converter.detect_delimiter import detect_delimiter
from converter.parse_csv_line import parse_csv_line
from converter.split_lines import split_lines


def parse_csv(text: str) -> list[list[str]]:
    """Rows of a delimited text."""
    lines = [line for line in split_lines(text) if line]
    if not lines:
        return []
    delimiter = detect_delimiter(lines[0])
    return [parse_csv_line(line, delimiter) for line in lines]
''',
)
answer(
    "3.2",
    2,
    '''
from converter.detect_delimiter import detect_delimiter
from converter.normalize_newlines import normalize_newlines
from converter.parse_csv_line import parse_csv_line
from converter.split_lines import split_lines
from converter.strip_bom import strip_bom


def parse_csv(text: str) -> list[list[str]]:
    """Rows of a delimited text; a byte order mark and other line ends do not matter."""
    lines = [line for line in split_lines(normalize_newlines(strip_bom(text))) if line]
    if not lines:
        return []
    delimiter = detect_delimiter(lines[0])
    return [parse_csv_line(line, delimiter) for line in lines]
''',
)

answer(
    "3.3",
    1,
    '''
def format_csv_field(value: str) -> str:
    """One field as CSV has it."""
    return f'"{value}"' if "," in value else value
''',
)
answer(
    "3.3",
    2,
    '''
def format_csv_field(value: str) -> str:
    """One field as CSV has it."""
    for letter in ',"\\n\\r':
        if letter in value:
            return '"' + value.replace('"', '""') + '"'
    return value
''',
)
answer(
    "3.3",
    3,
    '''
def format_csv_field(value: str) -> str:
    """One field as CSV has it."""
    return value if set(',"\\n\\r').isdisjoint(value) else '"' + value.replace('"', '""') + '"'
''',
)
answer(
    "3.3",
    4,
    '''
def format_csv_field(value: str) -> str:
    """One field as CSV has it."""
    if not isinstance(value, str):
        raise TypeError("value must be a string")
    return value if set(',"\\n\\r').isdisjoint(value) else '"' + value.replace('"', '""') + '"'
''',
)

answer(
    "3.4",
    1,
    '''
from converter.format_csv_field import format_csv_field


def format_csv(rows: list[list[str]]) -> str:
    """Rows as CSV text."""
    text = ""
    for row in rows:
        text += ",".join(format_csv_field(field) for field in row) + "\\n"
    return text
''',
)
answer(
    "3.4",
    3,
    '''
from converter.format_csv_field import format_csv_field


def format_csv(rows: list[list[str]]) -> str:
    """Rows as CSV text."""
    return "".join(",".join(map(format_csv_field, row)) + "\\n" for row in rows)
''',
)
answer(
    "3.4",
    4,
    '''
from converter.format_csv_field import format_csv_field


def format_csv(rows: list[list[str]]) -> str:
    """Rows as CSV text."""
    if any(isinstance(row, str) for row in rows):
        raise TypeError("a row must be a list of fields")
    return "".join(",".join(map(format_csv_field, row)) + "\\n" for row in rows)
''',
)

answer(
    "4.1",
    1,
    '''
def rows_to_records(rows: list[list[str]]) -> list[dict]:
    """The first row names the keys; every other row becomes a mapping."""
    return [dict(zip(rows[0], row)) for row in rows[1:]]
''',
)
answer(
    "4.1",
    2,
    '''
def rows_to_records(rows: list[list[str]]) -> list[dict]:
    """The first row names the keys; every other row becomes a mapping."""
    records = []
    for row in rows[1:]:
        record = {}
        for place, key in enumerate(rows[0]):
            record[key] = row[place] if place < len(row) else ""
        records.append(record)
    return records
''',
)
answer(
    "4.1",
    3,
    '''
def rows_to_records(rows: list[list[str]]) -> list[dict]:
    """The first row names the keys; every other row becomes a mapping."""
    keys = rows[0] if rows else []
    return [dict(zip(keys, row + [""] * len(keys))) for row in rows[1:]]
''',
)

answer(
    "4.2",
    1,
    '''
def records_to_rows(records: list[dict]) -> list[list[str]]:
    """A row of keys, then a row of values for each record."""
    if not records:
        return []
    keys = list(records[0])
    return [keys, *([record[key] for key in keys] for record in records)]
''',
)
answer(
    "4.2",
    2,
    '''
def records_to_rows(records: list[dict]) -> list[list[str]]:
    """A row of keys in the order they first occur, then a row of values for each record."""
    if not records:
        return []
    keys = []
    for record in records:
        for key in record:
            if key not in keys:
                keys.append(key)
    return [keys, *([record.get(key, "") for key in keys] for record in records)]
''',
)
answer(
    "4.2",
    3,
    '''
def records_to_rows(records: list[dict]) -> list[list[str]]:
    """A row of keys in the order they first occur, then a row of values for each record."""
    if not records:
        return []
    keys = list(dict.fromkeys(key for record in records for key in record))
    return [keys, *([record.get(key, "") for key in keys] for record in records)]
''',
)

answer(
    "5.1",
    1,
    '''
def escape_markdown_cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\\\|")
''',
)
answer(
    "5.1",
    2,
    '''
def escape_markdown_cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\\\|").replace("\\n", "<br>")
''',
)
answer(
    "5.1",
    4,
    '''
def escape_markdown_cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    if not isinstance(text, str):
        raise TypeError("text must be a string")
    return text.replace("|", "\\\\|").replace("\\n", "<br>")
''',
)

answer(
    "5.2",
    1,
    '''
def format_markdown_row(cells: list[str]) -> str:
    """Cells as one row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
''',
)
answer(
    "5.2",
    1,
    '''
from converter.escape_markdown_cell import escape_markdown_cell


def format_markdown_row(cells: list[str]) -> str:
    """Cells as one row of a Markdown table."""
    return "| " + " | ".join(escape_markdown_cell(cell) for cell in cells) + " |"
''',
)
answer(
    "5.2",
    3,
    '''
from converter.escape_markdown_cell import escape_markdown_cell


def format_markdown_row(cells: list[str]) -> str:
    """Cells as one row of a Markdown table."""
    return "| " + " | ".join(map(escape_markdown_cell, cells)) + " |"
''',
)
answer(
    "5.2",
    4,
    '''
from converter.escape_markdown_cell import escape_markdown_cell


def format_markdown_row(cells: list[str]) -> str:
    """Cells as one row of a Markdown table."""
    if not cells:
        raise ValueError("a row needs at least one cell")
    return "| " + " | ".join(map(escape_markdown_cell, cells)) + " |"
''',
)

answer(
    "5.3",
    1,
    '''
from converter.format_markdown_row import format_markdown_row


def format_markdown_table(rows: list[list[str]]) -> str:
    """Rows as a Markdown table."""
    if not rows:
        return ""
    lines = [format_markdown_row(rows[0]), format_markdown_row(["---"] * len(rows[0]))]
    for row in rows[1:]:
        lines.append(format_markdown_row(row))
    return "\\n".join(lines) + "\\n"
''',
)
answer(
    "5.3",
    2,
    '''
from converter.format_markdown_row import format_markdown_row


def format_markdown_table(rows: list[list[str]]) -> str:
    """Rows as a Markdown table, filled up or cut to the width of the first."""
    if not rows:
        return ""
    width = len(rows[0])
    lines = [format_markdown_row(rows[0]), format_markdown_row(["---"] * width)]
    for row in rows[1:]:
        lines.append(format_markdown_row((row + [""] * width)[:width]))
    return "\\n".join(lines) + "\\n"
''',
)
answer(
    "5.3",
    4,
    '''
from converter.format_markdown_row import format_markdown_row


def format_markdown_table(rows: list[list[str]]) -> str:
    """Rows as a Markdown table, filled up or cut to the width of the first."""
    if not rows:
        return ""
    if any(isinstance(row, str) for row in rows):
        raise TypeError("a row must be a list of cells")
    width = len(rows[0])
    lines = [format_markdown_row(rows[0]), format_markdown_row(["---"] * width)]
    for row in rows[1:]:
        lines.append(format_markdown_row((row + [""] * width)[:width]))
    return "\\n".join(lines) + "\\n"
''',
)

answer(
    "5.4",
    1,
    '''
def parse_markdown_row(line: str) -> list[str]:
    """The cells of one row of a Markdown table."""
    return [cell.strip() for cell in line.strip("|").split("|")]
''',
)
answer(
    "5.4",
    2,
    '''
def parse_markdown_row(line: str) -> list[str]:
    """The cells of one row of a Markdown table; escaped bars do not split."""
    inner = line.strip().replace("\\\\|", "\\0")
    inner = inner.removeprefix("|").removesuffix("|")
    cells = []
    for cell in inner.split("|"):
        cells.append(cell.strip().replace("\\0", "|").replace("<br>", "\\n"))
    return cells
''',
)
answer(
    "5.4",
    3,
    '''
def parse_markdown_row(line: str) -> list[str]:
    """The cells of one row of a Markdown table; escaped bars do not split."""
    inner = line.strip().replace("\\\\|", "\\0").removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\0", "|").replace("<br>", "\\n") for cell in inner.split("|")]
''',
)
answer(
    "5.4",
    4,
    '''
def parse_markdown_row(line: str) -> list[str]:
    """The cells of one row of a Markdown table; escaped bars do not split."""
    if not isinstance(line, str):
        raise TypeError("line must be a string")
    inner = line.strip().replace("\\\\|", "\\0").removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\0", "|").replace("<br>", "\\n") for cell in inner.split("|")]
''',
)

answer(
    "5.5",
    1,
    '''
from converter.normalize_newlines import normalize_newlines
from converter.parse_markdown_row import parse_markdown_row
from converter.split_lines import split_lines


def parse_markdown_table(text: str) -> list[list[str]]:
    """The rows of a Markdown table without the row of dashes."""
    rows = []
    for line in split_lines(normalize_newlines(text)):
        if "|" in line and not set(line) <= set("|-: "):
            rows.append(parse_markdown_row(line))
    return rows
''',
)

answer(
    "6.1",
    1,
    '''
def escape_html(text: str) -> str:
    """Text as HTML shows it."""
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("&", "&amp;")
''',
)
answer(
    "6.1",
    1,
    '''
def escape_html(text: str) -> str:
    """Text as HTML shows it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
''',
)
answer(
    "6.1",
    2,
    '''
def escape_html(text: str) -> str:
    """Text as HTML shows it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
''',
)
answer(
    "6.1",
    4,
    '''
def escape_html(text: str) -> str:
    """Text as HTML shows it."""
    if not isinstance(text, str):
        raise TypeError("text must be a string")
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
''',
)

answer(
    "6.2",
    1,
    '''
from converter.escape_html import escape_html


def format_html_table(rows: list[list[str]]) -> str:
    """Rows as an HTML table on one line."""
    if not rows:
        return ""
    html = ""
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        html += "<tr>"
        for cell in row:
            html += f"<{tag}>{escape_html(cell)}</{tag}>"
        html += "</tr>"
    return f"<table>{html}</table>"
''',
)
answer(
    "6.2",
    3,
    '''
from converter.escape_html import escape_html


def format_html_table(rows: list[list[str]]) -> str:
    """Rows as an HTML table on one line."""
    if not rows:
        return ""
    html = ""
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        html += "<tr>" + "".join([f"<{tag}>{escape_html(cell)}</{tag}>" for cell in row]) + "</tr>"
    return f"<table>{html}</table>"
''',
)
answer(
    "6.2",
    4,
    '''
from converter.escape_html import escape_html


def format_html_table(rows: list[list[str]]) -> str:
    """Rows as an HTML table on one line."""
    if not rows:
        return ""
    if any(isinstance(row, str) for row in rows):
        raise TypeError("a row must be a list of cells")
    html = ""
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        html += "<tr>" + "".join([f"<{tag}>{escape_html(cell)}</{tag}>" for cell in row]) + "</tr>"
    return f"<table>{html}</table>"
''',
)

answer(
    "6.3",
    1,
    '''
def unescape_html(html: str) -> str:
    """The named entities as characters."""
    return html.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
''',
)
answer(
    "6.3",
    2,
    '''
def unescape_html(html: str) -> str:
    """The named entities as characters; all else stays."""
    for entity, letter in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        html = html.replace(entity, letter)
    return html
''',
)
answer(
    "6.3",
    3,
    '''
def unescape_html(html: str) -> str:
    """The named entities as characters; all else stays."""
    return html.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
''',
)
answer(
    "6.3",
    4,
    '''
def unescape_html(html: str) -> str:
    """The named entities as characters; all else stays."""
    if not isinstance(html, str):
        raise TypeError("html must be a string")
    return html.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
''',
)

answer(
    "0",
    1,
    '''
from converter.format_csv import format_csv
from converter.format_markdown_table import format_markdown_table
from converter.parse_csv import parse_csv
from converter.parse_markdown_table import parse_markdown_table


def convert(text: str, source: str, target: str) -> str:
    """Convert a table from one text format to another."""
    if source == "csv":
        rows = parse_csv(text)
    else:
        rows = parse_markdown_table(text)
    if target == "csv":
        return format_csv(rows)
    return format_markdown_table(rows)
''',
)
answer(
    "0",
    2,
    '''
from converter.format_csv import format_csv
from converter.format_html_table import format_html_table
from converter.format_markdown_table import format_markdown_table
from converter.parse_csv import parse_csv
from converter.parse_markdown_table import parse_markdown_table


def convert(text: str, source: str, target: str) -> str:
    """Convert a table from one text format to another."""
    if source == "csv":
        rows = parse_csv(text)
    else:
        rows = parse_markdown_table(text)
    if target == "csv":
        return format_csv(rows)
    if target == "html":
        return format_html_table(rows)
    return format_markdown_table(rows)
''',
)
answer(
    "0",
    4,
    '''
from converter.format_csv import format_csv
from converter.format_html_table import format_html_table
from converter.format_markdown_table import format_markdown_table
from converter.parse_csv import parse_csv
from converter.parse_markdown_table import parse_markdown_table


def convert(text: str, source: str, target: str) -> str:
    """Convert a table from one text format to another."""
    if source not in ("csv", "markdown") or target not in ("csv", "markdown", "html"):
        raise ValueError(f"{source} to {target} is no known conversion")
    if source == "csv":
        rows = parse_csv(text)
    else:
        rows = parse_markdown_table(text)
    if target == "csv":
        return format_csv(rows)
    if target == "html":
        return format_html_table(rows)
    return format_markdown_table(rows)
''',
)


def main() -> None:
    path = Path(__file__).with_name("answers.jsonl")
    lines = []
    for (component, stage), sources in ANSWERS.items():
        for sample, source in enumerate(sources):
            text = f"```python\n{source}```"
            row = {"component": component, "stage": stage, "sample": sample, "text": text}
            lines.append(json.dumps(row, ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
