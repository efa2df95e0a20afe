"""The text `tiny` learns from: a small grammar of our own, so that nothing is copied from anyone.

Three kinds of text come out of it, all deterministic from a seed:

- **stories**, a hero, a plot, an ending, on one line;
- **questions and answers** about the story just told: `Q: Who found the key?` / `A: Ben found the key.`;
- **recall**: a note states a fact, `Note: Anna hid the key in the barn.`, and many tokens later it is asked:
  `Q: Where did Anna hide the key?` / `A: Anna hid the key in the barn.` Several notes share the name or the object, so
  only who looks at the right note knows the place. Places are drawn uniformly and independently of the rest.

Every word of the grammar is one token, so `count_tokens` needs no tokenizer. One fifth of all (name, object) pairs
never appear in a training note: `held_out_recall` asks only about those. Standard library only.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import NamedTuple

END_OF_TEXT = "<|endoftext|>"
# GPT-2's way to cut a text into words before anything else; in this grammar each piece is one token.
PIECE = re.compile(r"<\|endoftext\|>| ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+(?!\S)|\s")


def count_tokens(text: str) -> int:
    """How many tokens `tiny`'s tokenizer makes of a text of this grammar."""
    return len(PIECE.findall(text))


def _words(text: str) -> list[str]:
    return text.split()


GIRLS = _words(
    """
    Anna Clara Ella Emma Eva Grace Julia Kate Laura Lily Lucy Mary Mia Nora Olga Rosa Ruth Sara Tina Vera
    """
)
BOYS = _words(
    """
    Adam Ben Carl David Eric Felix Frank George Hugo Ivan Jack Leo Max Nick Oscar Paul Peter Sam Tom Victor
    """
)
NAMES = [name for pair in zip(GIRLS, BOYS, strict=True) for name in pair]

OBJECTS = _words(
    """
    ball bell blanket book boot bottle bowl box brush button cake camera candle clock coin compass cookie crown
    cup doll drum feather flute glove hammer hat kite knife lamp lantern letter magnet map marble medal mirror
    necklace needle notebook pearl pencil pie pillow plate puzzle radio ribbon ring rope scarf shell shirt spoon
    stamp stone sword telescope ticket toy trumpet vase watch whistle key
    """
)

PLACES = _words(
    """
    attic bakery barn barrel basement basket bathroom bedroom boat bucket cabin cage castle cave cellar chapel
    chest chimney closet cottage cupboard drawer factory fridge garage garden greenhouse hallway harbor hospital
    hotel hut kitchen library market meadow mill museum nest office orchard oven pantry park piano pond river
    school shed stable station studio suitcase swamp teapot tent theater tower trunk tunnel valley van wagon
    wardrobe
    """
)

HELD_OUT_EVERY = 5
MAX_FACTS = 72


def is_held_out(name: str, thing: str) -> bool:
    """Whether notes about this (name, object) pair are kept out of training."""
    return (NAMES.index(name) + OBJECTS.index(thing)) % HELD_OUT_EVERY == 0


# --- a grammar in strings ---------------------------------------------------------------------------------------------
# "[a|b]" picks one alternative (and nests), "{hero}" is filled in from the story's cast.

CHOICE = re.compile(r"\[([^\[\]]*)\]")


def expand(template: str, rng: random.Random, cast: dict[str, str]) -> str:
    """Choose every `[a|b]` of the template, innermost first, then fill in the cast."""
    while match := CHOICE.search(template):
        template = template[: match.start()] + rng.choice(match[1].split("|")) + template[match.end() :]
    return template.format(**cast)


