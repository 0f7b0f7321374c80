"""Rows of comma-separated text."""


def split_row(line):
    """Return the fields of a line; a field in double quotes may hold commas, and "" for a quote."""
    fields, field, quoted = [], "", False
    for character in line:
        if character == '"':
            quoted = not quoted
        elif character == ",":
            fields.append(field)
            field = ""
        else:
            field += character
    return [*fields, field]
