"""Prose from a MediaWiki XML dump: a handful of regular expressions, good enough for a language model.

Markup that carries no sentence (references, tables, lists, pictures, most templates) goes away; links,
quotes and measures keep their words.
"""

import html
import re
from collections.abc import Iterator

MIN_ARTICLE_BYTES = 500
"""Shorter than this is a disambiguation page, a list or a stub."""

_PAGE = re.compile(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.S)
_HIDDEN = re.compile(
    r"<!--.*?-->|<ref[^<>]*/>|<(ref|math|gallery|timeline|source|syntaxhighlight|score|table)\b[^<>]*>.*?</\1\s*>",
    re.S | re.I,
)
_MEASURE = re.compile(r"\{\{convert\|([^{}|]*)\|([^{}|]*)[^{}]*\}\}", re.I)
_QUOTED = re.compile(r"\{\{(?:nowrap|(?:lang|transl)\|[^{}|]*)\|([^{}|]*)\}\}", re.I)
_TEMPLATE_OR_TABLE = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}")
_WEB_LINK = re.compile(r"(?<!\[)\[(?:https?:|ftp:)?//[^\s\]]*\s*([^\[\]]*)\]")
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_NAMESPACE = re.compile(r"\s*:?(file|image|category|media|[a-z]{2,3}(-[a-z]+)?)\s*:", re.I)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_LEFT_BY_TEMPLATES = (
    (re.compile(r" \([\s,;:]*\)"), ""),
    (re.compile(r"\([\s,;:]+"), "("),
    (re.compile(r" +(?=[,;)]|\.\s)"), ""),
)
"""Empty parentheses and spaces before a stop, where an infobox or a pronunciation stood."""
_NOT_PROSE = tuple("*#:;|!{}=_")
"""First characters of list items, table rows, headings and magic words."""


def clean_dump(xml: str) -> Iterator[tuple[str, bytes]]:
    """Title and plain UTF-8 text of every page that is an article with prose, in the dump's order."""
    for title, markup in _PAGE.findall(xml):
        markup = html.unescape(markup)
        if markup.lstrip().lower().startswith("#redirect"):
            continue
        text = clean_page(markup).encode()
        if len(text) >= MIN_ARTICLE_BYTES:
            yield html.unescape(title), text


def clean_page(markup: str) -> str:
    """The sentences of one page of wikitext, a paragraph to a line."""
    text = _HIDDEN.sub("", markup)
    text = _MEASURE.sub(r"\1 \2", text)
    text = _QUOTED.sub(r"\1", text)
    text = _from_the_inside(_TEMPLATE_OR_TABLE, "", text)
    text = _WEB_LINK.sub(r"\1", text)
    text = _from_the_inside(_LINK, _link_text, text)
    text = html.unescape(_TAG.sub("", text)).replace("'''", "").replace("''", "")
    for pattern, replacement in _LEFT_BY_TEMPLATES:
        text = pattern.sub(replacement, text)
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line and not line.startswith(_NOT_PROSE))


def _from_the_inside(pattern: re.Pattern, replacement, text: str) -> str:
    """Replace a bracket pattern that matches only innermost brackets until none is left."""
    found = 1
    while found:
        text, found = pattern.subn(replacement, text)
    return text


def _link_text(match: re.Match) -> str:
    """The words of ``[[target|words]]``; nothing of pictures, categories and other languages."""
    return "" if _NAMESPACE.match(match[1]) else match[1].rsplit("|", 1)[-1]