OPENINGS = [
    "Once upon a time there [was|lived] a [kind|brave|shy|clever|cheerful|quiet|curious|little] {child} named {hero}.",
    "Once upon a time, in a [small|quiet|green] [village|town], there lived a {child} named {hero}.",
    "One [sunny|rainy|windy|cold|warm|bright] [morning|afternoon|day], {hero} {plan}.",
    "{hero} was a [kind|brave|shy|clever|cheerful|quiet|curious] {child} who lived {home}.",
    "Long ago, a [kind|brave|clever|quiet|curious] {child} named {hero} lived {home}.",
    "It was a [sunny|rainy|windy|cold|warm|bright] [morning|afternoon|day], and {hero} {plan}.",
]
PLAN = (
    "[went for a walk near the {place}|wanted to play outside|was bored at home|had nothing to do|"
    "was on the way to the {place}|woke up early]"
)
HOME = (
    "[near the river|in a small house|on a farm|by the sea|at the edge of the forest|on a quiet street|at the top of a "
    "hill|with {his} [mother|father|grandmother|grandfather]]"
)
HABITS = [
    "{He} [loved|liked] to [climb trees|read books|draw pictures|sing songs|watch the birds|count the stars|"
    "ride a bike|cook with {his} [mother|father]|tell funny stories].",
    "{His} best friend was {friend}, who lived next door.",
    "{He} had a [small|lazy|happy|clever|funny] {pet} named {pet_name}.",
    "Every [day|morning|evening], {he} walked to the {place} and back.",
]
ASIDES = [
    "The [sun was shining|sky was blue|wind was cold|birds were singing|rain fell softly|air smelled of flowers].",
    "Far away, a {pet} could be heard.",
    "It was [very quiet|getting late|almost noon|a perfect day].",
    "{He} [smiled|laughed|took a deep breath|sang a little song|felt a little nervous].",
]
# Short sentences by length in tokens, to reach a length exactly.
SHORT = {
    2: ["Wait.", "Listen."],
    3: ["Time passed.", "Birds sang.", "Nobody spoke."],
    4: ["The wind blew.", "The sun shone.", "Clouds went by."],
    5: ["It was very quiet.", "The hours went by.", "The rain fell softly."],
}
ENDINGS = [
    "{hero} [was very happy|smiled all day|felt proud|slept well that night|never forgot that day].",
    "{hero} and {friend} [laughed|danced|went home together|became good friends|had soup and bread for dinner].",
    "That night, {hero} told {his} [mother|father|grandmother|grandfather] the whole story.",
    "From that day on, {hero} and {friend} were [the best of|very good] friends.",
    "It had been a [good|long|wonderful|strange] day, and everyone was [happy|tired|glad].",
]

