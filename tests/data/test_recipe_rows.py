"""The rows that recipes generate: their rules, their splits, their demonstrations."""

from __future__ import annotations

import random
import re

from reward_cases import made, reward

from agenttrain.data.bundled import alphabet_sort, demonstrations, reverse_text, word_problems
from agenttrain.data.bundled.demonstrations import Habits
from agenttrain.data.tasks import to_task
from agenttrain.rewards.builtin.similarity import Similarity
from agenttrain.utils.files import conf_folder, parse_yaml

FAULTLESS = Habits(give_up=0, follow_chain=1, confuse=0, misname=0, miscopy=0)
FAULTY = {"give_up": 0.3, "confuse": 0.9, "misname": 0.9, "miscopy": 0.9, "follow_chain": 0.2}


def test_texts_are_reversed_and_no_text_is_in_two_splits() -> None:
    texts = {}
    for split in reverse_text.RESIDUES:
        rows = [reverse_text.row(split, index, 0, fewest=2, most=2) for index in range(200)]
        for row in rows:
            text = row["messages"][-1]["content"]
            assert row["answer"] == "".join(reversed(text))
            assert len(text.split()) == row["words"] == 2
        texts[split] = {row["answer"] for row in rows}
        assert reverse_text.row(split, 7, 0) == reverse_text.row(split, 7, 0)
    assert not texts["train"] & texts["test"]
    assert not texts["tune"] & texts["test"]


def test_a_list_of_names_grows_and_stays_sorted() -> None:
    for index in range(50):
        row = alphabet_sort.row("train", index, 0)
        task = to_task(row, index)
        assert len(task.user_turns) == 2
        shown: list[str] = []
        requests = [row["messages"][0]["content"], *row["user_turns"]]
        for turn, (request, answer) in enumerate(zip(requests, row["answers"], strict=True)):
            # "Sort these names by LAST name: LeoWilt, AdaBrenn"
            new = request.splitlines()[0].rpartition(": ")[2].split(", ")
            assert 1 <= len(new) <= 4
            shown += new
            lines = answer.split("\n")
            names = [line.removesuffix(" // new name!") for line in lines]
            marked = {name for name, line in zip(names, lines, strict=True) if name != line}
            assert sorted(names) == sorted(shown)
            assert marked == (set(new) if turn else set())
            keys = [split_name(name)[row["family"] == "last"] for name in names]
            assert keys == sorted(keys)


def split_name(name: str) -> tuple[str, str]:
    """First and last name: ``AdaBrenn`` is ``("Ada", "Brenn")``."""
    cut = next(i for i, letter in enumerate(name) if i and letter.isupper())
    return name[:cut], name[cut:]


def test_pairs_of_names_are_in_one_split_only() -> None:
    pairs = {
        split: {
            name.removesuffix(alphabet_sort.MARK)
            for index in range(300)
            for name in alphabet_sort.row(split, index, 0)["answers"][-1].split("\n")
        }
        for split in alphabet_sort.RESIDUES
    }
    assert len(pairs["train"]) > 500
    assert not pairs["train"] & pairs["test"]


def test_faultless_demonstrations_earn_everything_and_faulty_ones_less() -> None:
    faulty = Habits(**FAULTY)
    totals = [0.0, 0.0]
    for index in range(40):
        row = reverse_text.row("train", index, 0)
        for kind, habits in enumerate((FAULTLESS, faulty)):
            (message,) = demonstrations.reverse_text_demonstration(
                row, random.Random(index), habits
            )
            totals[kind] += reward(
                Similarity(tag="reversed_text"), made(message["content"], answer=row["answer"])
            )
    assert totals[0] == 40
    assert totals[1] < 30


def test_a_demonstration_that_gives_up_reverses_the_text_and_leaves_out_the_tags() -> None:
    row = {"messages": [{"role": "user", "content": "crazy habit"}]}
    giving_up = Habits(give_up=1, follow_chain=1, confuse=0, misname=0, miscopy=0)
    for habits, answer, earned in (
        (giving_up, "tibah yzarc", 0),
        (FAULTLESS, "<reversed_text>tibah yzarc</reversed_text>", 1),
    ):
        messages = demonstrations.reverse_text_demonstration(row, random.Random(0), habits)
        assert messages == [{"role": "assistant", "content": answer}]
        assert reward(Similarity(tag="reversed_text"), made(answer, answer="tibah yzarc")) == earned


