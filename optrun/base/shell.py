"""Write words and commands for a shell, quoted so that a person can read them."""

import re
import shlex
from collections.abc import Iterable


def quote(word: str) -> str:
    r"""Quote a word for a POSIX shell, in double quotes if it has single ones.

    `shlex.quote` leaves each of those as five characters; it is used where a shell would read
    something else between double quotes.

    Example:
        >>> print(quote("lr=1e-3"), quote("data.train=my file.csv"), quote("out='a b'"))
        lr=1e-3 'data.train=my file.csv' "out='a b'"
    """
    if "'" in word and not re.search(r'["$`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def join(words: Iterable[str]) -> str:
    """Quote words and join them to a command for a POSIX shell."""
    return " ".join(map(quote, words))
