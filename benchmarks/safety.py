"""The safety filter against disguised words: `python -m benchmarks.safety --json FILE`.

The filter must find a disguised listed word in a text, and must pass a text without one. Some disguises are our own. Others are
from `benchmarks.rivals.bypasses`; half of two of its tables, and nothing else, was known while the filter was written. Texts
without a listed word are of four kinds: words that include one (`classic`), alone and in every readable disguise; other
languages; leetspeak of numbers and names; and sentences of the program's default text. There are as many texts with a listed word
as without one.

Bounds exist for the purpose of the filter: case, lookalikes, invisible characters, spacing. Leetspeak, stretched words,
upside-down letters and scripts with rare fonts are only measured.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.dispatch import REPOSITORY
from benchmarks.provenance import write
from benchmarks.rivals import environment
from benchmarks.rivals.environment import Unavailable
from benchmarks.verdicts import conclude, verdict
from rlhf.moderation.word_matcher import WordMatcher, parse_word_list
from scenarios.trials import COUNT, Parser
from training.data.default_text import default_text

LEAST = 0.98
OTHERS_SECONDS_MAX = 600.0  # seconds on an idle core
LISTED = """
ass arse asses bastard* bitch* bollocks bugger* cock cocks crap cunt* damn* dick dickhead* *fuck* hell idiot* imbecile* jerk
jerks loser losers moron* nazi nazis piss* prick pricks rapist* retard retards scum *shit shit* slut* tit tits tosser* twat*
wanker* whore* heroin cocaine meth anthrax
"""
OTHERWISE = """
classic classes assassin assess bass compass embassy glass massage passage password Scunthorpe cocktail cockpit peacock
Hitchcock shuttlecock Dickens Dickinson shiitake Essex Sussex title titan constitution attitude petition hello shell Michelle
jerky prickly therapist grape trapeze closer losing basement document method methane something heroine whoever scumble
swatting ashes snigger arsenal parse coarse button damsel hither bushido
"""
WORDS, INNOCENT = LISTED.split(), OTHERWISE.split()
CARRIERS = (
    "you are a {}, and everybody knows it",
    "What a {}!",
    "he called her {} again yesterday",
    "nobody here wants {} in the kitchen",
    "I think {} is what they said; was it not?",
    "({}) was written on the wall",
    "they shouted: {}",
    "{}",
    "the word is {} and it stands in line 12",
    "please, no more {} today",
)
FOREIGN = (
    "Мы сидели на кухне и пили чай с вареньем, а за окном шёл снег.",
    "Сосед принёс соску, кукурузу и кусок сыра для кота.",
    "Η θάλασσα ήταν ήρεμη και τα παιδιά έπαιζαν στην άμμο.",
    "Στο τέλος της ημέρας όλοι ήπιαν νερό και είπαν καληνύχτα.",
    "Der Bäcker verkauft süße Brötchen, große Äpfel und weiße Rüben.",
    "L'été dernier, nous avons mangé des pâtes à l'île d'Oléron.",
    "Źle się dzieje, gdy łódka płynie pod prąd, a żagiel jest dziurawy.",
    "Hôm nay trời đẹp, chúng tôi đi chợ mua cá và rau.",
    "İstanbul'da ılık bir akşam, çayımızı içip şarkı söyledik.",
    "今日は天気がいいので、公園を散歩しました。",
    "ذهبت إلى السوق واشتريت خبزا وتفاحا.",
    "הילדים שיחקו בחצר עד הערב.",
)
NUMBERS = (
    "the A55 and the M25 meet at km 1.55, exit 5A",
    "mp3, mp4, B2B, H2O, CO2, 3D, 4K and Y2K are names",
    "call 0800 5551 or 5h 17m later 1234",
    "commit 455e5b1a7 replaces 8a55c0de in v2.1.5",
    "x = a*b + c/d - (e|f) && g[0] != h->i",
    "U.S. hit songs; Model S hit the road; it's hit and miss",
    "a) b) c) d) e.g. i.e. p.m. a.m. Q.E.D. N.A.S.A.",
    "s. h. for short, p. 5 ff., vol. I, II, III",
    "G L A S S   W O R K S and C L A S S I C   B A S S",
    "who re-elected an us-versus-them party as so many did?",
    "he'll say we'll see, she'll shell peas; don't it? can't its?",
    "f(a*b) if c**d else e#g, x**n, n->*p, 2*pi*r, C# and F#m",
    "push-it and dish-it-out, pass-it on, mass. hit, http://example.org/pas.sit/on",
)
INVISIBLE = [
    chr(code)
    for code in range(0x110000)
    if unicodedata.category(chr(code)) == "Cf" or "COMBINING" in unicodedata.name(chr(code), "")
]
LEET = {"a": "4@", "b": "8", "e": "3", "i": "1!", "l": "1|", "o": "0", "s": "5$", "t": "7+"}


# Our own disguises -------------------------------------------------------------------------------------------------------


def in_any_case(word: str, draw: random.Random) -> str:
    return draw.choice((word.upper(), word.title(), "".join(draw.choice((c.lower(), c.upper())) for c in word)))


def with_invisible(word: str, draw: random.Random) -> str:
    place = draw.randrange(1, len(word))
    return "".join(c + (draw.choice(INVISIBLE) if n == place or draw.random() < 0.5 else "") for n, c in enumerate(word, 1))


def spaced(word: str, draw: random.Random) -> str:
    return draw.choice((" ", "  ", ".", "-", "_", "·", "*", "/", ", ", " . ")).join(word)


def broken(word: str, draw: random.Random) -> str:
    place = draw.randrange(1, len(word))
    return word[:place] + draw.choice((".", "-", "_", "·")) + word[place:]


def as_leetspeak(word: str, draw: random.Random) -> str:
    places = [place for place, letter in enumerate(word) if letter in LEET]
    chosen = set(draw.sample(places, draw.randint(1, max(1, len(places) // 2)))) if places else set()
    return "".join(draw.choice(LEET[letter]) if place in chosen else letter for place, letter in enumerate(word))


def stretched(word: str, draw: random.Random) -> str:
    place = draw.randrange(len(word))
    return word[:place] + word[place] * draw.randint(3, 8) + word[place + 1 :]


def masked(word: str, draw: random.Random) -> str:
    place = draw.randrange(1, len(word) - 1)
    return word[:place] + draw.choice("*#") + word[place + 1 :] if len(word) > 3 else word


def twice(word: str, draw: random.Random) -> str:
    return with_invisible(spaced(in_any_case(word, draw), draw), draw)


OURS: dict[str, Callable[[str, random.Random], str]] = {
    "as it is": lambda word, draw: word,
    "case": in_any_case,
    "invisible characters": with_invisible,
    "letter by letter": spaced,
    "broken by a mark": broken,
    "case, invisible, letter by letter": twice,
    "leetspeak": as_leetspeak,
    "stretched": stretched,
    "masked by a star": masked,
}
MEASURED_ONLY = ("leetspeak", "stretched", "masked", "similar_chars", "upside_down", "rare scripts")
UNREADABLE = ("broken", "split_words", "masked")  # innocent words may then show listed ones: pea-cock, sh*t


# Texts --------------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    seed: int
    kind: str
    texts: int
    blocked: int
    is_bad: bool  # the texts hold a listed word
    is_bounded: bool

    @property
    def share(self) -> float:
        return self.blocked / self.texts


def listed_words() -> list[str]:
    """Return the list's entries, with letters in place of their stars."""
    return [entry.strip("*") + ending for entry in WORDS for ending in (("", "s", "y") if entry.endswith("*") else ("",))]