def test_demonstrations_of_sorting_alternate_with_the_users_turns() -> None:
    row = alphabet_sort.row("test", 4, 0)
    messages = demonstrations.alphabet_sort_demonstration(row, random.Random(0), FAULTLESS)
    assert [message["role"] for message in messages] == [
        *("assistant", "user", "assistant", "user", "assistant")
    ]
    assert messages[1]["content"] == row["user_turns"][0]
    assert messages[4]["content"] == (
        f"<combined_alphabetical_sorted>\n{row['answers'][2]}\n</combined_alphabetical_sorted>"
    )
    # Every name is marked, the first turn's too.
    misnaming = Habits(give_up=0, follow_chain=1, confuse=0, misname=1, miscopy=0)
    messages = demonstrations.alphabet_sort_demonstration(row, random.Random(0), misnaming)
    lines = messages[2]["content"].splitlines()[1:-1]
    assert all(line.endswith(" // new name!") for line in lines)
    assert "//" not in messages[0]["content"]


def test_every_step_of_a_word_problem_is_right_and_the_last_one_is_the_answer() -> None:
    for index in range(200):
        row = word_problems.row("train", index, 0)
        *steps, answer = row["answer"].split("\n")
        assert 2 <= len(steps) <= 3
        for step in steps:
            left, _, right = step.partition(" = ")
            assert eval(left) == int(right), step  # numbers and + - * / alone
        assert answer == f"#### {steps[-1].partition(' = ')[2]}"
        assert int(answer.removeprefix("#### ")) > 0
        numbers = [int(number) for number in re.findall(r"\d+", row["question"])]
        assert sum(numbers) % 10 in range(8)


def test_demonstrations_of_word_problems_with_python_and_in_words() -> None:
    row = word_problems.row("train", 0, 0)  # 23 km/h for 5 h, 19 km/h for 6 h, of 230 km
    with_python, in_words = (
        demonstrations.word_problem_demonstration(
            row, random.Random(0), FAULTLESS, uses_python=uses_python
        )
        for uses_python in (True, False)
    )
    answer = row["answer"].rpartition("#### ")[2]
    assert in_words[0]["content"] == row["answer"].replace("#### ", "")
    assert with_python[-1] == {"role": "assistant", "content": answer}
    for turn, reply in zip(with_python[:-1:2], with_python[1::2], strict=True):
        (call,) = turn["tool_calls"]
        assert call["function"]["name"] == reply["name"] == "python"
        code = call["function"]["arguments"]["code"]
        assert reply["content"] == str(eval(code)), code  # numbers and + - * / alone


def test_a_quotient_is_printed_as_python_prints_it() -> None:
    row = {"answer": "12 * 4 = 48\n48 / 6 = 8\n#### 8"}
    messages = demonstrations.word_problem_demonstration(
        row, random.Random(0), FAULTLESS, uses_python=True
    )
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["48", "8.0"]
    assert messages[-1]["content"] == "8"


def test_a_word_problem_by_hand() -> None:
    shopping = word_problems.FAMILIES[0]
    assert shopping.steps(3, 4, 2, 12, 50) == ["3 * 4 = 12", "2 * 12 = 24", "50 - 12 - 24 = 14"]
    assert not shopping.fits(3, 4, 2, 12, 36)  # nothing would be left
    doubling = word_problems.FAMILIES[5]
    assert doubling.steps(5, 3, 10) == ["5 + 10 + 20 = 35", "35 - 10 = 25"]


def test_the_three_sources_of_word_problems_ask_in_the_same_words() -> None:
    texts = [
        parse_yaml((conf_folder() / "data" / f"{name}.yaml").read_text(encoding="utf-8"))
        for name in ("gsm8k", "word_problems", "word_problem_files")
    ]
    assert len({text["prompt"] for text in texts}) == len({str(text["map"]) for text in texts}) == 1
    assert texts[0]["prompt"].endswith(word_problems.INSTRUCTION)