# A plot: its sentences in order, and the questions one may ask afterwards with their answers.
PLOTS: list[tuple[list[str], list[tuple[str, str]]]] = [
    (  # lost and found
        [
            "{hero} had lost {his} {color} {thing}.",
            "{He} looked [under the bed|behind the door|in every room|on the roof], but it was not there.",
            '"[Have you seen|Do you know where I can find] my {thing}?" {he} asked {friend}.',
            '"[No|Sorry, no], but I [can|will] help you look," said {friend}.',
            "[Together they searched|The two friends walked to] the {place}.",
            "[At last|After an hour|Suddenly], {friend} found the {thing} "
            "[under a bush|beside a tree|near a big rock].",
            '"[Thank you|You are a true friend]!" said {hero}.',
        ],
        [
            ("What had {hero} lost?", "{hero} had lost a {color} {thing}."),
            ("Who found the {thing}?", "{friend} found the {thing}."),
            ("What color was the {thing}?", "The {thing} was {color}."),
        ],
    ),
    (  # an animal in need
        [
            "[On the road|Near the {place}|Behind the house], {he} [saw|heard|found] a [small|tiny|young] {animal}.",
            "The {animal} was [cold and hungry|lost and afraid|hurt and could not walk].",
            '"[Poor|Do not worry,] little {animal}," said {hero}.',
            "{He} gave it [some milk|some bread|warm water|a soft blanket] and [carried it home|stayed with it].",
            "{friend} came [to help|with more food|with a warm coat] and they named it {pet_name}.",
            "After [two|three|four|five] days, {pet_name} was [strong|well|healthy] again.",
            "The {animal} [jumped for joy|followed {hero} everywhere|went back to the forest].",
        ],
        [
            ("What did {hero} find?", "{hero} found a {animal}."),
            ("What was the name of the {animal}?", "The {animal} was named {pet_name}."),
            ("Who came to help?", "{friend} came to help."),
        ],
    ),
    (  # cooking
        [
            "{hero} wanted to [bake|make] a [big|sweet] {food} for {friend}.",
            "{He} [needed|bought|found] [flour, milk and sugar|eggs, butter and honey|apples, sugar and eggs].",
            "First {he} [mixed everything in a large bowl|read the old recipe|washed {his} hands].",
            "Then {he} put the {food} in the oven and [waited|read a book|fell asleep].",
            "[Soon|After a while], the whole house smelled [sweet|wonderful|of smoke].",
            "The {food} was [a little burned|golden and warm|too big for the table], but it tasted [great|very good].",
            '"This is the best {food} in the world!" said {friend}.',
        ],
        [
            ("What did {hero} make?", "{hero} made a {food}."),
            ("Who was the {food} for?", "The {food} was for {friend}."),
        ],
    ),
    (  # the storm
        [
            "{hero} and {friend} were playing near the {place} when the sky turned [dark|gray|black].",
            "[Thunder rolled over the hills|Lightning lit the sky|The wind began to blow] and [heavy rain|snow] fell.",
            '"We [must|have to] find a dry place!" [cried|shouted] {friend}.',
            "{hero} remembered the old {shelter} [behind the trees|across the field|on the hill].",
            "They ran [as fast as they could|hand in hand] and [closed the door|sat down by the fire].",
            "[Inside|There], they [told stories|sang songs|shared an apple] until the storm was over.",
            "When they came out, a [bright|wide] rainbow stood over the {place}.",
        ],
        [
            ("Where did they wait?", "They waited in the old {shelter}."),
            ("Who remembered the {shelter}?", "{hero} remembered the {shelter}."),
        ],
    ),
    (  # practice
        [
            "{hero} wanted to learn to {skill}, but it was [hard|not easy].",
            "The first time {he} tried, {he} [fell down|almost cried|made everyone laugh].",
            '"[I will never learn it|I am not good at this]," said {hero}.',
            '"[Try again|Do not give up|Take your time]," said {friend}. '
            '"[I will show you how|You only need practice]."',
            "So {hero} practiced every [day|morning|evening] for a [week|month].",
            "[Step by step|Little by little|Slowly], it became easier.",
            "At last {he} could {skill} [better than {friend}|very well|without any help].",
        ],
        [
            ("What did {hero} want to learn?", "{hero} wanted to learn to {skill}."),
            ("Who helped {hero}?", "{friend} helped {hero}."),
        ],
    ),
    (  # the seed
        [
            "{friend} gave {hero} a [tiny|small|strange] seed.",
            "{hero} planted it [in a pot|behind the house|next to the gate] and gave it water every day.",
            "[For a long time|For two weeks], nothing happened.",
            '"[Perhaps it is too cold|Maybe it is sleeping]," said {hero}.',
            "Then one [morning|evening] a green leaf [came up|looked out of the ground].",
            "By the end of [spring|summer], it was a tall plant with {color} [flowers|fruit].",
            "{hero} gave the first [flower|one] to {friend}.",
        ],
        [
            ("Who gave {hero} a seed?", "{friend} gave {hero} a seed."),
            ("What did {hero} plant?", "{hero} planted a seed."),
        ],
    ),
    (  # a quarrel
        [
            "{hero} and {friend} both wanted to play with the {color} {thing}.",
            '"It is mine!" said {hero}. "I [saw|had] it first!" [said|shouted] {friend}.',
            "They pulled [and pulled|so hard] that it [broke|fell into the mud].",
            "Both children were [sad|angry] and [walked away|said nothing].",
            "[Later|In the evening|The next day], {hero} felt sorry and [knocked at the door|wrote a note].",
            '"I am sorry," {he} said. "Can we [fix|clean] it together?"',
            "{friend} [nodded|smiled], and soon the {thing} looked [like new|better than before].",
        ],
        [
            ("What did they both want?", "They both wanted the {color} {thing}."),
            ("Who said sorry?", "{hero} said sorry."),
        ],
    ),
    (  # the journey
        [
            "{hero} found an old map [in a book|on the roof|inside a bottle].",
            "It showed the way to a {color} {thing}, far beyond the {place}.",
            '"[Let us|We should] find it," {he} said to {friend}.',
            "They packed [bread and water|apples and cheese] and [left at once|walked all day].",
            "They crossed a [deep river|dark forest|narrow bridge] and climbed a [steep|high] hill.",
            "Under [a large stone|an old tree] they found a box, and in it lay the {thing}.",
            "{hero} and {friend} [carried it home|gave it to the museum|kept it as a secret].",
        ],
        [
            ("What did they find in the box?", "They found a {color} {thing}."),
            ("Who went with {hero}?", "{friend} went with {hero}."),
        ],
    ),
    (  # a gift
        [
            "Tomorrow was the birthday of {friend}, and {hero} had no gift.",
            "{He} had only [two|three|four|five] coins, so {he} could not buy much.",
            "{He} went to the {place} and thought for a long time.",
            "Then {he} had [a good|a clever|an] idea.",
            "{He} [took some wood|used paper and glue|worked all night] and made a {color} {thing}.",
            'The next day {friend} opened the box and [cried|said], "[How beautiful|What a surprise]!"',
            "It was the [nicest|best] gift of all, because {hero} had made it.",
        ],
        [
            ("What did {hero} make?", "{hero} made a {color} {thing}."),
            ("Whose birthday was it?", "It was the birthday of {friend}."),
        ],
    ),
    (  # a noise at night
        [
            "In the middle of the night, {hero} heard a strange noise from the {place}.",
            "[Bang, bang, it went|It sounded like footsteps|Something was moving there].",
            "{He} was [afraid|scared], but {he} [took a lamp|called {friend}|got out of bed].",
            "[Slowly|Very slowly], {he} opened the door and looked inside.",
            "There was no [thief|monster|ghost], only a [small|tiny|young] {animal} with {his} {thing}.",
            '"So it was you!" [laughed|said] {hero}, and the {animal} [ran away|looked at {him}].',
            "In the morning, {friend} laughed about it for an hour.",
        ],
        [
            ("Who made the noise?", "A {animal} made the noise."),
            ("Where did the noise come from?", "The noise came from the {place}."),
        ],
    ),
    (  # building
        [
            "{hero} and {friend} decided to build a {build}.",
            "They found [old wood|some boxes|nails and rope] near the {place}.",
            "{hero} held the wood while {friend} [worked with the hammer|cut it with a saw].",
            "[It was hard work|It took all day], and they had to start [again|over] [twice|three times].",
            "[An old man|A neighbor|The teacher] came by and showed them a better way.",
            "When the {build} was ready, they painted it {color}.",
            '"We did it!" they [shouted|cried], and everyone came to see it.',
        ],
        [
            ("What did they build?", "They built a {build}."),
            ("What color was the {build}?", "The {build} was {color}."),
        ],
    ),
    (  # the market
        [
            "{hero} went to the market with [two|three|four|five] coins to buy a {food}.",
            "On the way {he} met {friend}, who [looked sad|was crying].",
            '"I have lost my money, and my family has nothing to eat," said {friend}.',
            "{hero} thought about it. Then {he} [gave {friend} the coins|shared everything with {friend}].",
            '"You are very kind," said {friend}. "I will not forget this."',
            "[A week|A month|A year] later, {friend} came back with a {color} {thing} and a warm {food}.",
            '"[This is for you|A kind heart should be thanked]," said {friend}.',
        ],
        [
            ("What did {hero} want to buy?", "{hero} wanted to buy a {food}."),
            ("What did {friend} bring?", "{friend} brought a {color} {thing} and a {food}."),
        ],
    ),
]

