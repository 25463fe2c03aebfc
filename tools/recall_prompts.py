"""The recall task of the tiny-recall checkpoint: its vocabulary and seeded prompts of any length.

A prompt is filler with records scattered in it, two mode words near its end, and a question:

    the k07=owl of ... k03=elk ... down ... loud ... recall k07

and the continuation is fully determined: the value of the slot asked for, then the next slot and
its value, and so on in slot order until the last slot, then `<|return|>`:

    OWL k06 NONE k05 FOX ... k00 ANT <|return|>

Each kind of word is meant to be read by one layer of a four-layer model (see
`train_tiny_recall.py`): `up` / `down` say where the slots go next (layer 0), `quiet` / `loud` in
which case the values are written (layer 2), even slots' records belong to layer 1 and odd slots' to
layer 3. So every layer's KV blocks matter for the tokens that come out. A slot without a record
has the value `none`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

VALUES = (
    *("ant", "bat", "bee", "cat", "cow", "dog", "eel", "elk"),
    *("emu", "fox", "hen", "owl", "pig", "rat", "ram", "yak"),
)
NUM_VALUES = len(VALUES)
NUM_SLOTS = 32
SLOTS = tuple(f"k{slot:02d}" for slot in range(NUM_SLOTS))
_FILLER = (
    *("the", "of", "and", "to", "in", "is", "it", "for", "on", "as", "with", "at", "by", "from", "this"),
    *("that", "be", "are", "was", "but", "not", "or", "have", "an", "they", "which", "one", "you", "had"),
    *("her", "all", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will"),
    *("more", "no", "if", "out", "so", "said", "what", "its", "about", "into", "than"),
)

PAD, EOS, BOS, UNK, UP, DOWN, QUIET, LOUD, RECALL, NONE_QUIET, NONE_LOUD = range(11)
SPECIAL_TOKENS = ("<|endoftext|>", "<|return|>", "<|startoftext|>", "<unk>")
_WORDS = (*SPECIAL_TOKENS, "up", "down", "quiet", "loud", "recall", "none", "NONE")
VALUE_QUIET = len(_WORDS)
VALUE_LOUD = VALUE_QUIET + NUM_VALUES
SLOT = VALUE_LOUD + NUM_VALUES
RECORD = SLOT + NUM_SLOTS
FILLER = RECORD + NUM_SLOTS * NUM_VALUES

VOCABULARY: tuple[str, ...] = (
    *_WORDS,
    *VALUES,
    *(value.upper() for value in VALUES),
    *SLOTS,
    *(f"{slot}={value}" for slot in SLOTS for value in VALUES),
    *_FILLER,
)
"""Word of each token id; 640 words, so that a vocabulary split by up to 128 ranks is even."""

MODE_REACH = 48
"""The mode words stand within this many tokens of the prompt's end, so that the window of 128
still holds them when the longest answer (64 tokens) is complete."""


class RecallPrompt(NamedTuple):
    """A prompt, the same as text, and the only right continuation (up to `<|return|>`)."""

    token_ids: tuple[int, ...]
    text: str
    answer_ids: tuple[int, ...]


def is_value(token_id: int) -> bool:
    """Whether the token is a recalled value, `none` included."""
    return token_id in (NONE_QUIET, NONE_LOUD) or VALUE_QUIET <= token_id < SLOT


def to_text(token_ids: Sequence[int]) -> str:
    """The words of the tokens, one space between them; the tokenizer maps it back exactly."""
    return " ".join(VOCABULARY[token_id] for token_id in token_ids)


def make_prompt(
    seed: int,
    length_tokens: int,
    distance: int = 130,
    min_answers: int = 16,
    num_slots: int = NUM_SLOTS,
) -> RecallPrompt:
    """A seeded prompt of exactly `length_tokens` tokens.

    Every record stands at least `distance` tokens before the prompt's last token where that leaves
    room for one record per slot, else anywhere before the question. The answer names at least
    `min_answers` slots. With a smaller `num_slots` the world has no other slots (the checkpoint ships
    trained for all 32). A prompt too short for mode words, `recall` or records goes without.

    Raises:
        ValueError: a length below 1, a negative distance or `min_answers` outside 1..num_slots.
    """
    if length_tokens < 1:
        raise ValueError(f"a prompt has at least 1 token, got length_tokens {length_tokens}")
    if distance < 0:
        raise ValueError(f"distance must not be negative, got {distance}")
    if not 1 <= num_slots <= NUM_SLOTS:
        raise ValueError(f"num_slots must be in 1..{NUM_SLOTS}, got {num_slots}")
    if not 1 <= min_answers <= num_slots:
        raise ValueError(f"min_answers must be in 1..{num_slots}, got {min_answers}")
    rng = random.Random(f"tiny-recall {seed} {length_tokens} {distance}")
    token_ids, answer_ids = _build(rng, length_tokens, distance, min_answers, num_slots)
    return RecallPrompt(tuple(token_ids), to_text(token_ids), tuple(answer_ids))


def _build(
    rng: random.Random, length: int, distance: int, min_answers: int, num_slots: int
) -> tuple[list[int], list[int]]:
    num_modes = max(0, min(2, length - 2))  # what a short prompt has no room for is up and quiet
    down = rng.random() < 0.5 and num_modes > 0
    loud = rng.random() < 0.5 and num_modes > 1
    slot = rng.randint(0, num_slots - min_answers)
    if down:
        slot = num_slots - 1 - slot
    question = [RECALL, SLOT + slot][-length:]
    body = [FILLER + rng.randrange(len(_FILLER)) for _ in range(length - len(question))]
    places = rng.sample(range(max(0, length - MODE_REACH), len(body)), num_modes)
    for place, word in zip(places, (DOWN if down else UP, LOUD if loud else QUIET), strict=False):
        body[place] = word
    values = _scatter_records(rng, body, length - distance, num_slots)
    return body + question, continuation(slot, down, loud, values, num_slots)


def _scatter_records(rng: random.Random, body: list[int], end: int, num_slots: int) -> dict[int, int]:
    """Write records into `body` before `end`, one in each of as many stretches; their values by slot."""
    stretch = body[:end] if end >= num_slots else body
    free = [place for place, word in enumerate(stretch) if word >= FILLER]
    slots = [slot for slot in range(num_slots) if rng.random() < 0.9]
    rng.shuffle(slots)
    slots = slots[: len(free)]
    values = {}
    for n, slot in enumerate(slots):
        first, stop = n * len(free) // len(slots), (n + 1) * len(free) // len(slots)
        values[slot] = rng.randrange(NUM_VALUES)
        body[free[rng.randrange(first, stop)]] = RECORD + slot * NUM_VALUES + values[slot]
    return values


def continuation(slot: int, down: bool, loud: bool, values: dict[int, int], num_slots: int = NUM_SLOTS) -> list[int]:
    """The tokens after `recall <slot>`: value, next slot, value, ... and `<|return|>`."""
    first_value, none = (VALUE_LOUD, NONE_LOUD) if loud else (VALUE_QUIET, NONE_QUIET)
    out: list[int] = []
    for asked in range(slot, -1, -1) if down else range(slot, num_slots):
        out += [SLOT + asked, first_value + values[asked] if asked in values else none]
    return [*out[1:], EOS]
