"""SQL as tokens, so that two statements can be compared.

In: a text. Out: its tokens without white space, keywords in capitals; None where it is no SQL statement.
Operators, names, numbers and quoted text stay as they are. Does not parse, and does not know dialects.
"""

import re

_STATEMENT = re.compile(
    r"\s*(?:SELECT\b.*\bFROM\b|WITH\b.*\bAS\b|INSERT\s+INTO\b|REPLACE\s+INTO\b|MERGE\s+INTO\b"
    r"|UPDATE\b.*\bSET\b|DELETE\s+FROM\b|TRUNCATE\s+TABLE\b"
    r"|(?:CREATE|ALTER|DROP)\s+(?:\w+\s+)?(?:TABLE|VIEW|INDEX)\b)",
    re.IGNORECASE | re.DOTALL,
)
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|--[^\n]*|/\*.*?\*/|\d+(?:\.\d+)?\w*|[^\W\d][\w$]*"""
    r"""|<=>|<>|<=|>=|!=|==|=>|:=|::|\|\||->>|->|[^\s\w]""",
    re.DOTALL,
)
_QUOTES = {"'", '"', "`"}
_LISTED = """
    ALL ALTER AND ANY AS ASC AVG BEGIN BETWEEN BY CASE CAST COALESCE COLUMN COMMIT COUNT CREATE CROSS DEFAULT
    DELETE DESC DISTINCT DROP ELSE END EXCEPT EXISTS FALSE FETCH FIRST FOR FOREIGN FROM FULL GROUP HAVING IF
    ILIKE IN INDEX INNER INSERT INTERSECT INTERVAL INTO IS JOIN KEY LAST LEFT LIKE LIMIT MAX MERGE MIN NATURAL
    NEXT NOT NULL NULLS OFFSET ON ONLY OR ORDER OUTER OVER PARTITION PRIMARY RECURSIVE REFERENCES REPLACE
    RETURNING RIGHT ROLLBACK ROW ROWS SELECT SET SUM TABLE THEN TRUE TRUNCATE UNION UNIQUE UPDATE USING VALUES
    VIEW WHEN WHERE WINDOW WITH
    """
_KEYWORDS = frozenset(_LISTED.split())


def read_sql(text: str) -> tuple[str, ...] | None:
    """The tokens of a statement; None for other text and where a quote is not closed."""
    if _STATEMENT.match(text) is None:
        return None
    tokens = _TOKEN.findall(text)
    if any(token in _QUOTES for token in tokens):
        return None
    return tuple(token.upper() if token.upper() in _KEYWORDS else token for token in tokens)
