#!/bin/bash
cat > /app/rows.py <<'PY'
"""Rows of comma-separated text."""


def split_row(line):
    """Return the fields of a line; a field in double quotes may hold commas, and "" for a quote."""
    fields, field, quoted, previous = [], "", False, ""
    for character in line:
        if character == '"':
            if not quoted and previous == '"':
                field += '"'
            quoted = not quoted
        elif character == "," and not quoted:
            fields.append(field)
            field = ""
        else:
            field += character
        previous = character
    return [*fields, field]
PY
