"""Spoken words as log-mel spectrograms of one second, and the sets made of them.

8 kHz, Hann windows of 25 ms every 20 ms, 40 mel bands from 50 to 4000 Hz, natural logarithm of the power plus 1e-6;
stored as uint8 (1, 49, 40) with ``value = LOW + x / 255 (HIGH - LOW)``.
"""

import io
import json
import re
import wave
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources.archives import Files, reading
from bespoke.data.sources.entry import Entry
from bespoke.errors import UserError

RATE, WINDOW, HOP, BANDS, POINTS = 8000, 200, 160, 40, 256
CONTENT = 2**20  # bytes of a recording, whose sound is about one second, and of the list of speakers
LOWEST, HIGHEST = 50.0, 4000.0  # Hz
LOW, HIGH = -13.815510749816895, -0.5252727349995492  # of AudioMNIST's ready arrays: ln 1e-6 and the loudest value


def log_mel(sound: np.ndarray, rate: int) -> np.ndarray:
    """Return the log-mel picture of a sound (n,) in [-1, 1], cut or padded to one second: uint8 (1, 49, 40)."""
    from scipy.signal import resample_poly

    ratio = Fraction(RATE, rate)
    sound = resample_poly(sound, ratio.numerator, ratio.denominator) if ratio != 1 else sound
    second = np.zeros(RATE)
    start = max(0, (RATE - len(sound)) // 2)  # a short word in the middle
    second[start : start + len(sound)] = sound[:RATE]
    frames = np.lib.stride_tricks.sliding_window_view(second, WINDOW)[::HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(frames * window, POINTS)) ** 2 / (window**2).sum()
    values = np.log(power @ mel_filters() + 1e-6)
    scaled = np.clip((values - LOW) / (HIGH - LOW), 0, 1)
    return np.rint(255 * scaled).astype(np.uint8)[None]


@cache
def mel_filters() -> np.ndarray:
    """Return triangles of height one between points evenly spaced on the mel scale: (129, 40)."""
    low, high = (2595 * np.log10(1 + hertz / 700) for hertz in (LOWEST, HIGHEST))
    edges = 700 * (10 ** (np.linspace(low, high, BANDS + 2) / 2595) - 1)
    hertz = np.arange(POINTS // 2 + 1)[:, None] * RATE / POINTS
    rise = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    return np.clip(np.minimum(rise, fall), 0, None)


def wav_sound(content: bytes, where: str) -> tuple[np.ndarray, int]:
    """Return the sound of a 16-bit WAV file as numbers in [-1, 1] (n,), channels averaged, and its rate."""
    with reading(where):
        try:
            with wave.open(io.BytesIO(content)) as file:
                if file.getsampwidth() != 2 or not 1000 <= file.getframerate() <= 200_000:
                    raise ValueError(
                        f"it has {8 * file.getsampwidth()} bits per sample, {file.getframerate()} samples per second"
                    )
                frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
                return frames.reshape(-1, file.getnchannels()).mean(axis=1) / 32768, file.getframerate()
        except wave.Error as error:
            raise ValueError(str(error)) from None


def read_speech_commands(files: Files, entry: Entry) -> Examples:
    """Read speech_commands_v0.02.tar.gz: WORD/SPEAKER_nohash_NUMBER.wav. Words are numbered alphabetically.

    Rows are sorted by word and file name. The official test list is ignored: it selects speakers, not rows of each.
    """
    found: list[tuple[str, str, str, np.ndarray]] = []
    for member in files.members(lambda name: "_nohash_" in name and name.endswith(".wav")):
        word = member.name.split("/")[-2] if "/" in member.name else ""
        sound = log_mel(*wav_sound(member.read(CONTENT), member.where))
        found.append((word, member.last, member.last.partition("_nohash_")[0], sound))
        entry.admit(len(found), files)
    found.sort(key=lambda row: row[:2])
    number = {word: i for i, word in enumerate(sorted({row[0] for row in found}))}
    return _spoken(found, [number[row[0]] for row in found], entry, files)


def read_audiomnist(files: Files, entry: Entry) -> Examples:
    """Read AudioMNIST's SPEAKER/DIGIT_SPEAKER_TAKE.wav and audioMNIST_meta.txt; rows by speaker, digit, take."""
    rooms: dict[int, str] = {}
    found = []
    for member in files.members(lambda name: name.endswith((".wav", "audioMNIST_meta.txt"))):
        content = member.read(CONTENT)
        if member.name.endswith(".txt"):
            rooms = _rooms(content, member.where)
        elif match := re.fullmatch(r"([0-9])_([0-9]{1,9})_([0-9]{1,9})\.wav", member.last):
            digit, speaker, take = (int(part) for part in match.groups())
            found.append((speaker, digit, take, log_mel(*wav_sound(content, member.where))))
            entry.admit(len(found), files)
    found.sort(key=lambda row: row[:3])
    lacking = {row[0] for row in found} - rooms.keys()
    if lacking:
        raise UserError(f"{files} does not give the room of speaker {min(lacking)}: give the whole archive")
    kinds = [next((d for d in entry.domains if d.lower() == rooms[row[0]].lower()), rooms[row[0]]) for row in found]
    names = sorted(set(kinds))
    examples = _spoken([("", "", str(row[0]), row[3]) for row in found], [row[1] for row in found], entry, files)
    return replace(examples, domain=np.array([names.index(kind) for kind in kinds]), domain_names=tuple(names))


def _rooms(content: bytes, where: str) -> dict[int, str]:
    """Return the room of each speaker out of AudioMNIST's list."""
    with reading(where):
        people = json.loads(content)
        if not isinstance(people, dict) or not all(isinstance(facts, dict) for facts in people.values()):
            raise ValueError("it is no table of speakers")
        return {int(speaker): str(facts["recordingroom"]) for speaker, facts in people.items()}


def _spoken(
    rows: Sequence[tuple[str, str, str, np.ndarray]], labels: list[int], entry: Entry, files: Files
) -> Examples:
    if not rows:
        raise UserError(f"{files} holds no recordings of {entry.name}: give the official archive")
    speakers = sorted({row[2] for row in rows}, key=lambda name: (len(name), name))
    number = {name: i for i, name in enumerate(speakers)}
    return Examples(
        x=np.stack([row[3] for row in rows]),
        y=np.array(labels, np.int64),
        num_classes=entry.classes,
        owner=np.array([number[row[2]] for row in rows]),
        owner_names=tuple(speakers),
    )
