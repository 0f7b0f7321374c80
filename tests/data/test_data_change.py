"""Columns mapped, prompts filled in, system messages, and rows held out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.data.build import build_tasks
from agenttrain.data.config import DataConfig
from agenttrain.data.files import BadRow
from agenttrain.data.tasks import to_task
from agenttrain.data.transform import RowCheck, RowTransform, hold_out
from agenttrain.types import Message
from agenttrain.utils.expressions import compiled
from agenttrain.utils.text_templates import TextTemplate

QUESTION = {"question": "2+2?", "solution": "2 and 2 #### 4"}


def messages(row: dict, **data: object) -> list[Message]:
    return list(to_task(RowTransform(DataConfig(**data))(row), 0).messages)


class List(list):
    """A dataset that a user wrote."""


def rows_of(values: list[dict]) -> List:
    return List(values)


def built(values: list[dict], **data: object):
    section = {"_target_": f"{__name__}.rows_of", "values": values}
    return build_tasks(DataConfig(train=section, test=section, **data), seed=0)


def test_columns_are_mapped_and_the_others_stay():
    change = RowTransform(
        DataConfig(
            map={
                "answer": "split(solution, '#### ')[-1]",
                "messages": "[{role: 'user', content: question}]",
                "nothing": "missing",
            }
        )
    )
    assert change(QUESTION) == {
        **QUESTION,
        "answer": "4",
        "messages": [{"role": "user", "content": "2+2?"}],
    }


def test_a_prompt_is_filled_in_and_latex_is_left_alone():
    text = "{{ question }} Put it in \\boxed{answer}. {{ n | length }}"
    assert messages({"question": "{{ x }}", "n": [1, 2], "answer": 4}, prompt=text) == [
        {"role": "user", "content": "{{ x }} Put it in \\boxed{answer}. 2"}
    ]


def test_a_system_message_is_put_before_those_without_one():
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    assert messages({"prompt": "q"}, system="Be brief.") == expected
    assert messages({"messages": expected[1:]}, system="Be brief.") == expected
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "q"}]
    assert messages({"messages": own}, system="Be brief.") == own


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
    ),
    st.text(),
)
def test_mapping_a_column_to_itself_changes_nothing(row, prompt):
    change = RowTransform(DataConfig(map={name: name for name in row}))
    given_row = {**row, "messages": [{"role": "user", "content": prompt}]}
    kept = {name: value for name, value in given_row.items() if value is not None}
    assert change(given_row) == kept
    assert change(change(given_row)) == kept


def test_text_parts_are_joined_and_other_parts_refused():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    assert messages({"prompt": [{"role": "user", "content": parts}]})[0]["content"] == "2+2?"
    with pytest.raises(ValueError, match="names an image that the column 'images' does not have"):
        messages({"prompt": [{"role": "user", "content": [*parts, {"type": "image"}]}]})


def test_a_list_that_is_a_text_is_not_asked_as_a_question():
    row = {"messages": '[{"role": "user", "content": "q"}]'}
    with pytest.raises(BadRow, match=r"data.map.messages='from_json\(messages\)'"):
        messages(row)
    assert messages(row, map={"messages": "from_json(messages)"})[0]["content"] == "q"
    assert messages({"prompt": "[{ is how lists begin"})[0]["content"] == "[{ is how lists begin"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"map": {"answer": "length(n)"}}, r"^data.map.answer='length\(n\)': In function length"),
        ({"map": {"answer": "from_json(question)"}}, r"^data.map.answer='from_json\(question\)': "),
        ({"prompt": "{{ qestion }}"}, r"data.prompt has {{ qestion }}, .* \(did you mean 'questio"),
        ({"prompt": "{{ n.a.b }}"}, r"^data.prompt: 'int object' has no attribute 'a'"),
    ],
)
def test_what_does_not_fit_a_row_is_told_with_the_setting(data, said):
    with pytest.raises(BadRow, match=said):
        RowTransform(DataConfig(**data))({**QUESTION, "n": 3})


def test_functions_that_columns_need():
    row = {"a": "x #### 12", "b": "so \\boxed{7}!"}
    assert compiled("to_number(split(a, '#### ')[-1])", "k").search(row) == 12
    assert compiled("match(b, 'boxed.([0-9]+)')", "k").search(row) == "7"
    assert compiled("match(b, '[a-z]+')", "k").search(row) == "so"
    assert compiled("match(b, '[A-Z]')", "k").search(row) is None
    with pytest.raises(ValueError, match=r"missing \)"):
        compiled("match(b, '(')", "k").search(row)


def test_a_template_cannot_reach_into_python():
    with pytest.raises(ValueError, match=r"data.prompt: access to attribute '__class__'"):
        TextTemplate("{{ a.__class__.__mro__ }}", "data.prompt").fill({"a": 1})


def test_a_mapping_that_finds_nothing_is_misspelt():
    with pytest.raises(ValueError, match=r"data.map.answer=solutoin: finds nothing in any row"):
        built([{"prompt": "q", "solution": 1}], map={"answer": "solutoin"})
    some = built([{"prompt": "q", "a": 1}, {"prompt": "r"}], map={"answer": "a"})
    assert [task.columns.get("answer") for task in some.train.tasks(0, 2)] == [1, None]


def test_rows_held_out_are_the_same_whatever_their_order_and_the_runs_seed():
    rows = [{"prompt": f"q{number}", "n": number} for number in range(200)]

    def held_out(values: list[dict], seed: int = 0) -> set[int]:
        splits = built(values, test_fraction=0.25, test_seed=seed)
        train = {task.columns["n"] for task in splits.train.tasks(0, len(splits.train))}
        test = {task.columns["n"] for task in splits.test.tasks(0, len(splits.test))}
        assert (train & test, train | test) == (set(), {row["n"] for row in values})
        return test

    test = held_out(rows)
    assert held_out(rows[::-1]) == test
    assert held_out([*rows, {"prompt": "new", "n": 200}]) - {200} == test
    assert held_out(rows, seed=1) != test
    # 200 draws of 1/4: 50 with a standard deviation of 6.1
    assert 25 < len(test) < 75


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30),
    st.floats(0.05, 0.95),
    st.integers(0, 3),
)
def test_rows_that_ask_the_same_are_on_one_side(keys, fraction, seed):
    found = RowCheck(good=list(range(len(keys))), keys=keys)
    try:
        train, test = hold_out(found, fraction, seed)
    except ValueError as error:
        assert "leaves no row for" in str(error)
        return
    assert sorted(train + test) == found.good
    assert not {keys[index] for index in train} & {keys[index] for index in test}


def test_a_share_that_leaves_a_side_empty():
    with pytest.raises(ValueError, match=r"leaves no row for (training|evaluation), of 1; change"):
        built([{"prompt": "q"}], test_fraction=0.5)


def test_the_number_of_rows_held_out_is_told():
    rows = [{"prompt": f"q{number}"} for number in range(100)]
    splits = built(rows, test_fraction=0.2)
    assert splits.notes == (
        f"data.test_fraction=0.2: {len(splits.test)} of 100 rows are held out for evaluation",
    )


def test_generated_rows_are_changed_as_they_come():
    section = {"_target_": "agenttrain.data.bundled.shop.row", "split": "test", "seed": 0}
    config = DataConfig(train=section, test=section, system="Be brief.", map={"n": "hops"})
    (task,) = build_tasks(config, seed=0).train.tasks(5, 1)
    assert task.messages[0] == {"role": "system", "content": "Be brief."}
    assert task.columns["n"] == task.columns["hops"]
