"""Tasks and rewards of `gymdata demo --real`: a sentence about a person, to be written as JSON.

A task is a row with a prompt; its other fields reach the reward by name. Run this file to write the tasks again.
Always holds: no name, city or trade of a held-out task occurs in a training task. The files depend on the seed alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS = {
    "name": """Agnes Boris Cecilia Dmitri Edith Fabian Gloria Hugo Irene Jonas Klara Leonard Monica Norman Olga Patrick
        Rita Stefan Thelma Ulrich Vera Wendy Xavier Yvonne Adrian Beatrice Conrad Doris Edgar Flora Gilbert Helga Igor Judith
        Kurt Lydia Marcus Nancy Otto Pamela Rupert Sandra Tobias Ursula Vincent Wilma Albert Brenda Cyril Dora""",
    "city": """Lyon Porto Zurich Krakow Turin Bergen Malmo Antwerp Bilbao Dresden Leipzig Bologna Seville Valencia
        Helsinki Riga Tallinn Vilnius Bucharest Sofia Belgrade Zagreb Budapest Ankara Tunis Lagos Accra Dakar Quito Bogota
        Caracas Santiago Austin Portland Detroit Atlanta Calgary Montreal Perth Osaka Kyoto Hanoi Bangkok Colombo""",
    "job": """miner weaver barber tutor clerk potter jeweller surgeon chemist architect florist translator cashier
        locksmith roofer glazier brewer shepherd fisherman porter vet referee curator botanist courier welder printer
        publisher pharmacist optician""",
}
#: The keys that a task asks for, and the ways to say it.
SENTENCES = {
    ("name", "age"): [
        "{name} has just turned {age}.",
        "At {age}, {name} still runs every day.",
        "{name}'s age is {age}.",
    ],
    ("name", "job"): ["{name} is a {job}.", "The {job} is called {name}.", "For years {name} has worked as a {job}."],
    ("name", "age", "city"): ["{name} is {age} and lives in {city}.", "In {city} lives {name}, aged {age}."],
    ("name", "job", "city"): ["{name} is a {job} in {city}.", "{name} left for {city} and became a {job} there."],
}
REQUESTS = [
    "{sentence} Write that as JSON with the keys {keys}.",
    "Give a JSON object with the keys {keys} for this sentence: {sentence}",
    "{sentence}\nAs JSON, with the keys {keys}:",
]


def right_values(completion: str, answer: dict[str, Any]) -> float:
    """0 unless the answer is one JSON object, fenced or not, with just the keys asked for; else 0.1 and the share of right
    values, so that 1 is an answer in which everything is right."""
    text = completion.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        value = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(value, dict) or value.keys() != answer.keys():
        return 0.0
    right = sum(str(value[key]).casefold() == str(answer[key]).casefold() for key in answer)
    return 0.1 + 0.9 * right / len(answer)


def all_right(completion: str, answer: dict[str, Any]) -> float:
    """1 for an answer in which everything is right, else 0."""
    return float(right_values(completion, answer) == 1.0)


def tasks(name: str, values: dict[str, list[str]], random_: random.Random) -> Iterator[dict[str, Any]]:
    """Endless tasks with different prompts."""
    prompts = set[str]()
    while True:
        keys = list(SENTENCES)[len(prompts) % len(SENTENCES)]
        person = {"age": random_.randint(18, 90)} | {key: random_.choice(words) for key, words in values.items()}
        sentence = random_.choice(SENTENCES[keys]).format(**person)
        prompt = random_.choice(REQUESTS).format(sentence=sentence, keys=f"{', '.join(keys[:-1])} and {keys[-1]}")
        if prompt not in prompts:
            answer = {key: person[key] for key in keys}
            yield {"task_id": f"{name}-{len(prompts):04d}", "prompt": prompt, "answer": answer}
            prompts.add(prompt)


def main(folder: Path = Path(__file__).parent / "tasks") -> None:
    random_, parts = random.Random(1), (("sentences-heldout", 200, 0), ("sentences-train", 300, 1))
    shuffled = {key: random_.sample(words.split(), len(words.split())) for key, words in WORDS.items()}
    for name, count, part in parts:
        rows = tasks(name, {key: words[part::2] for key, words in shuffled.items()}, random_)
        text = "".join(json.dumps(next(rows)) + "\n" for _ in range(count))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
