"""The King James Bible (4.3 MB, public domain) from the Debian packages, and a small GPT.

Character by character; its 66 books are natural shards of unequal size and style.

Shape suffixes: B batch, T places of the context, V vocabulary, E embedding.
"""

from __future__ import annotations

import re
import subprocess

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torchbft.primitives.errors import ConfigError
from torchbft.pytorch.data import Batch
from torchbft.pytorch.task import Task

COMMAND = ("bible", "-f", "gen1:1-rev22:21")
PATIENCE_S = 60
"""The whole text prints in a quarter of a second."""
VERSE = re.compile(r"(\d?[A-Za-z]+)\d+:\d+ (.*)")
BOOKS = 66
CONTEXT = 64
TEST_EVERY = 50
"""Every fiftieth window of a book is held out: 1,250 of 64,600."""
EVALUATED = 256
"""Held-out windows that an evaluation uses, spread over the books: 16,384 characters."""
EMBEDDING, HEADS, LAYERS = 64, 4, 2
LEARNING_RATE = 3e-3


class Block(nn.Module):
    """Attention and an MLP, each behind a norm (Radford et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(EMBEDDING), nn.LayerNorm(EMBEDDING)
        self.attention = nn.Linear(EMBEDDING, 3 * EMBEDDING, bias=False)
        self.out = nn.Linear(EMBEDDING, EMBEDDING, bias=False)
        self.up = nn.Linear(EMBEDDING, 4 * EMBEDDING)
        self.down = nn.Linear(4 * EMBEDDING, EMBEDDING)

    def forward(self, x_BTE: Tensor) -> Tensor:
        batch, places, _ = x_BTE.shape
        parts = self.attention(self.before(x_BTE)).view(batch, places, 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTE = x_BTE + self.out(seen.transpose(1, 2).reshape(batch, places, EMBEDDING))
        mlp: Tensor = self.down(functional.gelu(self.up(self.between(x_BTE))))
        return x_BTE + mlp


class GPT(nn.Module):
    """Next-character model; the output layer is the embedding (tied, one copy on the wire)."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, EMBEDDING)
        self.places = nn.Embedding(CONTEXT, EMBEDDING)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(EMBEDDING)
        self.head = nn.Linear(EMBEDDING, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, text_BT: Tensor) -> Tensor:
        """Characters int64 (B, T) to logits (B, T, V)."""
        x_BTE = self.characters(text_BT) + self.places.weight[: text_BT.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x_BTE)))
        return logits


class KingJamesBible(Task):
    """Predict the next character. ``books`` maps each book to its windows in the train set."""

    def __init__(self) -> None:
        texts = _books()
        self.alphabet = "".join(sorted(set("".join(texts.values()))))
        code = {character: index for index, character in enumerate(self.alphabet)}
        kept: list[Tensor] = []
        held_out: list[Tensor] = []
        self.books: dict[str, list[int]] = {}
        for book, text in texts.items():
            letters = torch.tensor([code[c] for c in text], dtype=torch.uint8)
            windows = letters.unfold(0, CONTEXT + 1, CONTEXT)
            tested = torch.arange(len(windows)) % TEST_EVERY == TEST_EVERY - 1
            first = sum(map(len, kept))
            kept.append(windows[~tested])
            held_out.append(windows[tested])
            self.books[book] = list(range(first, first + len(kept[-1])))
        self.train_set = TensorDataset(torch.cat(kept))
        tested_windows = torch.cat(held_out)
        spread = torch.arange(EVALUATED) * len(tested_windows) // EVALUATED
        self.test_set = TensorDataset(tested_windows[spread])

    def build_model(self) -> nn.Module:
        return GPT(len(self.alphabet))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))

    def loss(self, model: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor:
        return _loss(model, batch[0])[0]

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        loss, accuracy = _loss(model, self.test_set.tensors[0])
        return float(loss), float(accuracy)


def _loss(model: nn.Module, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss and share of right guesses over windows uint8 (B, T + 1)."""
    text = windows.to(torch.int64)
    logits, wanted = model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
    right = (logits.argmax(dim=1) == wanted).to(torch.float32).mean()
    return functional.cross_entropy(logits, wanted), right


def _books() -> dict[str, str]:
    """The text of every book, verses on lines, in order."""
    try:
        printed = subprocess.run(
            COMMAND, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{COMMAND[0]} cannot be run ({error})",
            where="task kjv",
            hint="install it: apt-get install bible-kjv bible-kjv-text; or use the task digits",
        ) from None
    verses: dict[str, list[str]] = {}
    for line in printed.splitlines():
        if found := VERSE.fullmatch(line):
            verses.setdefault(found[1], []).append(found[2])
    if len(verses) != BOOKS:
        raise ConfigError(f"did not print {BOOKS} books", where="bible-kjv")
    return {book: "\n".join(lines) for book, lines in verses.items()}