COLORS = _words("red blue green yellow white black golden silver purple brown")
ANIMALS = _words("bird fox rabbit kitten puppy duck mouse goat horse frog")
PETS = _words("dog cat parrot pony")
PET_NAMES = _words("Lucky Pepper Sunny Biscuit Star Cloud")
FOODS = _words("cake pie soup pizza pancake sandwich")
SHELTERS = _words("barn cabin mill hut tower")
SKILLS = ["swim", "dance", "skate", "whistle", "paint", "play the flute", "play the drum", "ride a horse"]
BUILDS = _words("boat kite treehouse raft table cart")
# Settings of stories, apart from the hiding places of the notes.
SETTINGS = _words("river lake forest bridge school garden market station farm church field beach park")


def make_up_name(rng: random.Random) -> str:
    """A name outside the vocabulary, spelled in single bytes, so that a reader's own names mean something too."""
    syllables = rng.choice((2, 2, 3))
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables)).capitalize()


def _cast(rng: random.Random, made_up_names: float) -> dict[str, str]:
    """Who and what a story is about; pronouns follow the hero."""
    girl = rng.random() < 0.5
    hero = rng.choice(GIRLS if girl else BOYS)
    if rng.random() < made_up_names:
        hero = make_up_name(rng)
    cast = {
        "hero": hero,
        "friend": rng.choice([name for name in NAMES if name != hero]),
        "child": "girl" if girl else "boy",
        "he": "she" if girl else "he",
        "him": "her" if girl else "him",
        "his": "her" if girl else "his",
        "place": rng.choice(SETTINGS),
        "thing": rng.choice(OBJECTS),
        "color": rng.choice(COLORS),
        "animal": rng.choice(ANIMALS),
        "pet": rng.choice(PETS),
        "pet_name": rng.choice(PET_NAMES),
        "food": rng.choice(FOODS),
        "shelter": rng.choice(SHELTERS),
        "skill": rng.choice(SKILLS),
        "build": rng.choice(BUILDS),
    }
    cast["He"], cast["His"] = cast["he"].capitalize(), cast["his"].capitalize()
    cast["plan"], cast["home"] = (expand(template, rng, cast) for template in (PLAN, HOME))
    return cast


