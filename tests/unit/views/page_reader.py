"""A page as a browser would take it apart."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "line", "circle", "rect", "path"}


class Reader(HTMLParser):
    """Tags must close in order; addresses, ids and what is seen are collected."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.ids, self.tags, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "data", "srcset"):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)
            assert not name.startswith("on"), name
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader
