"""English text to train on, with or without a network, and batches of tokens made of it.

``load_text()`` needs no download: every CPython carries its language reference as plain English in
``pydoc_data.topics``. That text differs a little between Python versions, so no compared output may depend on
its words. ``load_text("books")`` fetches the books of ``data/books.json`` once and keeps them in a cache.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from memsave_lib.arguments import whole_number

BOOKS_FILE = Path(__file__).resolve().parents[2] / "data" / "books.json"
BYTES = 256
_MARKER = r"^\*\*\* ?{} OF TH(?:E|IS) PROJECT GUTENBERG EBOOK.*$"


@dataclass(frozen=True)
class Text:
    """English text (``content``) and a sentence that says where it comes from (``origin``)."""

    content: str
    origin: str


class NotABook(ValueError):
    """What was downloaded is not a text of Project Gutenberg: an error page, say."""


def load_text(
    source: str = "embedded",
    *,
    books: Sequence[int] | None = None,
    url: str | None = None,
    cache_dir: str | Path | None = None,
    timeout: float = 20.0,
) -> Text:
    """Text to train on: Python's own language reference, or books.

    Args:
        source: ``"embedded"`` (no network) or ``"books"``.
        books: numbers of books at Project Gutenberg; default: all of ``data/books.json``.
        url: where to download, with ``{id}`` in it; default: the address in ``data/books.json``.
        cache_dir: where downloaded books stay; default: the user's cache directory.
        timeout: seconds to wait for the server, at each step of the conversation.

    A book that can neither be found in the cache nor downloaded does not stop the course: the embedded text
    takes its place, and ``origin`` says so and why.
    """
    if source not in ("embedded", "books"):
        raise ValueError(f'source is "embedded" or "books", got {source!r}')
    if source == "embedded":
        return _embedded()
    catalogue = json.loads(BOOKS_FILE.read_text(encoding="utf-8"))
    numbers = [book["id"] for book in catalogue["books"]] if books is None else list(books)
    if not numbers:
        raise ValueError("books=[] names no book; give at least one number, such as 1342")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"a book is given by its number, such as 1342; got {number!r}")
    directory = Path(cache_dir) if cache_dir is not None else user_cache_dir()
    try:
        contents = [_book(number, url or catalogue["url"], directory, timeout) for number in numbers]
    except (OSError, HTTPException, NotABook) as error:
        embedded = _embedded()
        reason = f"The books could not be fetched ({type(error).__name__}: {error})."
        return Text(embedded.content, f"{reason} Instead: {embedded.origin}")
    titles = {book["id"]: book["title"] for book in catalogue["books"]}
    names = ", ".join(titles.get(number, f"book {number}") for number in numbers)
    return Text("\n\n".join(contents), f"Project Gutenberg: {names}.")


def tokenize(text: str, vocab_size: int = BYTES) -> Tensor:
    """Token numbers below ``vocab_size``, shape ``(tokens,)``, dtype int64.

    256 means bytes of UTF-8. More means byte-pair encoding: starting from bytes, the most frequent pair of
    neighbours within words becomes a new token, again and again, until the vocabulary is full. It is
    learned from this very text, in a second or two, and always in the same way.
    """
    whole_number("vocab_size", vocab_size, at_least=BYTES)
    if vocab_size == BYTES:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([text], trainer)
    return torch.tensor(tokenizer.encode(text).ids)


def batches(
    text: str, seq_len: int, batch_size: int, *, vocab_size: int = BYTES, steps: int = 10, seed: int = 0
) -> list[Tensor]:
    """``steps`` batches of token numbers, each of shape ``(batch_size, seq_len)`` and dtype int64.

    Every sequence is a stretch of the text that starts at a random place; the same ``seed`` gives the same
    batches. A Hugging Face language model takes such a batch as ``input_ids`` and as ``labels``: it shifts
    the labels itself.
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size), ("steps", steps)):
        whole_number(name, value)
    tokens = tokenize(text, vocab_size)
    places = len(tokens) - seq_len + 1
    if places < 1:
        raise ValueError(f"seq_len={seq_len} is longer than the text, which has {len(tokens)} tokens")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(places, (steps, batch_size, 1), generator=generator)
    return list(tokens[starts + torch.arange(seq_len)])


def user_cache_dir() -> Path:
    """Where this user's downloads of the course stay."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "memsave" / "books"


def strip_licence(text: str) -> str:
    """A book without the header and footer that Project Gutenberg puts around it."""
    start = re.search(_MARKER.format("START"), text, re.MULTILINE)
    end = re.search(_MARKER.format("END"), text, re.MULTILINE)
    if not start or not end or end.start() < start.end():
        raise NotABook("its START and END lines are missing")
    return text[start.end() : end.start()].strip()


def _embedded() -> Text:
    # Headings' rules of stars and the asterisks of bold type are the only markup worth removing.
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    prose = re.sub(r"^[*=~^-]{3,}$\n", "", prose, flags=re.MULTILINE).replace("**", "")
    return Text(prose, "Python's language reference, which every Python carries (English, no download).")


def _book(number: int, url: str, directory: Path, timeout: float) -> str:
    cached = directory / f"{number}.txt"
    if cached.exists():
        return cached.read_text(encoding="utf-8")
    request = urllib.request.Request(url.format(id=number), headers={"User-Agent": "memsave-course"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        raw = answer.read().decode("utf-8")
    book = strip_licence(raw.replace("\r\n", "\n"))
    directory.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed: an interrupted run leaves no half a book that later runs would trust.
    unfinished = directory / f"{number}.txt.{os.getpid()}"
    unfinished.write_text(book, encoding="utf-8")
    unfinished.replace(cached)
    return book