def story(rng: random.Random, made_up_names: float = 0.03) -> tuple[list[str], list[str]]:
    """One story: its sentences, and its question-answer lines (`"Q: ...\\nA: ...\\n"`)."""
    cast = _cast(rng, made_up_names)
    plot, questions = rng.choice(PLOTS)
    templates = [rng.choice(OPENINGS), *rng.sample(HABITS, rng.choice((0, 1, 1, 2)))]
    for template in plot:
        templates.append(template)
        if rng.random() < 0.1:
            templates.append(rng.choice(ASIDES))
    templates.append(rng.choice(ENDINGS))
    sentences = [expand(template, rng, cast) for template in templates]
    asked = rng.sample(questions, rng.randint(1, len(questions)))
    return sentences, [f"Q: {q}\nA: {a}\n".format(**cast) for q, a in asked]


def story_document(rng: random.Random, made_up_names: float = 0.03) -> str:
    """A whole story on one line, usually some questions about it, and the end-of-text mark."""
    sentences, questions = story(rng, made_up_names)
    return " ".join(sentences) + "\n" + "".join(questions if rng.random() < 0.7 else []) + END_OF_TEXT


# --- recall -----------------------------------------------------------------------------------------------------------


class Fact(NamedTuple):
    name: str
    thing: str
    place: str

    def note(self) -> str:
        return f"Note: {self.name} hid the {self.thing} in the {self.place}.\n"

    def question(self) -> str:
        """Question and answer up to the place, so that the next token is ` {place}`."""
        return f"Q: Where did {self.name} hide the {self.thing}?\nA: {self.name} hid the {self.thing} in the"


