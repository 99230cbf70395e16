"""A tokenizer whose tokens are the pieces a test gives it: texts, parts of characters, special tokens."""


class PieceTokenizer:
    """Id i is `pieces[i]`, bytes or text; the ids behind them are the special tokens `specials`."""

    byte_exact = True
    adds_bos = False
    special_ids = {}  # noqa: RUF012  # nothing changes it

    def __init__(self, pieces, specials=()):
        self._bytes = [piece if isinstance(piece, bytes) else piece.encode() for piece in (*pieces, *specials)]
        self._plain = len(pieces)
        self.eos_ids = frozenset()

    @property
    def size(self):
        return len(self._bytes)

    def special(self, spelling):
        """The id of a special token."""
        return self._bytes.index(spelling.encode(), self._plain)

    def encode(self, text, *, add_special, parse_special=True):
        raise NotImplementedError("prompts of these tests are ids")

    def decode(self, ids, *, skip_special):
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i))).decode(
            errors="replace"
        )

    def token_bytes(self, token_id, *, first=False):
        return self._bytes[token_id] if 0 <= token_id < self.size else b""

    def is_special(self, token_id):
        return token_id >= self._plain

    def token_text(self, token_id):
        return self.token_bytes(token_id).decode(errors="replace")