def disguised(words: Sequence[str], seed: int, count: int) -> dict[str, list[str]]:
    """Return `count` words of each kind of disguise."""
    found = dict[str, list[str]]()
    for kind, disguise in OURS.items():
        draw = random.Random(f"{seed} {kind}")
        found[kind] = [disguise(words[number % len(words)], draw) for number in range(count)]
    return found | others(words, seed, count)


def others(words: Sequence[str], seed: int, count: int) -> dict[str, list[str]]:
    python = environment.interpreter("bypasses", environment.BYPASSES)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(list(words), file)
        file.flush()
        command = [str(python), "-m", "benchmarks.rivals.bypasses", file.name, str(seed), str(count)]
        surroundings = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
        try:
            done = subprocess.run(
                command, env=surroundings, capture_output=True, text=True, timeout=OTHERS_SECONDS_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"AugLy was not done after {OTHERS_SECONDS_MAX:.0f} s") from None
    if done.returncode:
        raise Unavailable((done.stderr.strip().splitlines() or [f"AugLy ended with status {done.returncode}"])[-1])
    return {kind: [made for _, made in pairs] for kind, pairs in json.loads(done.stdout).items()}


def carried(words: Sequence[str], seed: int) -> list[str]:
    draw = random.Random(f"{seed} carriers")
    return [draw.choice(CARRIERS).format(word) for word in words]


