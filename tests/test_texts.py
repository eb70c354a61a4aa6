"""Text for training: embedded, from books, and without a network; the network here is a server on 127.0.0.1."""

from __future__ import annotations

import http.server
import json
import threading
from collections import Counter

import pytest
import torch

from memsave_lib.course import texts

BOOK = "It was a bright day.\n\nThe end."
PAGE = (
    "The Project Gutenberg eBook\r\n\r\n*** START OF THE PROJECT GUTENBERG EBOOK FRANKENSTEIN ***\r\n\r\n"
    + BOOK.replace("\n", "\r\n")
    + "\r\n\r\n*** END OF THE PROJECT GUTENBERG EBOOK FRANKENSTEIN ***\r\nLicence ...\r\n"
)
PAGES = {
    "/84.txt": PAGE,
    "/85.txt": PAGE.replace("FRANKENSTEIN", "X").replace("*** START OF THE", "***START OF THIS"),
}


@pytest.fixture
def server(monkeypatch):
    """A web server with two books; ``.asked`` counts its requests, ``.url`` is its address with {id} in it."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked[self.path] += 1
            if self.path == "/login.txt":
                page = "<html>Please log in</html>"
            elif self.path in PAGES:
                page = PAGES[self.path]
            else:
                return self.send_error(404)
            body = page.encode()
            self.send_response(200)
            # One book arrives cut off: fewer bytes than announced.
            self.send_header("Content-Length", str(len(body) + 50 * (self.path == "/85.txt" and self.server.cut)))
            self.end_headers()
            self.wfile.write(body)
            return None

        def log_message(self, *args):
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.asked, running.cut = Counter(), False
        running.url = f"http://127.0.0.1:{running.server_port}/{{id}}.txt"
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_embedded_text_is_english_and_long_enough_for_the_course():
    text = texts.load_text()
    words = text.content.lower().split()
    assert len(text.content) > 300_000
    assert Counter(words).most_common(1)[0][0] == "the"
    assert "no download" in text.origin


def test_a_book_is_downloaded_once_and_loses_its_licence(server, tmp_path):
    for _ in range(2):
        text = texts.load_text("books", books=[84, 85], url=server.url, cache_dir=tmp_path)
        assert text.content == f"{BOOK}\n\n{BOOK}"
        assert text.origin == "Project Gutenberg: Frankenstein; or, the Modern Prometheus, book 85."
    assert server.asked == {"/84.txt": 1, "/85.txt": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["84.txt", "85.txt"]


def test_cached_books_need_no_network(server, tmp_path):
    texts.load_text("books", books=[84], url=server.url, cache_dir=tmp_path)
    text = texts.load_text("books", books=[84], url="http://127.0.0.1:1/{id}", cache_dir=tmp_path)
    assert text.content == BOOK


@pytest.mark.parametrize(
    ("books", "cut", "reason"),
    [([86], False, "HTTPError: HTTP Error 404"), ([84, 85], True, "IncompleteRead")],
    ids=["unknown book", "connection lost"],
)
def test_a_failed_download_falls_back_and_says_why(server, tmp_path, books, cut, reason):
    server.cut = cut
    text = texts.load_text("books", books=books, url=server.url, cache_dir=tmp_path)
    assert text.content == texts.load_text().content
    assert text.origin.startswith(f"The books could not be fetched ({reason}")
    assert text.origin.endswith(texts.load_text().origin)
    assert not any(file.name.startswith(str(books[-1])) for file in tmp_path.glob("*"))


def test_no_network_falls_back_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    text = texts.load_text("books", url="http://127.0.0.1:1/{id}", cache_dir=tmp_path)
    assert text.content == texts.load_text().content
    assert "URLError" in text.origin


def test_a_login_page_is_not_kept_as_a_book(server, tmp_path):
    url = server.url.replace("{id}", "login")
    text = texts.load_text("books", books=[84], url=url, cache_dir=tmp_path)
    assert "NotABook: its START and END lines are missing" in text.origin
    assert list(tmp_path.iterdir()) == []


def test_a_silent_server_is_given_up_after_the_timeout(tmp_path, monkeypatch):
    import socket

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{{id}}"
        text = texts.load_text("books", books=[84], url=url, cache_dir=tmp_path, timeout=0.2)
    assert "TimeoutError" in text.origin


def test_the_catalogue_names_books_and_an_address():
    catalogue = json.loads(texts.BOOKS_FILE.read_text(encoding="utf-8"))
    assert "{id}" in catalogue["url"]
    assert {book["id"] for book in catalogue["books"]} == {1342, 84, 2701, 11}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(source="novel"), 'source is "embedded" or "books", got \'novel\''),
        (dict(source="books", books=[]), "names no book"),
        (dict(source="books", books=[True]), "got True"),
        (dict(source="books", books=["84"]), "got '84'"),
    ],
)
def test_wrong_sources_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        texts.load_text(**arguments)


def test_bytes_are_the_tokens_of_the_smallest_vocabulary():
    assert texts.tokenize("Ab é").tolist() == [65, 98, 32, 0xC3, 0xA9]


@pytest.mark.parametrize("vocab_size", [257, 300, 1024])
def test_byte_pairs_fill_the_vocabulary_and_shorten_the_text(vocab_size):
    text = texts.load_text().content[:60_000]
    tokens = texts.tokenize(text, vocab_size)
    assert tokens.dtype == torch.int64
    assert 0 <= int(tokens.min()) and int(tokens.max()) == vocab_size - 1
    assert len(tokens) < len(texts.tokenize(text))
    assert torch.equal(tokens, texts.tokenize(text, vocab_size))


def test_byte_pairs_start_from_all_256_bytes():
    # One merge fits above the bytes: the three "ab". Everything else stays bytes, rare characters included.
    assert len("ababab z\u20ac".encode()) == 11
    assert len(texts.tokenize("ababab z\u20ac", 257)) == 8


def test_batches_are_stretches_of_the_text_and_repeat_with_their_seed():
    text = texts.load_text().content
    first = texts.batches(text, 48, 3, steps=4)
    assert [tuple(batch.shape) for batch in first] == [(3, 48)] * 4
    assert all(batch.dtype == torch.int64 for batch in first)
    assert bytes(first[1][2].tolist()) in text.encode()
    again, other = texts.batches(text, 48, 3, steps=4), texts.batches(text, 48, 3, steps=4, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_batches_reach_both_ends_of_the_text():
    (batch,) = texts.batches("abc", 2, 64, steps=1)
    assert {bytes(row.tolist()) for row in batch} == {b"ab", b"bc"}
    (whole,) = texts.batches("abc", 3, 1, steps=1)
    assert whole.tolist() == [[97, 98, 99]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(seq_len=4), ValueError, "seq_len=4 is longer than the text, which has 3 tokens"),
        (dict(seq_len=0), ValueError, "seq_len must be a whole number of at least 1, got 0"),
        (dict(batch_size=True), TypeError, "batch_size must be a whole number of at least 1, got True"),
        (dict(steps=1.0), TypeError, "steps must be a whole number of at least 1, got 1.0"),
        (dict(vocab_size=255), ValueError, "vocab_size must be a whole number of at least 256, got 255"),
    ],
)
def test_wrong_batches_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        texts.batches("abc", **{"seq_len": 2, "batch_size": 1, **arguments})
