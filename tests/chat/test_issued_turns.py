"""Two conversations are taken for one only if all their messages are the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agenttrain.chat.wire.issued_turns import canonical_bytes

# Contents that look like the end of one message and the beginning of the next.
contents = st.sampled_from(
    ["", "a", "'", '"', "', None)", "('user', 'a', None)", "', None)('user', 'a", '[["c", "f", ']
) | st.text(alphabet="'\"(),[]\\", max_size=6)
calls = st.builds(
    lambda name, value: {
        "id": "call_0",
        "type": "function",
        "function": {"name": name, "arguments": {"x": value}},
    },
    contents,
    contents | st.booleans() | st.integers(0, 1),
)
messages = st.builds(lambda content: {"role": "user", "content": content}, contents) | st.builds(
    lambda content, made: {"role": "assistant", "content": content, "tool_calls": made},
    contents,
    st.lists(calls, max_size=2),
)


@given(first=st.lists(messages, max_size=3), second=st.lists(messages, max_size=3))
def test_bytes_of_a_conversation_are_those_of_no_other_conversation(first, second):
    parts = [[canonical_bytes(message) for message in sent] for sent in (first, second)]
    assert (b"".join(parts[0]) == b"".join(parts[1])) == (parts[0] == parts[1])