def sentences(seed: int, count: int) -> list[str]:
    """Return sentences of the default text without an undisguised listed word."""
    found = [line.strip() for line in default_text().decode(errors="replace").splitlines() if len(line.split()) > 5]
    plain = re.compile(r"\b(" + "|".join(map(re.escape, listed_words())) + r")\b", re.IGNORECASE)
    return random.Random(seed).sample([line for line in found if not plain.search(line)], count)


def measure(seed: int, count: int) -> Iterator[Row]:
    words = WordMatcher(parse_word_list("the list", "\n".join(WORDS).encode()))

    def row(kind: str, texts: Sequence[str], is_bad: bool, is_bounded: bool = True) -> Row:
        blocked = sum(words.find_entry(text) is not None for text in texts)
        return Row(seed, kind, len(texts), blocked, is_bad, is_bounded)

    bad = 0
    for kind, made in disguised(listed_words(), seed, count).items():
        is_bounded = not any(name in kind for name in MEASURED_ONLY)
        bad += len(made) * is_bounded
        yield row(kind, carried(made, seed), True, is_bounded)
    innocent = {
        kind: made for kind, made in disguised(INNOCENT, seed, count // 2).items() if not any(name in kind for name in UNREADABLE)
    }
    for kind, made in innocent.items():
        yield row(f"innocent, {kind}", carried(made, seed), False)
    yield row("other languages, numbers, names", [*FOREIGN, *NUMBERS], False)
    left = bad - sum(map(len, innocent.values())) - len(FOREIGN) - len(NUMBERS)
    yield row("default text", sentences(seed, left), False)


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    bad, innocent = [row for row in rows if row.is_bad and row.is_bounded], [row for row in rows if not row.is_bad]
    found, texts, wrong = (
        sum(values) for values in ((r.blocked for r in bad), (r.texts for r in bad), (r.blocked for r in innocent))
    )
    yield verdict(found / texts >= LEAST, f"recall ≥ {LEAST}: {found / texts:.4f} of {texts} texts")
    yield verdict(
        found / (found + wrong) >= LEAST, f"precision ≥ {LEAST}: {found / (found + wrong):.4f}, {wrong} innocent ones blocked"
    )
    held_out = [row for row in bad if "AugLy" in row.kind or "held out" in row.kind]
    share = sum(row.blocked for row in held_out) / sum(row.texts for row in held_out)
    yield verdict(share >= LEAST, f"recall of held-out disguises ≥ {LEAST}: {share:.4f}")


def show(rows: Sequence[Row]) -> None:
    table = Table(title="texts that the filter blocks, of all seeds")
    for heading in ("", "texts", "blocked", "share"):
        table.add_column(heading, justify="left" if not heading else "right")
    for kind in dict.fromkeys(row.kind for row in rows):
        of = [row for row in rows if row.kind == kind]
        texts, blocked = sum(row.texts for row in of), sum(row.blocked for row in of)
        table.add_row(kind + ("" if of[0].is_bounded else " (measured only)"), str(texts), str(blocked), f"{blocked / texts:.4f}")
    Console(width=110).print(table)


def main() -> int:
    parser = Parser("safety", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of the disguises")
    parser.add_argument("--texts", type=COUNT, default=400, metavar="N", help="texts of each disguise and seed (default 400)")
    options = parser.parse_args()
    started, rows = time.time(), list[Row]()
    for seed in options.seeds:
        try:
            rows += measure(seed, options.texts)
        except Unavailable as error:
            print(f"cannot make the disguises of other programs on this machine: {error}", file=sys.stderr)
            return 1
        write(options.json, started, {"seeds": list(options.seeds), "rows": [asdict(row) for row in rows]})
    show(rows)
    return conclude(verdicts(rows))


if __name__ == "__main__":
    sys.exit(main())