def draw_facts(rng: random.Random, count: int, held_out: bool) -> list[Fact]:
    """`count` facts with different (name, thing) pairs from a grid of names by things, so that many share a part.

    Raises ValueError for more than `MAX_FACTS`.
    """
    if count > MAX_FACTS:
        raise ValueError(f"{count} facts asked for; names and things suffice for {MAX_FACTS}")
    names, things = NAMES, OBJECTS
    if held_out:  # all pairs between these two lists are held out
        start = rng.randrange(HELD_OUT_EVERY)
        names, things = NAMES[start::HELD_OUT_EVERY], OBJECTS[-start % HELD_OUT_EVERY :: HELD_OUT_EVERY]
    narrowest = max(2, math.ceil(count / 9))  # a narrower grid would need more things than are held out with a name
    while True:
        width = rng.randint(narrowest, max(5, narrowest))
        grid = itertools.product(rng.sample(names, width), rng.sample(things, math.ceil(1.25 * count / width)))
        pairs = [pair for pair in grid if is_held_out(*pair) == held_out]
        if len(pairs) >= count:
            return [Fact(*pair, rng.choice(PLACES)) for pair in rng.sample(pairs, count)]


def filler(rng: random.Random, tokens: int) -> list[str]:
    """Lines of story, `tokens` long together; short sentences fill what is left (2 tokens cannot be filled)."""
    lines: list[str] = []
    while tokens >= 3:
        line: list[str] = []
        tokens -= 1  # the newline
        for sentence in story(rng, made_up_names=0)[0][rng.randrange(4) :][: rng.randint(2, 8)]:
            length = count_tokens(" " + sentence)
            if tokens - length < 3 and tokens != length:
                break
            line.append(sentence)
            tokens -= length
        if tokens < 12 or not line:
            while tokens:
                length = tokens if tokens in SHORT else rng.choice([n for n in SHORT if tokens - n >= 2])
                line.append(rng.choice(SHORT[length]))
                tokens -= length
        lines.append(" ".join(line) + "\n")
    return lines


def recall_document(rng: random.Random, tokens: int, sparse: float) -> str:
    """Notes, and questions about them, with story lines in between; at least `tokens` long.

    `sparse` is the share of lines that are story: 0 is a dense drill, 0.6 spreads the notes over the document.
    """
    waiting = draw_facts(rng, rng.randint(4, 12), held_out=False)
    told: list[Fact] = []
    asked: list[Fact] = []
    text, length = [], 0
    while length < tokens:
        if rng.random() < sparse:
            line = "".join(filler(rng, rng.randint(10, 70)))
        elif waiting and (not told or rng.random() < 0.6):
            told.append(waiting.pop())
            line = told[-1].note()
        else:
            # What was asked before can be copied from its answer, so it is asked again only when nothing else is left.
            fact = rng.choice(told or asked)
            if told:
                told.remove(fact)
                asked.append(fact)
            line = f"{fact.question()} {fact.place}.\n"
        text.append(line)
        length += count_tokens(line)
    return "".join(text)


def held_out_recall(seed: int, facts: int = 6, distance: int = 200, context: int | None = None) -> tuple[str, str]:
    """A recall prompt about facts never seen in training: `(prompt, answer)`, the answer being one token, ` place`.

    `distance` counts tokens from the place in the note to the place in the answer (at least 24). The other
    `facts - 1` notes stand before the note in question or after it, where they fit. With `context` the prompt is led
    in by story lines up to that many tokens. Raises ValueError if `distance` leaves no room for the question, or for
    more than `MAX_FACTS` facts.
    """
    rng = random.Random(f"held-out {seed} {facts} {distance} {context}")
    target, *others = draw_facts(rng, facts, held_out=True)
    question = target.question()
    gap = distance - 3 - count_tokens(question)  # 3: the end of the note, ".\n", and the answer itself
    if gap < 3:
        raise ValueError(f"distance {distance} is too short: the question itself needs {distance - gap + 3}")
    after: list[str] = []
    for fact in others[: len(others) // 2]:
        cost = count_tokens(fact.note())
        if gap - cost >= 3:
            after.append(fact.note())
            gap -= cost
    before = [fact.note() for fact in others[len(after) :]]
    after += filler(rng, gap)
    before += filler(rng, 30)
    rng.shuffle(after)
    rng.shuffle(before)
    prompt = "".join([*before, target.note(), *after, question])
    if context is not None:
        prompt = "".join(filler(rng, context - count_tokens(prompt))) + prompt
    return prompt, " " + target.place
